"""Other libraries' functions with the arguments of :func:`neuralops.ssm.gla_scan`."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def fla(
    q: Tensor, k: Tensor, v: Tensor, lambdas: Tensor, *, scale: float, log_decay: bool
) -> Tensor:
    """flash-linear-attention: ``chunk_gla``, and on a CPU its loop over tokens.

    The loop always scales by ``Dk ** -0.5``.

    Raises:
        ImportError: fla-core is not installed.
        ValueError: plain gates, or another scale on a CPU.
    """
    if not log_decay:
        raise ValueError("fla takes the logarithms of the gates: log_decay must be True")
    arguments = [x.transpose(1, 2) for x in (q, k, v, lambdas)]
    if q.is_cuda:
        from fla.ops.gla import chunk_gla

        out: Tensor = chunk_gla(*arguments, scale=scale)[0]
    else:
        from fla.ops.gla.naive import naive_recurrent_gla

        if scale != q.shape[-1] ** -0.5:
            raise ValueError("fla's loop takes the scale Dk ** -0.5 only")
        out = naive_recurrent_gla(*arguments)[0]
    return out.transpose(1, 2)
