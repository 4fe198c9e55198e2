"""What the operator declares about itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from neuralops.core.operator import Implementation, Operator
from neuralops.core.suitability import triton_reasons

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


OPERATOR = Operator(
    name="hgrn2_scan",
    family="ssm",
    function="neuralops.ssm.hgrn2.api:hgrn2_scan",
    implementations=(
        Implementation("triton", "neuralops.ssm.hgrn2.triton_impl:scan", _triton_reasons),
        Implementation("torch", "neuralops.ssm.hgrn2.torch_impl:scan"),
        Implementation("reference", "neuralops.ssm.hgrn2.reference:scan", automatic=False),
    ),
)
