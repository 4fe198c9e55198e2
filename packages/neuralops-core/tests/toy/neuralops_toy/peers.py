"""Peers of every kind: one that works, one without a backward, one absent, one that fails."""

from __future__ import annotations

import torch


def eager(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Work."""
    return torch.mul(x, gate)


class _ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * gate

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no backward here")


def forward_only(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Refuse the backward."""
    result: torch.Tensor = _ForwardOnly.apply(x, gate)
    return result


def missing(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Be absent."""
    import a_library_that_is_not_installed

    result: torch.Tensor = a_library_that_is_not_installed.gate(x, gate)
    return result


def broken(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Fail."""
    raise RuntimeError("out of order")
