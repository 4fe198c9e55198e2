"""What the operator declares about itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from neuralops.core.operator import Arguments, Implementation, Operator, Sample, Workload
from neuralops.core.suitability import triton_reasons
from neuralops.core.testing import uniform
from neuralops_toy import torch_impl, triton_impl


def _inputs(length: int) -> Callable[[torch.device, torch.dtype, torch.Generator], Arguments]:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        x, gate = (
            uniform((length, 64), -1, 1, device=device, dtype=dtype, generator=generator)
            for _ in range(2)
        )
        return (x, gate), {}

    return make


def _triton_reasons(x: torch.Tensor, gate: torch.Tensor) -> Sequence[str]:
    return triton_reasons(x, gate)


OPERATOR = Operator(
    name="toy_gate",
    family="toy",
    function="neuralops_toy.api:toy_gate",
    implementations=(
        Implementation("triton", triton_impl.gate, _triton_reasons),
        Implementation("torch", torch_impl.gate),
        Implementation("reference", torch_impl.gate, automatic=False),
    ),
    samples=(Sample("short", _inputs(7), length=7), Sample("long", _inputs(300), length=300)),
    workloads=tuple(
        Workload(f"L{length} D64", _inputs(length), length=length, device=device, series="D64")
        for device in ("cpu", "cuda")
        for length in (256, 1024)
    ),
    peers={
        "eager": "neuralops_toy.peers:eager",
        "forward only": "neuralops_toy.peers:forward_only",
        "missing": "neuralops_toy.peers:missing",
        "broken": "neuralops_toy.peers:broken",
    },
)
