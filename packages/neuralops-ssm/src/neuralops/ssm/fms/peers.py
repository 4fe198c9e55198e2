"""Other libraries' functions with the arguments of :func:`neuralops.ssm.fms_scan`."""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor


def fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: float,
    *,
    feature_map: str = "elu+1",
    normalize: bool = True,
) -> Tensor:
    """flash-linear-attention: ``chunk_simple_gla`` with a constant decay.

    It has neither feature map nor normaliser and is timed without them: it does less than
    `fms_scan` with its defaults. Its layout is ``(B, L, H, D)``.

    Raises:
        ImportError: fla-core is not installed, or the tensors are on a CPU, where it has no kernel.
    """
    if not q.is_cuda:
        raise ImportError("fla has no chunk_simple_gla for a CPU")
    from fla.ops.simple_gla import chunk_simple_gla

    logs = torch.full((q.shape[1],), math.log(decay), device=q.device)
    out: Tensor = chunk_simple_gla(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), g_gamma=logs
    )[0]
    return out.transpose(1, 2)
