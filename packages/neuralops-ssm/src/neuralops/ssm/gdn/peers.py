"""Other libraries' functions with the arguments of :func:`neuralops.ssm.gdn_scan`."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def fla(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor, *, log_decay: bool) -> Tensor:
    """flash-linear-attention: ``chunk_gated_delta_rule``, on a CPU its chunked PyTorch function.

    For timing only: on a GPU its backward refuses some releases of Triton, whose code it found
    wrong; the guard is switched off here, and its gradients are not to be relied upon.

    Raises:
        ImportError: fla-core is not installed.
        ValueError: plain gates; it takes logarithms.
    """
    if not log_decay:
        raise ValueError("fla takes the logarithms of the gates: log_decay must be True")
    tokens = {"q": q, "k": k, "v": v, "g": alpha, "beta": beta}
    tokens = {name: x.transpose(1, 2) for name, x in tokens.items()}
    if q.is_cuda:
        import fla.ops.common.chunk_o
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as function

        fla.ops.common.chunk_o.TRITON_ABOVE_3_7_1 = True
        tokens = {name: x.contiguous() for name, x in tokens.items()}
    else:
        from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule as function
    o: Tensor = function(**tokens, scale=1.0)[0]
    return o.transpose(1, 2)


def transformers(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor, *, log_decay: bool
) -> Tensor:
    """transformers: the chunked PyTorch path of its Qwen3-Next layers.

    Raises:
        ImportError: transformers is not installed.
        ValueError: plain gates; it takes logarithms.
    """
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    if not log_decay:
        raise ValueError("transformers takes the logarithms of the gates: log_decay must be True")
    tokens = [x.transpose(1, 2) for x in (q * q.shape[-1] ** 0.5, k, v)]
    gates = {"g": alpha.transpose(1, 2), "beta": beta.transpose(1, 2)}
    o: Tensor = torch_chunk_gated_delta_rule(*tokens, **gates)[0]
    return o.transpose(1, 2)
