"""Checks of arguments, before any kernel runs and the same on every backend.

Every message names the operator and the argument, what was expected, and what came.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Sequence
from itertools import pairwise

import torch

from neuralops.core.precision import FLOATING


def describe(value: object) -> str:
    """What a message says of a value that is not what was expected."""
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    return f"{type(value).__name__} {reprlib.repr(value)}"


def check_tensor(operator: str, name: str, value: object, *, rank: int, layout: str) -> None:
    """Check that ``value`` is a floating tensor of ``rank`` dimensions.

    Raises:
        TypeError: not a tensor, or not of a floating dtype.
        ValueError: another rank.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{operator}: {name} must be a tensor {layout}, got {describe(value)}")
    if value.layout != torch.strided:
        raise TypeError(
            f"{operator}: {name} must be a dense tensor {layout}, got layout {value.layout}; "
            f"convert it with {name}.to_dense()"
        )
    if value.dtype not in FLOATING:
        raise TypeError(
            f"{operator}: {name} must be float16, bfloat16, float32 or float64, got {value.dtype}; "
            f"convert it, for example with {name}.float()"
        )
    if value.dim() != rank:
        raise ValueError(
            f"{operator}: {name} must have shape {layout}, got shape {tuple(value.shape)}"
        )


def check_shape(
    operator: str, name: str, value: torch.Tensor, expected: Sequence[int], layout: str
) -> None:
    """Check that ``value`` has the ``expected`` shape, which ``layout`` names.

    Raises:
        ValueError: another shape.
    """
    if tuple(value.shape) != tuple(expected):
        raise ValueError(
            f"{operator}: {name} must have shape {layout} = {tuple(expected)}, "
            f"got {tuple(value.shape)}"
        )


def check_device(operator: str, first: str, device: torch.device, **others: object) -> None:
    """Check that every tensor among ``others`` is on ``device``, where the ``first`` one is.

    Raises:
        ValueError: another device.
    """
    for name, other in others.items():
        if isinstance(other, torch.Tensor) and other.device != device:
            raise ValueError(
                f"{operator}: {name} must be on {device} like {first}, got {other.device}; "
                f"move it with {name}.to({str(device)!r})"
            )


def check_flag(operator: str, name: str, value: object) -> None:
    """Check that ``value`` is a bool.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{operator}: {name} must be True or False, got {describe(value)}")


def check_number(operator: str, name: str, value: object) -> None:
    """Check that ``value`` is a Python number, not NaN.

    Raises:
        TypeError: not an int or a float.
        ValueError: NaN.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{operator}: {name} must be a Python number, got {describe(value)}")
    if value != value:
        raise ValueError(f"{operator}: {name} must be a number, got nan")


def check_cu_seqlens(
    operator: str, cu_seqlens: object, *, batch: int, length: int, device: torch.device
) -> None:
    """Check the boundaries of packed sequences: ``(n + 1,)`` int32 or int64 from 0 to at most L.

    The values of a CPU tensor are checked. Those of a CUDA tensor are only with
    ``NEURALOPS_VALIDATE=1`` in the environment, since reading them waits for the device.

    Raises:
        TypeError: not an int32 or int64 tensor.
        ValueError: another rank, an empty tensor, a batch other than 1, another device, or
            values that do not start at 0, decrease, or pass the length.
    """
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype not in (
        torch.int32,
        torch.int64,
    ):
        raise TypeError(
            f"{operator}: cu_seqlens must be an int32 or int64 tensor (n + 1,), "
            f"got {describe(cu_seqlens)}"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(
            f"{operator}: cu_seqlens must have shape (n + 1,), got {tuple(cu_seqlens.shape)}"
        )
    if batch != 1:
        raise ValueError(
            f"{operator}: cu_seqlens packs several sequences into one row, so the batch size must "
            f"be 1, got {batch}; concatenate the sequences along the length"
        )
    check_device(operator, "the other tensors", device, cu_seqlens=cu_seqlens)
    if torch.compiler.is_compiling():
        return
    if device.type == "cpu" or os.environ.get("NEURALOPS_VALIDATE") == "1":
        _check_boundaries(operator, cu_seqlens, length)


def _check_boundaries(operator: str, cu_seqlens: torch.Tensor, length: int) -> None:
    boundaries = cu_seqlens.tolist()
    if boundaries[0] != 0:
        raise ValueError(f"{operator}: cu_seqlens must start at 0, got {boundaries[0]}")
    for i, (start, end) in enumerate(pairwise(boundaries)):
        if end < start:
            raise ValueError(
                f"{operator}: cu_seqlens must not decrease, got {start} then {end} "
                f"at positions {i} and {i + 1}"
            )
    if boundaries[-1] > length:
        raise ValueError(
            f"{operator}: cu_seqlens must end at the length {length} or before, "
            f"got {boundaries[-1]}"
        )
