"""Other libraries' functions with the arguments of :func:`neuralops.ssm.hgrn2_scan`."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def fla(f: Tensor, iv: Tensor, *, log_decay: bool) -> Tensor:
    """flash-linear-attention: ``chunk_hgrn``, and on a CPU its loop over tokens.

    Raises:
        ImportError: fla-core is not installed.
        ValueError: plain gates; it takes logarithms.
    """
    if not log_decay:
        raise ValueError("fla takes the logarithms of the gates: log_decay must be True")
    if f.is_cuda:
        from fla.ops.hgrn import chunk_hgrn as function
    else:
        from fla.ops.hgrn.naive import naive_recurrent_hgrn as function
    h: Tensor = function(iv, f)[0]
    return h
