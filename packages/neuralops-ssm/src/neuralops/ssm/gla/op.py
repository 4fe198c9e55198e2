"""What the operator declares about itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from neuralops.core.operator import Arguments, Implementation, Operator, Sample, Workload
from neuralops.ssm.gla import reference, torch_impl, triton_impl
from neuralops.ssm.library import UNPROVEN_KERNELS

Tensor = torch.Tensor


def _inputs(
    batch: int,
    length: int,
    heads: int,
    widths: tuple[int, int],
    *,
    states: int = 0,
    scalar: bool = False,
    least: float | None = None,
    log_decay: bool = False,
    normalize: bool = False,
    signed: bool = False,
    strided: bool = False,
    cu_seqlens: Sequence[int] | None = None,
    gate_dtype: torch.dtype | None = None,
    **options: Any,
) -> Callable[[torch.device, torch.dtype, torch.Generator], Arguments]:
    """A maker of inputs.

    Gates are mostly near 1 with some exactly 0 and exactly 1 among them; with ``least`` they are
    spread evenly over [least, 1]. With ``normalize``, queries and keys are positive unless
    ``signed``.
    """

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        tokens, (key_width, value_width) = (batch, heads, length), widths
        q, k = normal(*tokens, key_width), normal(*tokens, key_width)
        v = normal(*tokens, value_width)
        if normalize and not signed:
            q, k = q.abs() + 0.1, k.abs() + 0.1
        shape = tokens if scalar else (*tokens, key_width)
        gate = torch.rand(shape, generator=generator)
        if least is None:
            gate = gate**0.05
            gate = gate.masked_fill(torch.rand(shape, generator=generator) < 0.01, 0.0)
        else:
            gate = least + (1 - least) * gate
        gate = gate.masked_fill(torch.rand(shape, generator=generator) < 0.01, 1.0)
        gate = gate.log() if log_decay else gate
        q, k, v = (x.to(device, dtype) for x in (q, k, v))
        gate = gate.to(device, torch.promote_types(dtype, gate_dtype or dtype))
        if strided:
            fused = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], 2)
            q, k, v = (
                x.unflatten(2, (heads, -1)).transpose(1, 2)
                for x in fused.split([heads * w for w in (key_width, key_width, value_width)], 2)
            )
            if not scalar:
                gate = gate.transpose(1, 2).contiguous().transpose(1, 2)
        arguments: dict[str, Any] = dict(options, log_decay=log_decay, normalize=normalize)
        if states:
            wide = torch.promote_types(dtype, torch.float32)
            state = normal(states, heads, key_width, value_width).to(device, wide)
            key_sum = normal(states, heads, key_width).abs().to(device, wide)
            arguments["initial_state"] = (state, key_sum) if normalize else state
            arguments["return_final_state"] = True
        if cu_seqlens is not None:
            arguments["cu_seqlens"] = torch.tensor(cu_seqlens, device=device, dtype=torch.int32)
        return (q, k, v, gate), arguments

    return make


def _large(
    batch: int, length: int, heads: int, width: int
) -> Callable[[torch.device, torch.dtype, torch.Generator], Arguments]:
    """A maker of inputs for benchmarks, drawn on the device: logarithms of gates near 1."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        on_device = torch.Generator(device).manual_seed(generator.initial_seed())
        shape = (batch, heads, length, width)

        def normal() -> Tensor:
            return torch.randn(shape, generator=on_device, device=device, dtype=dtype)

        gate = torch.nn.functional.logsigmoid(normal()).div_(16)
        return (normal(), normal(), normal(), gate), {"log_decay": True, "scale": width**-0.5}

    return make


def _sample(label: str, batch: int, length: int, heads: int = 2, **options: Any) -> Sample:
    widths = options.pop("widths", (16, 24))
    device = "cuda" if length > 2048 else None
    make = _inputs(batch, length, heads, widths, **options)
    return Sample(label, make, length, sensitive=bool(options.get("signed")), device=device)


