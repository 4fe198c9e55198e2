"""Reads how many registers a compiled kernel takes, what it spills, and its shared memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.nvidia.compiler import get_ptxas


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes.

    ``spilled`` counts bytes on NVIDIA and registers on AMD, where only zero is good anyway.
    """

    registers: int
    spilled: int
    shared_bytes: int
    warps: int


def read_resources(kernel: Any, architecture: object) -> Resources:
    """Return the resources of what ``triton.compile`` returned."""
    if "cubin" in kernel.asm:
        registers, spilled = _read_cubin(kernel.asm, int(str(architecture)))
    else:
        registers, spilled = _read_amdgcn(kernel.asm["amdgcn"])
    return Resources(registers, spilled, kernel.metadata.shared, kernel.metadata.num_warps)


def _read_cubin(asm: Any, capability: int) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(asm["cubin"])
        usage = _output([str(tool), "--dump-resource-usage", str(cubin)])
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    if found["STACK"] + found["LOCAL"] == 0:
        return found["REG"], 0
    return found["REG"], _spilled_bytes(asm["ptx"], capability)


def _spilled_bytes(ptx: str, capability: int) -> int:
    """Ask the assembler what a kernel with a stack spills: mathematical functions have one too."""
    (target,) = re.findall(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        report = _output(
            [get_ptxas(capability).path, "-v", f"--gpu-name={target}", str(source),
             "-o", str(source.with_suffix(".cubin"))]
        )  # fmt: skip
    return sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report)))


def _read_amdgcn(text: str) -> tuple[int, int]:
    found = {name: int(value) for name, value in re.findall(r"\.(\w+_count):\s+(\d+)", text)}
    return found["vgpr_count"], found["vgpr_spill_count"] + found["sgpr_spill_count"]


def _output(command: list[str]) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    return done.stdout
