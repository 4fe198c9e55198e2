"""The recurrence in full words: the oracle of every test, differentiable any number of times."""

from __future__ import annotations

from itertools import pairwise

import torch

from neuralops.core.precision import state_dtype

Tensor = torch.Tensor


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    cu_seqlens: Tensor | None,
    feature_map: str,
    query_scale: float,
    key_scale: float,
    normalize: bool,
    eps: float,
    log_decay: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run ``S_t = d S_{t-1} + k'_t v_t^T`` token by token in each sequence.

    The arguments are those of :func:`neuralops.ssm.scalar_decay.torch_impl.scan`. It computes in
    float64 where a tensor is float64, in float32 otherwise.
    """
    dtype = state_dtype(q, k, v, decay, initial_state, initial_key_sum)
    queries = query_scale * _phi(q.to(dtype), feature_map)
    keys = key_scale * _phi(k.to(dtype), feature_map)
    values = v.to(dtype)
    d = (decay.to(dtype).exp() if log_decay else decay.to(dtype)).unsqueeze(-1)

    batch, heads, length, width = q.shape
    columns = v.shape[3]
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state, key_sum = initial_state, initial_key_sum
    if state is None:
        state = values.new_zeros(rows, heads, width, columns)
    if key_sum is None:
        key_sum = values.new_zeros(rows, heads, width)
    state, key_sum = state.to(dtype), key_sum.to(dtype)

    outputs = list((0.0 * values).unbind(2))
    states, key_sums = [], []
    spans = [(0, length)] if cu_seqlens is None else list(pairwise(cu_seqlens.tolist()))
    for i, (start, end) in enumerate(spans):
        own = slice(None) if cu_seqlens is None else slice(i, i + 1)
        S, Z = state[own], key_sum[own]
        for t in reversed(range(start, end)) if reverse else range(start, end):
            S = d.unsqueeze(-1) * S + keys[:, :, t, :, None] * values[:, :, t, None, :]
            Z = d * Z + keys[:, :, t]
            out = (queries[:, :, t, :, None] * S).sum(-2)
            if normalize:
                weight = (queries[:, :, t] * Z).sum(-1, keepdim=True)
                out = out / torch.where(weight >= eps, weight, eps)
            outputs[t] = out
        states.append(S)
        key_sums.append(Z)
    out = torch.stack(outputs, 2) if outputs else 0.0 * values
    final = torch.cat(states) if states else 1.0 * state
    final_key_sum = torch.cat(key_sums) if key_sums else 1.0 * key_sum
    return out.to(v.dtype), final, final_key_sum if normalize else None


def _phi(x: Tensor, feature_map: str) -> Tensor:
    if feature_map == "elu+1":
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
    return x.relu() if feature_map == "relu" else x
