"""Which dtypes are accepted, and in which one states and sums are kept."""

from __future__ import annotations

import torch

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def state_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """Return float64 where one of ``tensors`` is float64, float32 otherwise."""
    if any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors):
        return torch.float64
    return torch.float32
