"""What the operator declares about itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from neuralops.core.operator import Arguments, Implementation, Operator, Sample, Workload
from neuralops.ssm.fms import reference
from neuralops.ssm.library import UNPROVEN_KERNELS
from neuralops.ssm.scalar_decay import torch_impl, triton_impl

Tensor = torch.Tensor
Maker = Callable[[torch.device, torch.dtype, torch.Generator], Arguments]


def _decays(heads: int) -> Tensor:
    """One decay for each head: 0.9, exactly 1, exactly 0, then closer and closer to 1."""
    known = torch.tensor([0.9, 1.0, 0.0])[:heads]
    rest = 1.0 - 2.0 ** -torch.arange(1.0, heads - len(known) + 1)
    return torch.cat((known, rest))


def _inputs(
    shape: tuple[int, int, int, int, int],
    *,
    states: int = 0,
    strided: bool = False,
    positive: bool = False,
    cu_seqlens: Sequence[int] | None = None,
    decay: float | None = None,
    **options: Any,
) -> Maker:
    """A maker of inputs ``(B, H, L, Dk, Dv)``."""
    batch, heads, length, width, columns = shape

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        wide = torch.promote_types(dtype, torch.float32)
        q, k = (torch.randn(batch, heads, length, width, generator=generator) for _ in "qk")
        v = torch.randn(batch, heads, length, columns, generator=generator)
        if positive:
            q, k = q.abs(), k.abs()
        q, k, v = (x.to(device, dtype) for x in (q, k, v))
        if strided:
            fused = torch.cat((q, k, v), 3).transpose(1, 2).contiguous().transpose(1, 2)
            q, k, v = fused.split((width, width, columns), 3)
        gate = _decays(heads)
        gate = gate.log() if options.get("log_decay") else gate
        arguments: dict[str, Any] = dict(options)
        if states:
            state = torch.randn(states, heads, width, columns, generator=generator)
            key_sum = torch.rand(states, heads, width, generator=generator) + 0.5
            pair = state.to(device, wide), key_sum.to(device, wide)
            arguments["initial_state"] = pair if options.get("normalize", True) else pair[0]
            arguments["return_final_state"] = True
        if cu_seqlens is not None:
            arguments["cu_seqlens"] = torch.tensor(cu_seqlens, device=device, dtype=torch.int32)
        return (q, k, v, gate.to(device, wide) if decay is None else decay), arguments

    return make


def _large(
    batch: int, heads: int, length: int, width: int, feature_map: str, normalize: bool
) -> Maker:
    """A maker of inputs for benchmarks, drawn on the device, with a decay that is a constant."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        on_device = torch.Generator(device).manual_seed(generator.initial_seed())
        shape = (batch, heads, length, width)
        q, k, v = (
            torch.randn(shape, generator=on_device, device=device, dtype=dtype) for _ in "qkv"
        )
        return (q, k, v, 0.998), {"feature_map": feature_map, "normalize": normalize}

    return make


def _sample(label: str, shape: tuple[int, int, int, int, int], **options: Any) -> Sample:
    device = "cuda" if shape[2] > 2048 or shape[0] * shape[1] > 100 else None
    constants = options.pop("constants", ())
    sensitive = options.pop("sensitive", False)
    return Sample(
        label,
        _inputs(shape, **options),
        shape[2],
        constants=constants,
        sensitive=sensitive,
        device=device,
    )


def _workload(
    batch: int,
    heads: int,
    length: int,
    width: int,
    *,
    device: str = "cuda",
    series: str | None = None,
    feature_map: str = "elu+1",
    normalize: bool = True,
) -> Workload:
    label = f"B{batch} L{length} H{heads} D{width}"
    if not normalize:
        label += f", {feature_map}, no normaliser"
    make = _large(batch, heads, length, width, feature_map, normalize)
    return Workload(label, make, length, device=device, series=series)


