"""The doctor, in the situations that can be had without a GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import neuralops.core

CPU = {"CUDA_VISIBLE_DEVICES": ""}
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def lines_with(output: str, *words: str) -> list[str]:
    return [line for line in output.splitlines() if all(word in line for word in words)]


@needs_triton
def test_on_a_cpu_with_triton(toy) -> None:
    result = toy.run("doctor", environment=CPU)
    assert result.code == 0, result.output
    assert lines_with(result.output, "triton", importlib.metadata.version("triton"))
    assert lines_with(result.output, "neuralops-toy", "0.3.0", "toy_gate")
    assert lines_with(result.output, "toy_gate", "cpu", "torch", "the tensors are on the CPU")
    assert "Triton is not installed" not in result.output
    assert "torch sees no GPU" in result.output and "nothing is broken" in result.output


def test_on_a_cpu_without_triton(toy, blocked_modules: Callable[..., Path]) -> None:
    path = os.pathsep.join([str(blocked_modules("triton")), str(toy.site)])
    result = toy.run("doctor", environment={**CPU, "PYTHONPATH": path})
    assert result.code == 0, result.output
    assert lines_with(result.output, "triton", "absent", "neuralops-core[triton]")
    assert lines_with(result.output, "toy_gate", "torch", "Triton is not installed")
    assert lines_with(result.output, "the tensors are on the CPU"), "every reason is told"


@needs_triton
def test_the_environment_is_explained_but_does_not_change_the_automatic_choice(toy) -> None:
    result = toy.run("doctor", environment={**CPU, "NEURALOPS_BACKEND": "reference"})
    assert lines_with(result.output, "NEURALOPS_BACKEND", "every call", "runs on reference")
    assert lines_with(result.output, "toy_gate", "cpu", "torch")
    result = toy.run("doctor", environment={"TRITON_INTERPRET": "1", "NEURALOPS_BACKEND": "cuda"})
    assert lines_with(result.output, "toy_gate", "cpu", "triton", "it is the fastest")
    assert lines_with(result.output, "NEURALOPS_BACKEND", "every call raises")


def test_without_rich_it_is_plain_text(toy, blocked_modules: Callable[..., Path]) -> None:
    path = os.pathsep.join([str(blocked_modules("rich", "matplotlib")), str(toy.site)])
    result = toy.run("doctor", environment={**CPU, "PYTHONPATH": path})
    assert result.code == 0, result.output
    assert lines_with(result.output, "toy_gate", "cpu", "torch") and "│" not in result.output
    result = toy.run("parity", environment={**CPU, "PYTHONPATH": path})
    assert result.code == 2 and "pip install 'neuralops-core[tools]'" in result.output


def metadata(site: Path) -> None:
    folder = site / "neuralops-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: neuralops\nVersion: 0.1.0\n")
    (folder / "RECORD").write_text("neuralops/__init__.py,,\nneuralops/core/__init__.py,,\n")


def test_the_reference_package_is_a_conflict(toy) -> None:
    metadata(toy.site)
    result = toy.run("doctor", environment=CPU)
    assert result.code == 1
    assert lines_with(result.output, "neuralops", "0.1.0", "CONFLICT")
    assert "pip uninstall neuralops neuralops-core" in result.output


def test_the_reference_package_above_ours_says_what_to_run(toy) -> None:
    metadata(toy.site)
    (core,) = neuralops.core.__path__
    shutil.copytree(core, toy.site / "neuralops" / "core")
    (toy.site / "neuralops" / "__init__.py").write_text("")
    result = toy.run("doctor", environment=CPU)
    assert result.code == 1
    assert "ImportError: the distribution 'neuralops'" in result.output
    assert "pip uninstall neuralops neuralops-core" in result.output


def test_an_operator_that_cannot_be_imported_is_broken(toy) -> None:
    toy.edit("op", "from __future__ import annotations", "import no_such_module")
    result = toy.run("doctor", environment=CPU)
    assert result.code == 1 and lines_with(result.output, "toy_gate", "FAIL", "no_such_module")


def test_an_operator_that_cannot_be_explained_is_broken(toy) -> None:
    toy.edit("api", 'check_tensor("toy_gate"', 'check_tenser("toy_gate"')
    result = toy.run("doctor", environment=CPU)
    assert result.code == 1 and lines_with(result.output, "toy_gate", "FAIL", "NameError")