def _workload(
    batch: int,
    length: int,
    heads: int,
    width: int,
    *,
    device: str = "cuda",
    series: str | None = None,
) -> Workload:
    label = f"B{batch} L{length} H{heads} D{width}"
    make = _large(batch, length, heads, width)
    return Workload(label, make, length, device=device, series=series)


_PACKED = (0, 0, 15, 15, 16, 80, 120)

OPERATOR = Operator(
    name="gla_scan",
    family="ssm",
    function="neuralops.ssm.gla.api:gla_scan",
    implementations=(
        Implementation(
            "triton", triton_impl.scan, triton_impl.reasons, provisional=UNPROVEN_KERNELS
        ),
        Implementation("torch", torch_impl.scan),
        Implementation("reference", reference.scan, automatic=False),
    ),
    samples=(
        _sample("L64", 2, 64, widths=(32, 32)),
        _sample("empty", 2, 0, states=2),
        _sample("one token", 2, 1, states=2),
        _sample("one channel", 2, 65, widths=(1, 1), states=2),
        _sample("D8 to D24 log", 1, 63, widths=(8, 24), states=1, log_decay=True),
        _sample("L130 reverse", 1, 130, states=1, reverse=True),
        _sample("normalised", 2, 70, states=2, normalize=True, scale=0.3),
        _sample("normalised reverse log", 1, 130, normalize=True, reverse=True, log_decay=True),
        _sample("denominators near 0", 1, 65, states=1, normalize=True, signed=True),
        _sample("packed", 1, 128, states=6, cu_seqlens=_PACKED, scale=0.25),
        _sample("packed reverse", 1, 120, states=6, cu_seqlens=_PACKED, reverse=True),
        _sample("packed normalised", 1, 128, states=6, cu_seqlens=_PACKED, normalize=True),
        _sample("packed, no states", 1, 128, cu_seqlens=_PACKED),
        _sample("gates from 0", 1, 128, widths=(40, 16), least=0.0),
        _sample("gates from 0 log", 1, 128, widths=(16, 40), least=0.0, log_decay=True),
        _sample("gates from 0.5", 1, 100, states=1, least=0.5),
        _sample("gates from 0.9", 1, 130, states=1, least=0.9, normalize=True),
        _sample("gates from 0.9 log", 1, 130, widths=(72, 40), least=0.9, log_decay=True),
        _sample("strided", 2, 65, strided=True),
        _sample("gates in float32", 2, 65, gate_dtype=torch.float32),
        _sample("scalar gates", 2, 70, states=2, scalar=True),
        _sample("scalar gates log", 1, 130, scalar=True, log_decay=True, reverse=True),
        _sample("scalar gates, normalised", 1, 65, scalar=True, normalize=True, states=1),
        _sample("scalar gates, packed", 1, 128, states=6, scalar=True, cu_seqlens=_PACKED),
        _sample("L700 D64", 1, 700, widths=(64, 64), states=1, log_decay=True),
        _sample("L1500 D100 to D72", 1, 1500, widths=(100, 72), states=1, scale=0.1),
        _sample("L300 D256", 1, 300, 1, widths=(256, 256), states=1, scale=0.0625),
        _sample("L4096 D128", 1, 4096, 4, widths=(128, 128), states=1, log_decay=True),
        _sample(
            "L4096 packed",
            1,
            4096,
            widths=(64, 64),
            states=6,
            log_decay=True,
            cu_seqlens=(0, 9, 9, 999, 1000, 3000, 4000),
        ),
        _sample("L32768", 1, 32768, 1, widths=(64, 64), states=1, log_decay=True),
        _sample("L32768 normalised reverse", 1, 32768, 1, normalize=True, reverse=True),
    ),
    workloads=(
        _workload(8, 2048, 16, 64),
        _workload(4, 4096, 16, 128),
        _workload(1, 32768, 16, 128),
        *(_workload(1, 1024 * 4**i, 16, 128, series="B1 H16 D128") for i in range(5) if i != 2),
        _workload(1, 128, 16, 128),
        _workload(2, 1024, 8, 64, device="cpu"),
    ),
    peers={"fla": "neuralops.ssm.gla.peers:fla"},
)