_PACKED = (0, 0, 15, 15, 16, 80, 120)
_PLAIN: dict[str, Any] = {"feature_map": "identity", "normalize": False}

OPERATOR = Operator(
    name="fms_scan",
    family="ssm",
    function="neuralops.ssm.fms.api:fms_scan",
    implementations=(
        Implementation(
            "triton", triton_impl.scan, triton_impl.reasons, provisional=UNPROVEN_KERNELS
        ),
        Implementation("torch", torch_impl.scan),
        Implementation("reference", reference.scan, automatic=False),
    ),
    samples=(
        _sample("L64", (2, 2, 64, 16, 16)),
        _sample("constant decays", (1, 4, 65, 24, 32), constants=("decay",)),
        _sample("empty", (2, 3, 0, 8, 5), states=2),
        _sample("one token", (2, 3, 1, 19, 5), states=2),
        _sample("one channel", (1, 3, 17, 1, 1), states=1, normalize=False),
        _sample("L65 log", (1, 4, 65, 19, 24), states=1, log_decay=True),
        _sample("L130 reverse", (1, 3, 130, 19, 8), states=1, reverse=True),
        _sample("relu", (1, 3, 64, 32, 16), states=1, feature_map="relu"),
        _sample("identity", (1, 3, 65, 16, 40), states=1, **_PLAIN),
        _sample("identity, float decay", (1, 2, 65, 16, 16), decay=0.97, reverse=True, **_PLAIN),
        _sample(
            "identity, normalised", (1, 3, 64, 16, 16), feature_map="identity", positive=True
        ),
        _sample(
            "clamped", (1, 3, 64, 8, 8), feature_map="identity", eps=0.5, sensitive=True, states=1
        ),
        _sample("not normalised", (1, 3, 65, 16, 16), normalize=False, scale=0.3, states=1),
        _sample("packed", (1, 3, 128, 19, 8), states=6, cu_seqlens=_PACKED),
        _sample(
            "packed reverse", (1, 3, 120, 8, 19), states=6, cu_seqlens=_PACKED, reverse=True
        ),
        _sample("packed identity", (1, 2, 128, 16, 16), cu_seqlens=_PACKED, **_PLAIN),
        _sample("strided", (2, 3, 65, 24, 8), strided=True),
        _sample("L1000", (1, 4, 1000, 64, 64), states=1),
        _sample("L1000 constant", (1, 4, 1000, 64, 64), states=1, constants=("decay",)),
        _sample("D100", (1, 3, 300, 100, 72), states=1),
        _sample("D128", (1, 3, 500, 128, 128), constants=("decay",)),
        _sample("D256", (1, 2, 200, 256, 256), states=1, constants=("decay",)),
        _sample("D256 gradient of the decay", (1, 2, 200, 256, 200)),
        _sample(
            "L4096 packed", (1, 3, 4096, 64, 64), states=6,
            cu_seqlens=(0, 9, 9, 999, 1000, 3000, 4000),
        ),
        _sample("L8192 D128", (1, 4, 8192, 128, 128), constants=("decay",), states=1),
        _sample("L8192 identity", (1, 4, 8192, 64, 128), states=1, **_PLAIN),
    ),
    workloads=(
        _workload(8, 16, 2048, 64),
        _workload(4, 16, 4096, 128),
        _workload(1, 16, 32768, 128),
        *(_workload(1, 16, 1024 * 4**i, 128, series="B1 H16 D128") for i in range(5) if i != 2),
        _workload(4, 16, 4096, 128, feature_map="identity", normalize=False),
        _workload(1, 16, 128, 64),
        _workload(2, 8, 2048, 64, device="cpu"),
        *(_workload(1, 8, 256 * 4**i, 64, device="cpu", series="B1 H8 D64") for i in range(4)),
    ),
    peers={"fla": "neuralops.ssm.fms.peers:fla"},
)  # fmt: skip
