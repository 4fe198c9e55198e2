"""The compile gate, on kernels that fit, that spill, and that take too much shared memory."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("rich")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@needs_triton
def test_kernels_that_fit_pass_for_every_target(toy) -> None:
    result = toy.run("compile_gate", "--operator", "toy_gate", "--out", "out")
    assert result.code == 0, result.output
    record = json.loads((result.out / "compile_gate.json").read_text())
    made = record["compilations"]
    assert {c["kernel"] for c in made} == {"forward_kernel", "backward_kernel"}
    assert {c["target"] for c in made} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert len(made) == 12
    assert all(c["resources"]["registers"] > 0 and c["resources"]["spilled"] == 0 for c in made)


@needs_triton
def test_all_compiles_every_configuration(toy) -> None:
    arguments = ("compile_gate", "--operator", "toy_gate", "--target", "sm_90", "--out", "out")
    result = toy.run(*arguments, "--all")
    assert result.code == 0, result.output
    made = json.loads((result.out / "compile_gate.json").read_text())["compilations"]
    # 2 kernels, 3 dtypes, sizes that 16 divides
    assert len(made) == 6 and "6 of 6 configurations" in result.output


@needs_triton
@pytest.mark.parametrize(
    ("target", "block", "options"), [("sm_90", 8192, {"maxnreg": 32}), ("gfx942", 65536, {})]
)
def test_a_kernel_that_spills_fails(toy, target: str, block: int, options: dict[str, int]) -> None:
    toy.edit("triton_impl", "BLOCK = 128", f"BLOCK = {block}")
    toy.edit("triton_impl", "OPTIONS: dict[str, int] = {}", f"OPTIONS = {options}")
    result = toy.run("compile_gate", "--operator", "toy_gate", "--target", target)
    assert result.code == 1
    found = [line for line in result.output.splitlines() if line.startswith("FAIL ")]
    assert any(f"toy_gate, backward_kernel, {target}, for L256 D64" in line for line in found)
    assert all("spills" in line for line in found)


@needs_triton
def test_spills_of_provisional_kernels_are_told(toy) -> None:
    toy.edit("triton_impl", "BLOCK = 128", "BLOCK = 8192")
    toy.edit("triton_impl", "OPTIONS: dict[str, int] = {}", 'OPTIONS = {"maxnreg": 32}')
    toy.edit("op", "_triton_reasons),", '_triton_reasons, provisional="new"),')
    result = toy.run("compile_gate", "--operator", "toy_gate", "--target", "sm_90")
    assert result.code == 0, result.output
    assert "provisional: toy_gate, backward_kernel, sm_90" in result.output


@needs_triton
def test_too_much_shared_memory_fails(toy) -> None:
    toy.edit(
        "kernels",
        "    tl.store(out + o, b_x * b_gate, mask=o < size)",
        "    b_x = tl.trans(tl.reshape(b_x, (BLOCK // 64, 64)))\n"
        "    b_x = tl.reshape(tl.exp(b_x.to(tl.float32)), (BLOCK,))\n"
        "    tl.store(out + o, b_x * b_gate, mask=o < size)",
    )
    toy.edit("triton_impl", "BLOCK = 128", "BLOCK = 65536")
    toy.edit("triton_impl", "OPTIONS: dict[str, int] = {}", 'OPTIONS = {"num_warps": 32}')
    result = toy.run("compile_gate", "--operator", "toy_gate", "--target", "sm_80")
    assert result.code == 1
    assert "FAIL toy_gate, forward_kernel, sm_80" in result.output
    assert "of shared memory, sm_80 has 163 KiB" in result.output


@needs_triton
def test_a_kernel_that_does_not_compile_fails(toy) -> None:
    toy.edit("kernels", "b_x * b_gate", "b_x * no_such_name")
    result = toy.run("compile_gate", "--operator", "toy_gate", "--target", "gfx942")
    assert result.code == 1
    assert "FAIL toy_gate, forward_kernel, gfx942" in result.output
    assert "does not compile: " in result.output


@needs_triton
def test_refuses_the_interpreter(toy) -> None:
    result = toy.run("compile_gate", environment={"TRITON_INTERPRET": "1"})
    assert result.code == 2 and "unset it" in result.output


def test_needs_triton(toy, blocked_modules: Callable[..., Path]) -> None:
    path = os.pathsep.join([str(blocked_modules("triton")), str(toy.site)])
    result = toy.run("compile_gate", environment={"PYTHONPATH": path})
    assert result.code == 2 and "pip install 'neuralops-core[triton]'" in result.output
