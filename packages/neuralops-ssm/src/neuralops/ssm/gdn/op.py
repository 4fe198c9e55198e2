"""What the operators declare about themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from neuralops.core.operator import Arguments, Implementation, Operator, Sample, Workload
from neuralops.core.suitability import triton_reasons
from neuralops.ssm.gdn import reference, torch_impl, triton_impl
from neuralops.ssm.library import UNPROVEN_KERNELS

Tensor = torch.Tensor
Make = Callable[[torch.device, torch.dtype, torch.Generator], Arguments]
_PACKED = (0, 0, 15, 15, 16, 80, 120)


def _triton_reasons(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    alpha: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    log_decay: bool,
    normalize_qk: bool,
    nlms: bool,
) -> Sequence[str]:
    reasons = triton_reasons(q, k, v, beta, alpha, initial_state)
    for name, width in (("Dk", q.shape[3]), ("Dv", v.shape[3])):
        if not 1 <= width <= triton_impl.MAX_WIDTH:
            reasons.append(
                f"{name} is {width}, these kernels serve widths from 1 to {triton_impl.MAX_WIDTH}"
            )
    return reasons


def _inputs(
    shape: tuple[int, int, int, int],
    *,
    nlms: bool,
    value_width: int | None = None,
    group: int = 1,
    states: int = 0,
    log_decay: bool = False,
    strided: bool = False,
    cu_seqlens: Sequence[int] | None = None,
    gate_dtype: torch.dtype | None = None,
    **options: Any,
) -> Make:
    """A maker of inputs for ``(B, H, L, Dk)``.

    Decays are mostly near 1, and exactly 0 and exactly 1 here and there. The keys of the gated
    delta rule are of length 1 at most, and its strengths in [0, 2]; those of nlms are of any.
    """

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        batch, heads, length, width = shape
        q, k = (torch.randn(shape, generator=generator) for _ in range(2))
        lengths = torch.rand(*shape[:3], 1, generator=generator)
        if nlms:
            q, k = q * width**-0.5, k * lengths
        elif not options.get("normalize_qk"):
            q = q * width**-0.5
            k = functional.normalize(k, dim=-1) * (1 - 0.5 * lengths)
        v = torch.randn(batch, heads * group, length, value_width or width, generator=generator)
        strength = 2 * torch.rand(v.shape[:3], generator=generator)
        decay = torch.rand(v.shape[:3], generator=generator) ** 0.2
        decay = decay.masked_fill(torch.rand(v.shape[:3], generator=generator) < 0.02, 0.0)
        decay = decay.masked_fill(torch.rand(v.shape[:3], generator=generator) < 0.02, 1.0)
        q, k, v = (x.to(device, dtype) for x in (q, k, v))
        gate = torch.promote_types(dtype, gate_dtype or dtype)
        strength = strength.to(device, gate)
        decay = (decay.log() if log_decay else decay).to(device, gate)
        if strided:
            fused = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], -1)
            parts = fused.split([x.shape[1] * x.shape[3] for x in (q, k, v)], -1)
            q, k, v = (
                part.unflatten(-1, (-1, x.shape[3])).transpose(1, 2)
                for part, x in zip(parts, (q, k, v))
            )
        arguments: dict[str, Any] = dict(options, log_decay=log_decay)
        if states:
            state = torch.randn(states, v.shape[1], width, v.shape[3], generator=generator)
            arguments["initial_state"] = state.to(device, torch.promote_types(dtype, torch.float32))
            arguments["return_final_state"] = True
        if cu_seqlens is not None:
            arguments["cu_seqlens"] = torch.tensor(cu_seqlens, device=device, dtype=torch.int32)
        gates = (decay, strength) if nlms else (strength, decay)
        return (q, k, v, *gates), arguments

    return make


def _large(shape: tuple[int, int, int, int], *, nlms: bool) -> Make:
    """A maker of inputs for benchmarks, drawn on the device: keys of length 1, decays near 1.

    q, k and v are views of ``(B, L, H, D)`` tensors, as layers make them.
    """

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        on_device = torch.Generator(device).manual_seed(generator.initial_seed())

        batch, heads, length, width = shape
        size = (batch, length, heads, width)
        q, k, v = (
            torch.randn(size, generator=on_device, device=device, dtype=dtype).transpose(1, 2)
            for _ in range(3)
        )
        q.mul_(width**-0.5)
        k = functional.normalize(k, dim=-1)
        strength = torch.rand(shape[:3], generator=on_device, device=device)
        decay = torch.rand(shape[:3], generator=on_device, device=device)
        decay = decay.mul_(0.98).add_(0.02).log_().mul_(0.05)
        gates = (decay, strength) if nlms else (strength, decay)
        return (q, k, v, *gates), {"log_decay": True}

    return make


def _samples(nlms: bool) -> tuple[Sample, ...]:
    def sample(label: str, shape: tuple[int, int, int, int], **options: Any) -> Sample:
        device = "cuda" if shape[2] > 1024 else None
        return Sample(label, _inputs(shape, nlms=nlms, **options), shape[2], device=device)

    common = (
        sample("L64 D16", (1, 2, 64, 16)),
        sample("empty", (2, 1, 0, 8), states=2),
        sample("one token", (2, 1, 1, 8), states=2),
        sample("L17 D8 log", (1, 2, 17, 8), states=1, log_decay=True),
        sample("L65 Dk24 Dv10", (1, 1, 65, 24), value_width=10, states=1, scale=0.25),
        sample("grouped 2", (1, 2, 33, 8), group=2, states=1),
        sample("packed", (1, 1, 128, 8), states=6, cu_seqlens=_PACKED),
        sample("packed, no states", (1, 2, 128, 8), cu_seqlens=_PACKED, group=2),
        sample("strided", (2, 2, 20, 16), strided=True),
        sample("gates in float32", (1, 1, 65, 16), gate_dtype=torch.float32, log_decay=True),
        sample("L129 D64", (1, 1, 129, 64), states=1),
        sample("D100", (1, 1, 130, 100), states=1),
        sample("L1000 D64", (1, 2, 1000, 64), states=1, group=2, log_decay=True),
        sample("L4096 D128", (1, 2, 4096, 128), states=1),
        sample("L4096 packed", (1, 2, 4096, 64), states=4, cu_seqlens=(0, 9, 9, 3000, 4000)),
        sample("L2000 D256", (1, 1, 2000, 256), states=1, group=2),
        sample("L2000 D100", (2, 2, 2000, 100), states=2, group=4),
    )
    if nlms:
        return common
    return (
        *common,
        sample("normalized", (1, 1, 65, 16), states=1, normalize_qk=True, group=2),
        sample("normalized, L1025 D64", (1, 2, 1025, 64), states=1, normalize_qk=True),
    )


def _workloads(nlms: bool) -> tuple[Workload, ...]:
    def workload(
        shape: tuple[int, int, int, int], *, device: str = "cuda", series: str | None = None
    ) -> Workload:
        batch, heads, length, width = shape
        label = f"B{batch} L{length} H{heads} D{width}"
        return Workload(label, _large(shape, nlms=nlms), shape[2], device=device, series=series)

    return (
        workload((8, 16, 2048, 64)),
        workload((4, 16, 4096, 128)),
        workload((1, 16, 32768, 128)),
        *(
            workload((1, 16, 1024 * 4**i, 128), series="B1 H16 D128")
            for i in range(5)
            if 1024 * 4**i != 32768
        ),
        workload((1, 16, 128, 128)),
        workload((2, 8, 1024, 64), device="cpu"),
        *(workload((1, 4, 256 * 4**i, 64), device="cpu", series="B1 H4 D64") for i in range(4)),
    )


_IMPLEMENTATIONS = (
    Implementation("triton", triton_impl.scan, _triton_reasons, provisional=UNPROVEN_KERNELS),
    Implementation("torch", torch_impl.scan),
    Implementation("reference", reference.scan, automatic=False),
)

OPERATOR = Operator(
    name="gdn_scan",
    family="ssm",
    function="neuralops.ssm.gdn.api:gdn_scan",
    implementations=_IMPLEMENTATIONS,
    samples=_samples(nlms=False),
    workloads=_workloads(nlms=False),
    peers={
        "fla": "neuralops.ssm.gdn.peers:fla",
        "transformers": "neuralops.ssm.gdn.peers:transformers",
    },
)

NLMS = Operator(
    name="nlms_scan",
    family="ssm",
    function="neuralops.ssm.gdn.api:nlms_scan",
    implementations=_IMPLEMENTATIONS,
    samples=_samples(nlms=True),
    workloads=_workloads(nlms=True),
)
