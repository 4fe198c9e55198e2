"""The recurrences in full words: the oracle of every test, differentiable any number of times."""

from __future__ import annotations

from itertools import pairwise

import torch

from neuralops.core.precision import state_dtype

Tensor = torch.Tensor


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    alpha: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    log_decay: bool,
    normalize_qk: bool,
    nlms: bool,
) -> tuple[Tensor, Tensor]:
    """Run the delta rule token by token in each sequence.

    The arguments are those of :func:`neuralops.ssm.gdn_scan`; with ``nlms`` those of
    :func:`neuralops.ssm.nlms_scan`, ``beta`` its step and ``alpha`` its decay. It computes in
    float64 where a tensor is float64, in float32 otherwise.
    """
    dtype = state_dtype(q, k, v, beta, alpha, initial_state)
    query, key, value = q.to(dtype), k.to(dtype), v.to(dtype)
    strength, decay = beta.to(dtype), alpha.to(dtype)
    if log_decay:
        decay = decay.exp()
    if normalize_qk:
        query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + 1e-6)
        key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6)
    if value.shape[1] != key.shape[1]:
        group = value.shape[1] // key.shape[1]
        query = query.repeat_interleave(group, dim=1)
        key = key.repeat_interleave(group, dim=1)
    if nlms:
        strength = strength / (1 + key.square().sum(-1))
    query = scale * query
    tokens = (query, key, value, strength, decay)

    if cu_seqlens is None:
        first = None if initial_state is None else initial_state.to(dtype)
        output, final_state = _sequence(tokens, first, nlms)
        return output.to(v.dtype), final_state

    boundaries = cu_seqlens.tolist()
    outputs, states = [], []
    for i, (start, end) in enumerate(pairwise(boundaries)):
        first = None if initial_state is None else initial_state[i : i + 1].to(dtype)
        part = tuple(x[:, :, start:end] for x in tokens)
        output, state = _sequence(part, first, nlms)
        outputs.append(output)
        states.append(state)
    past = value[:, :, boundaries[-1] :]
    outputs.append(past.masked_fill(torch.ones_like(past, dtype=torch.bool), 0.0))
    states.append(value.new_zeros(0, value.shape[1], key.shape[-1], value.shape[-1]))
    return torch.cat(outputs, dim=2).to(v.dtype), torch.cat(states)


def _sequence(
    tokens: tuple[Tensor, ...], first: Tensor | None, nlms: bool
) -> tuple[Tensor, Tensor]:
    query, key, value, strength, decay = tokens
    batch, heads, _, key_width = key.shape
    state = value.new_zeros(batch, heads, key_width, value.shape[-1]) if first is None else first
    outputs = []
    for q_t, k_t, v_t, b_t, a_t in zip(*(x.unbind(2) for x in tokens)):
        decayed = a_t[..., None, None] * state
        error = v_t - _read(state if nlms else decayed, k_t)
        state = decayed + b_t[..., None, None] * k_t[..., :, None] * error[..., None, :]
        outputs.append(_read(state, q_t))
    if not outputs:
        weight = (query * key).sum(-1) * strength * decay
        return weight[..., None] * value, state
    return torch.stack(outputs, dim=2), state


def _read(state: Tensor, key: Tensor) -> Tensor:
    """``S^T k``, without a matrix product, whose dtype autocast would change."""
    return (state * key[..., :, None]).sum(-2)
