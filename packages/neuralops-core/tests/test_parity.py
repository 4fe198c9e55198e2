"""The parity instrument, on an operator that is right, and on ones that are wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("rich")
needs_triton = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("triton"), reason="Triton is not installed"
)


@needs_triton
def test_a_right_operator_passes_and_is_recorded(toy) -> None:
    result = toy.run("parity", "--package", "toy", "--out", "out")
    assert result.code == 0, result.output
    record = json.loads((result.out / "parity.json").read_text())
    assert record["passed"]
    assert {run["execution"] for run in record["runs"]} >= {
        "cpu torch", "cpu triton (interpreted)",
    }  # fmt: skip
    assert {run["dtype"] for run in record["runs"]} >= {"fp64", "fp32", "fp16", "bf16"}
    page = (result.out / "parity.md").read_text()
    assert "grad gate" in page and "Hardware:" in page and "parity --package toy" in page


@needs_triton
def test_a_wrong_kernel_turns_it_red(toy) -> None:
    toy.edit("kernels", "b_grad * b_x", "b_grad * b_x * 1.001")
    result = toy.run("parity", "--package", "toy", "--device", "cpu", "--out", "out")
    assert result.code == 1
    found = [line for line in result.output.splitlines() if line.startswith("FAIL ")]
    assert found and all("grad gate" in line and "'short'" in line for line in found)
    assert found[0].startswith("FAIL toy_gate, cpu triton (interpreted), fp32, grad gate")
    assert not json.loads((result.out / "parity.json").read_text())["passed"]


def test_a_wrong_torch_form_is_found_in_every_dtype(toy) -> None:
    toy.edit("op", '"torch", torch_impl.gate', '"torch", lambda x, gate: x * gate + 0.1')
    result = toy.run("parity", "--operator", "toy_gate", "--device", "cpu", "--out", "out")
    assert result.code == 1
    for dtype in ("fp64", "fp32", "fp16", "bf16"):
        assert f"FAIL toy_gate, cpu torch, {dtype}, output, sample 'short'" in result.output


def test_an_implementation_that_raises_is_named(toy) -> None:
    toy.edit("op", '"torch", torch_impl.gate', '"torch", lambda x, gate: x.no_such_method()')
    result = toy.run("parity", "--package", "toy", "--device", "cpu", "--dtype", "fp32")
    assert result.code == 1
    assert "FAIL toy_gate, cpu torch, fp32, sample 'long': raised AttributeError" in result.output


def test_without_triton_and_gpu_their_parts_are_skipped_visibly(
    toy, blocked_modules: Callable[..., Path]
) -> None:
    path = os.pathsep.join([str(blocked_modules("triton")), str(toy.site)])
    result = toy.run(
        "parity", "--package", "toy", environment={"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    )
    assert result.code == 0, result.output
    assert "Triton is not installed" in result.output and "no GPU" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--operator", "nothing"], "unknown operator 'nothing'"),
        (["--package", "nothing"], "package 'nothing' is not installed"),
        (["--dtype", "fp8"], "invalid choice: 'fp8'"),
    ],
)
def test_a_wrong_request_says_so(refused, arguments: list[str], message: str) -> None:
    assert message in refused("parity", *arguments)
