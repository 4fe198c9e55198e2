"""The recurrence in full words: the oracle of every test, differentiable any number of times."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.utils.checkpoint import checkpoint

from neuralops.core.precision import state_dtype

Tensor = torch.Tensor

BLOCK = 256
"""Tokens between the states that the backward of a long sequence starts from."""


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    log_decay: bool,
    normalize: bool,
    eps: float,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run ``S_t = Diag(lambda_t) S_{t-1} + k_t v_t^T`` token by token in each sequence.

    The arguments are those of :func:`neuralops.ssm.gla_scan`, with the initial state's two parts
    apart. It computes in float64 where a tensor is float64, in float32 otherwise.
    """
    with torch.autocast(q.device.type, enabled=False):
        return _scan(
            q, k, v, lambdas, initial_state, initial_key_sum, cu_seqlens,
            scale, log_decay, normalize, eps, reverse,
        )  # fmt: skip


def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    log_decay: bool,
    normalize: bool,
    eps: float,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    dtype = state_dtype(q, k, v, lambdas, initial_state, initial_key_sum)
    gate = lambdas.to(dtype).exp() if log_decay else lambdas.to(dtype)
    if gate.dim() == 3:
        gate = gate.unsqueeze(-1)
    tokens = (q.to(dtype) * scale, k.to(dtype), v.to(dtype), gate)

    boundaries = None if cu_seqlens is None else cu_seqlens.tolist()
    sequences = q.shape[0] if boundaries is None else len(boundaries) - 1
    state = v.new_zeros((sequences, q.shape[1], q.shape[3], v.shape[3]), dtype=dtype)
    key_sum = state[..., 0] if v.shape[3] else state.sum(-1)
    state = state if initial_state is None else initial_state.to(dtype)
    key_sum = key_sum if initial_key_sum is None else initial_key_sum.to(dtype)

    if boundaries is None:
        out, state, key_sum = _sequence(tokens, state, key_sum, normalize, eps, reverse)
        return out.to(v.dtype), state, key_sum if normalize else None

    outputs, states, key_sums = [], [state[:0]], [key_sum[:0]]
    for i, (start, end) in enumerate(pairwise(boundaries)):
        part = tuple(x[:, :, start:end] for x in tokens)
        first = state[i : i + 1], key_sum[i : i + 1]
        out, last, last_sum = _sequence(part, *first, normalize, eps, reverse)
        outputs.append(out)
        states.append(last)
        key_sums.append(last_sum)
    past = tokens[2][:, :, boundaries[-1] :]
    outputs.append(past.masked_fill(torch.ones_like(past, dtype=torch.bool), 0.0))
    out = torch.cat(outputs, dim=2).to(v.dtype)
    return out, torch.cat(states), torch.cat(key_sums) if normalize else None


def _sequence(
    tokens: tuple[Tensor, ...],
    state: Tensor,
    key_sum: Tensor,
    normalize: bool,
    eps: float,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if reverse:
        tokens = tuple(x.flip(2) for x in tokens)
    length = tokens[0].shape[2]
    outputs = []
    for start in range(0, length, BLOCK):
        block = tuple(x[:, :, start : start + BLOCK] for x in tokens)
        if length > 2 * BLOCK and torch.is_grad_enabled():
            out, state, key_sum = checkpoint(
                _block, *block, state, key_sum, normalize, eps, use_reentrant=False
            )
        else:
            q, k, v, gate = block
            out, state, key_sum = _block(q, k, v, gate, state, key_sum, normalize, eps)
        outputs.append(out)
    out = torch.cat(outputs, 2) if outputs else tokens[2].clone()
    return out.flip(2) if reverse else out, state, key_sum


def _block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    state: Tensor,
    key_sum: Tensor,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = []
    for q_t, k_t, v_t, gate_t in zip(q.unbind(2), k.unbind(2), v.unbind(2), gate.unbind(2)):
        state = gate_t.unsqueeze(-1) * state + k_t.unsqueeze(-1) * v_t.unsqueeze(-2)
        out = torch.einsum("bhk,bhkv->bhv", q_t, state)
        if normalize:
            key_sum = gate_t * key_sum + k_t
            out = out / (q_t * key_sum).sum(-1, keepdim=True).clamp(min=eps)
        outputs.append(out)
    return torch.stack(outputs, 2), state, key_sum
