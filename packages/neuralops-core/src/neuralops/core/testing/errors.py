"""The error of a result against the float64 oracle, and how large it may be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """The largest error ratio ``rms(x - ref) / rms(ref)`` of outputs and of gradients."""

    output: float
    gradient: float


TOLERANCES = {
    torch.float64: Tolerance(1e-11, 1e-11),
    torch.float32: Tolerance(1e-5, 2e-5),
    torch.float16: Tolerance(1.5e-3, 3e-3),
    torch.bfloat16: Tolerance(6e-3, 1.2e-2),
}

LARGEST = 4.0
"""How many times the tolerated ratio a single element may be off, in units of max(|ref|)."""


@dataclass(frozen=True)
class Error:
    """The error of one quantity.

    Attributes:
        quantity: ``"output"``, ``"final_state"`` or ``"grad <argument>"``.
        ratio: ``rms(x - ref) / rms(ref)``.
        largest: ``max(|x - ref|) / max(|ref|)``.
        bound: the tolerated ratio; ``largest`` may be :data:`LARGEST` times as much.
    """

    quantity: str
    ratio: float
    largest: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether both errors are within their bounds; NaN is not."""
        return self.ratio <= self.bound and self.largest <= LARGEST * self.bound

    def __str__(self) -> str:
        return (
            f"{self.quantity}: rms ratio {self.ratio:.2e}, largest {self.largest:.2e}, "
            f"bound {self.bound:.2e}"
        )


def measure(actual: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Return the rms ratio and the largest error of ``actual``, both in float64.

    NaN or infinity where the reference is finite is an infinite error. Where the reference is
    zero throughout, anything but zero is.

    Raises:
        ValueError: the shapes differ.
    """
    if actual.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)} against {tuple(reference.shape)}")
    if reference.numel() == 0:
        return 0.0, 0.0
    wide = torch.complex128 if reference.is_complex() else torch.float64
    actual, reference = actual.to(wide), reference.to(actual.device, wide)
    difference = (actual - reference).abs()
    if not bool(torch.isfinite(difference).all()):
        return math.inf, math.inf
    if not bool(reference.any()):
        error = math.inf if bool(difference.any()) else 0.0
        return error, error
    rms = difference.square().mean().sqrt() / reference.abs().square().mean().sqrt()
    return float(rms), float(difference.max() / reference.abs().max())


def compare(quantity: str, actual: torch.Tensor, reference: torch.Tensor, bound: float) -> Error:
    """Return the error of ``actual`` against ``reference``, to be held against ``bound``."""
    return Error(quantity, *measure(actual, reference), bound)
