"""The public function."""

from __future__ import annotations

import torch

from neuralops.core.dispatch import dispatch
from neuralops.core.validation import check_shape, check_tensor
from neuralops_toy.op import OPERATOR


def toy_gate(x: torch.Tensor, gate: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """Return ``x * gate``."""
    check_tensor("toy_gate", "x", x, rank=2, layout="(L, D)")
    check_shape("toy_gate", "gate", gate, x.shape, "(L, D) like x")
    result: torch.Tensor = dispatch(OPERATOR, backend, x, gate)
    return result
