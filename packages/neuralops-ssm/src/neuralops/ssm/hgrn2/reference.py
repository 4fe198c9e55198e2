"""The recurrence in full words: the oracle of every test, differentiable any number of times."""

from __future__ import annotations

from itertools import pairwise

import torch

from neuralops.core.precision import state_dtype

Tensor = torch.Tensor


def scan(
    f: Tensor,
    iv: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    clip: float | None,
    log_decay: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Run ``h_t = clamp(f_t h_{t-1} + iv_t)`` token by token in each sequence.

    The arguments are those of :func:`neuralops.ssm.hgrn2_scan`. It computes in float64 where a
    tensor is float64, in float32 otherwise.
    """
    channels = f.shape[-1]
    dtype = state_dtype(f, iv, initial_state)
    gate = f.to(dtype).exp() if log_decay else f.to(dtype)
    value = iv.to(dtype)

    if cu_seqlens is None:
        first = None if initial_state is None else initial_state.to(dtype)
        h, final_state = _sequence(gate, value, first, clip, reverse)
        return h.to(iv.dtype), final_state

    boundaries = cu_seqlens.tolist()
    outputs, states = [], []
    for i, (start, end) in enumerate(pairwise(boundaries)):
        first = None if initial_state is None else initial_state[i : i + 1].to(dtype)
        h, state = _sequence(gate[:, start:end], value[:, start:end], first, clip, reverse)
        outputs.append(h)
        states.append(state)
    past = value[:, boundaries[-1] :]
    outputs.append(past.masked_fill(torch.ones_like(past, dtype=torch.bool), 0.0))
    states.append(value.new_zeros(0, channels))
    return torch.cat(outputs, dim=1).to(iv.dtype), torch.cat(states)


def _sequence(
    gate: Tensor, value: Tensor, first: Tensor | None, clip: float | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    batch, _, channels = value.shape
    state = value.new_zeros(batch, channels) if first is None else first
    outputs = []
    tokens = list(zip(gate.unbind(1), value.unbind(1)))
    for gate_t, value_t in reversed(tokens) if reverse else tokens:
        state = gate_t * state + value_t
        if clip is not None:
            state = torch.where(state.abs() < clip, state, state.detach().clamp(-clip, clip))
        outputs.append(state)
    if not outputs:
        return gate * value, state
    if reverse:
        outputs.reverse()
    return torch.stack(outputs, dim=1), state
