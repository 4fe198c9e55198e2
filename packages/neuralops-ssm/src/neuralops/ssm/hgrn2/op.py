"""What the operator declares about itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from neuralops.core.operator import Arguments, Implementation, Operator, Sample, Workload
from neuralops.core.suitability import triton_reasons
from neuralops.ssm.hgrn2 import reference, torch_impl, triton_impl

Tensor = torch.Tensor


def _triton_reasons(
    f: Tensor,
    iv: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    clip: float | None,
    log_decay: bool,
    reverse: bool,
) -> Sequence[str]:
    return triton_reasons(f, iv, initial_state)


def _inputs(
    shape: tuple[int, int, int],
    *,
    states: int = 0,
    log_decay: bool = False,
    strided: bool = False,
    cu_seqlens: Sequence[int] | None = None,
    gate_dtype: torch.dtype | None = None,
    **options: Any,
) -> Callable[[torch.device, torch.dtype, torch.Generator], Arguments]:
    """A maker of inputs: gates mostly near 1, and exactly 0, exactly 1 here and there."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        channels = shape[-1]
        f = torch.rand(shape, generator=generator) ** 0.2
        f = f.masked_fill(torch.rand(shape, generator=generator) < 0.01, 0.0)
        f = f.masked_fill(torch.rand(shape, generator=generator) < 0.01, 1.0)
        iv = torch.randn(shape, generator=generator)
        f, iv = f.log() if log_decay else f, iv
        f, iv = f.to(device, torch.promote_types(dtype, gate_dtype or dtype)), iv.to(device, dtype)
        if strided:
            both = torch.stack((f.to(dtype), iv), dim=2).flatten(2)
            f, iv = both[..., :channels], both[..., channels:]
        arguments: dict[str, Any] = dict(options, log_decay=log_decay)
        if states:
            state = torch.randn(states, channels, generator=generator)
            arguments["initial_state"] = state.to(device, torch.promote_types(dtype, torch.float32))
            arguments["return_final_state"] = True
        if cu_seqlens is not None:
            arguments["cu_seqlens"] = torch.tensor(cu_seqlens, device=device, dtype=torch.int32)
        return (f, iv), arguments

    return make


def _large(
    batch: int, length: int, channels: int, *, forgetting: float = 0.2
) -> Callable[[torch.device, torch.dtype, torch.Generator], Arguments]:
    """A maker of inputs for benchmarks, drawn on the device: logarithms of gates.

    Their mean is about ``-forgetting``.
    """

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        on_device = torch.Generator(device).manual_seed(generator.initial_seed())
        shape = (batch, length, channels)
        f = torch.rand(shape, generator=on_device, device=device, dtype=dtype)
        f = f.mul_(0.98).add_(0.02).log_().mul_(forgetting)
        iv = torch.randn(shape, generator=on_device, device=device, dtype=dtype)
        return (f, iv), {"log_decay": True}

    return make


def _sample(label: str, shape: tuple[int, int, int], **options: Any) -> Sample:
    sensitive = options.get("res_clip") is not None
    device = "cuda" if shape[1] > 2048 else None
    return Sample(label, _inputs(shape, **options), shape[1], sensitive=sensitive, device=device)


def _workload(
    batch: int, length: int, channels: int, *, device: str = "cuda", series: str | None = None
) -> Workload:
    label = f"B{batch} L{length} D{channels}"
    return Workload(label, _large(batch, length, channels), length, device=device, series=series)


def _long_memory(batch: int, length: int, channels: int) -> Workload:
    """Gates so near 1 that a part of a split sequence never forgets what came before it."""
    label = f"B{batch} L{length} D{channels}, long memory"
    return Workload(label, _large(batch, length, channels, forgetting=1e-3), length)


_PACKED = (0, 0, 15, 15, 16, 80, 120)

OPERATOR = Operator(
    name="hgrn2_scan",
    family="ssm",
    function="neuralops.ssm.hgrn2.api:hgrn2_scan",
    implementations=(
        Implementation("triton", triton_impl.scan, _triton_reasons),
        Implementation("torch", torch_impl.scan),
        Implementation("reference", reference.scan, automatic=False),
    ),
    samples=(
        _sample("L64", (2, 64, 19)),
        _sample("empty", (2, 0, 19), states=2),
        _sample("one token", (2, 1, 19), states=2),
        _sample("one channel", (3, 65, 1), states=3),
        _sample("L63 log", (2, 63, 32), states=2, log_decay=True),
        _sample("L130 reverse", (1, 130, 19), states=1, reverse=True),
        _sample("clipped", (2, 65, 19), states=2, res_clip=0.7),
        _sample("clipped reverse log", (1, 130, 7), res_clip=0.7, reverse=True, log_decay=True),
        _sample("packed", (1, 128, 19), states=6, cu_seqlens=_PACKED),
        _sample("packed reverse", (1, 120, 19), states=6, cu_seqlens=_PACKED, reverse=True),
        _sample("packed clipped", (1, 128, 19), states=6, cu_seqlens=_PACKED, res_clip=0.7),
        _sample("packed, no states", (1, 128, 19), cu_seqlens=_PACKED),
        _sample("strided", (2, 65, 24), strided=True),
        _sample("gates in float32", (2, 65, 19), gate_dtype=torch.float32),
        _sample("L2000", (2, 2000, 19), states=2),
        _sample("L2000 clipped", (1, 2000, 64), states=1, res_clip=0.7),
        _sample("L4096 D2048", (1, 4096, 2048), states=1),
        _sample(
            "L4096 packed", (1, 4096, 64), states=6, cu_seqlens=(0, 9, 9, 999, 1000, 3000, 4000)
        ),
        _sample("L32768", (1, 32768, 64), states=1, log_decay=True),
        _sample("L32768 clipped reverse", (1, 32768, 19), states=1, res_clip=0.7, reverse=True),
        _sample("L32768 D2048", (1, 32768, 2048)),
    ),
    workloads=(
        _workload(8, 2048, 2048),
        _workload(1, 32768, 2048),
        _long_memory(1, 32768, 2048),
        _workload(8, 4096, 4096),
        *(_workload(1, 1024 * 4**i, 2048, series="B1 D2048") for i in range(5) if i != 2),
        _workload(1, 128, 64),
        _workload(2, 1024, 1024, device="cpu"),
        *(_workload(1, 256 * 4**i, 512, device="cpu", series="B1 D512") for i in range(4)),
    ),
    peers={"fla": "neuralops.ssm.hgrn2.peers:fla"},
)
