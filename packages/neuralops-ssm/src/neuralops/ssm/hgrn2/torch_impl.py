"""The PyTorch form: every chunk of the sequence at once, then a carry across the chunks.

A step ``h -> clamp(a h + b, low, high)`` composes with the next into another of the same kind.
The first pass composes the steps of each chunk, all chunks side by side; a short loop carries the
state from chunk to chunk; the second pass runs the recurrence itself from each chunk's own first
state, so that its rounding is that of the plain loop. With about ``sqrt(L)`` tokens a chunk, a scan
is O(sqrt(L)) calls on slices of the inputs, and nothing but the output is of their size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from neuralops.core.library import signed
from neuralops.core.precision import state_dtype
from neuralops.ssm.library import LIBRARY

Tensor = torch.Tensor

LOG2_E = math.log2(math.e)
"""Exponentials are taken in base 2, which PyTorch computes several times as fast on some CPUs."""


def scan(
    f: Tensor,
    iv: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    clip: float | None,
    log_decay: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`neuralops.ssm.hgrn2_scan`; differentiable any number of times."""
    batch, length, channels = f.shape
    dtype = state_dtype(f, iv, initial_state)
    gate, value = f.to(dtype), iv.to(dtype)
    if cu_seqlens is not None:
        batch = cu_seqlens.shape[0] - 1
    if initial_state is None:
        initial_state = torch.zeros(batch, channels, dtype=dtype, device=f.device)
    initial_state = initial_state.to(dtype)
    if length == 0:
        return (gate * value).to(iv.dtype), initial_state.clone()
    if cu_seqlens is None:
        h = _affine_scan(gate, value, initial_state, clip, log_decay, reverse)
        return h.to(iv.dtype), h[:, 0 if reverse else -1].clone()
    if log_decay:
        gate = (gate * LOG2_E).exp2()
    h, final_state = _packed(gate, value, initial_state, cu_seqlens, clip, reverse)
    return h.to(iv.dtype), final_state


def _packed(
    gate: Tensor,
    value: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    clip: float | None,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Scan packed sequences as one: each one's first token takes its state from ``value``."""
    _, length, channels = value.shape
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    filled = (starts < ends).unsqueeze(1)
    first, last = starts.clamp(0, length - 1), (ends - 1).clamp(0, length - 1)
    if reverse:
        first, last = last, first
    positions = torch.arange(length, device=value.device)
    past = (positions >= cu_seqlens[-1]).unsqueeze(1)
    restart = torch.zeros(length, 1, device=value.device, dtype=torch.int32)
    restart = restart.index_add(0, first, filled.int()) > 0

    entering = torch.where(filled, gate[0].index_select(0, first) * initial_state, 0.0)
    value = value.masked_fill(past, 0.0).index_add(1, first, entering.unsqueeze(0))
    gate = gate.masked_fill(restart | past, 0.0)
    h = _affine_scan(gate, value, value.new_zeros(1, channels), clip, False, reverse)
    final_state = torch.where(filled, h[0].index_select(0, last), initial_state)
    return h, final_state


class _AffineScan(torch.autograd.Function):
    """``h_t = clamp(a_t h_{t-1} + b_t)`` from ``initial``, for ``a, b (B, L, D)``, L > 0.

    With ``log_decay`` it takes the logarithms of ``a``.
    """

    generate_vmap_rule = True

    @staticmethod
    @signed
    def forward(
        a: Tensor, b: Tensor, initial: Tensor, clip: float | None, log_decay: bool, reverse: bool
    ) -> Any:
        return _scan_op(a, b, initial, clip, log_decay, reverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        a, _, initial, ctx.clip, ctx.log_decay, ctx.reverse = inputs
        ctx.save_for_backward(a, output, initial)

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor) -> Any:
        a, h, initial = ctx.saved_tensors
        if ctx.log_decay:
            a = (a * LOG2_E).exp2()
        grad_a, grad_b, grad_initial = _affine_scan_backward(
            grad_h, a, h, initial, ctx.clip, ctx.reverse
        )
        if ctx.log_decay:
            grad_a = grad_a * a if torch.is_grad_enabled() else grad_a.mul_(a)
        return grad_a, grad_b, grad_initial, None, None, None


class _AffineScanBackward(torch.autograd.Function):
    """``y_t = m_t (g_t + a_{t+1} y_{t+1})``, the gradient of ``b``; m is 0 where h is clipped.

    The gradient of ``a`` is ``y_t h_{t-1}``, that of ``initial`` is ``a_0 y_0``.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        g: Tensor, a: Tensor, h: Tensor, initial: Tensor, clip: float | None, reverse: bool
    ) -> Any:
        return _backward_op(g, a, h, initial, clip, reverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, a, h, initial, ctx.clip, ctx.reverse = inputs
        ctx.save_for_backward(a, h, initial, output[1])

    @staticmethod
    def backward(ctx: Any, of_grad_a: Tensor, of_grad_b: Tensor, of_grad_initial: Tensor) -> Any:
        a, h, initial, y = ctx.saved_tensors
        first = slice(-1, None) if ctx.reverse else slice(0, 1)
        inside = torch.ones_like(h) if ctx.clip is None else _inside(h, ctx.clip)
        into_y = of_grad_a * _previous(h, initial, ctx.reverse) + of_grad_b
        into_y = into_y + _at_first(
            of_grad_initial.unsqueeze(1) * a[:, first], a.shape[1], ctx.reverse
        )
        zero = torch.zeros_like(initial)
        grad_g = _affine_scan(inside * a, inside * into_y, zero, None, False, ctx.reverse)
        grad_a = y * _previous(grad_g, of_grad_initial, ctx.reverse)
        into_previous = of_grad_a * y
        grad_h = _next(into_previous, ctx.reverse)
        grad_initial = into_previous[:, first].squeeze(1)
        return grad_g, grad_a, grad_h, grad_initial, None, None


_affine_scan: Callable[..., Tensor] = _AffineScan.apply
_affine_scan_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = _AffineScanBackward.apply


def _previous(h: Tensor, first: Tensor, reverse: bool) -> Tensor:
    """Shift by one token: position t gets ``h_{t-1}``, the first one ``first``."""
    edge = first.unsqueeze(1)
    return torch.cat((h[:, 1:], edge), 1) if reverse else torch.cat((edge, h[:, :-1]), 1)


def _next(h: Tensor, reverse: bool) -> Tensor:
    """Shift by one token: position t gets ``h_{t+1}``, the last one 0."""
    return _previous(h, torch.zeros_like(h[:, 0]), not reverse)


def _at_first(row: Tensor, length: int, reverse: bool) -> Tensor:
    """Place ``row`` at the first token of ``length`` zero ones."""
    zeros = row.new_zeros(row.shape[0], length - 1, row.shape[2])
    return torch.cat((zeros, row), 1) if reverse else torch.cat((row, zeros), 1)


def _order(count: int, reverse: bool) -> Iterable[int]:
    return reversed(range(count)) if reverse else range(count)


def _chunked(x: Tensor, size: int, reverse: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Split ``x (B, L, D)`` into the tokens of whole chunks and the rest, both in scan order.

    The first list holds, for each position in a chunk, a view ``(B, chunks, D)``; the second holds
    a view ``(B, D)`` for each token after the last whole chunk.
    """
    length = x.shape[1]
    whole = length - length % size
    head = x[:, length - whole :] if reverse else x[:, :whole]
    rest = x[:, : length - whole] if reverse else x[:, whole:]
    positions = list(head.unflatten(1, (whole // size, size)).unbind(2))
    tokens = list(rest.unbind(1))
    if reverse:
        positions.reverse()
        tokens.reverse()
    return positions, tokens


def _inside(h: Tensor, clip: float) -> Tensor:
    """1 where the state is not clipped, 0 where it is, in the dtype of ``h``."""
    return h.abs().lt_(clip)


def _chunk_size(length: int) -> int:
    return min(length, max(16, 1 << (math.isqrt(length).bit_length() - 1)))


def _scan(
    a: Tensor, b: Tensor, initial: Tensor, clip: float | None, log_decay: bool, reverse: bool
) -> Tensor:
    h = torch.empty_like(b, memory_format=torch.contiguous_format)
    if log_decay:
        # The output's memory holds the gates until the second pass overwrites them, token by token.
        a = torch.mul(a, LOG2_E, out=h).exp2_()
    size = _chunk_size(b.shape[1])
    a_steps, a_rest = _chunked(a, size, reverse)
    b_steps, b_rest = _chunked(b, size, reverse)
    h_steps, h_rest = _chunked(h, size, reverse)

    # The chunk's steps as one: state -> clamp(scale * state + shift, low, high).
    scale, shift = a_steps[0].clone(), b_steps[0].clone()
    low = high = None
    if clip is not None:
        low, high = torch.full_like(shift, -clip), torch.full_like(shift, clip)
    for a_t, b_t in zip(a_steps[1:], b_steps[1:]):
        scale.mul_(a_t)
        torch.addcmul(b_t, a_t, shift, out=shift)
        if low is not None and high is not None and clip is not None:
            ends = torch.addcmul(b_t, a_t, low), torch.addcmul(b_t, a_t, high)
            low = torch.minimum(*ends).clamp_(-clip, clip)
            high = torch.maximum(*ends).clamp_(-clip, clip)

    chunks = shift.shape[1]
    state = torch.empty_like(shift)
    order = list(_order(chunks, reverse))
    state[:, order[0]] = initial
    for j, after in itertools.pairwise(order):
        carry = torch.addcmul(shift[:, j], scale[:, j], state[:, j], out=state[:, after])
        if low is not None and high is not None:
            torch.clamp(carry, low[:, j], high[:, j], out=carry)

    for a_t, b_t, h_t in zip(a_steps, b_steps, h_steps):
        torch.addcmul(b_t, a_t, state, out=h_t)
        if clip is not None:
            h_t.clamp_(-clip, clip)
        state = h_t
    last = h_steps[-1][:, 0 if reverse else -1]
    for a_t, b_t, h_t in zip(a_rest, b_rest, h_rest):
        torch.addcmul(b_t, a_t, last, out=h_t)
        if clip is not None:
            h_t.clamp_(-clip, clip)
        last = h_t
    return h


def _scan_backward(
    g: Tensor, a: Tensor, h: Tensor, initial: Tensor, clip: float | None, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(h)
    backwards = not reverse
    size = _chunk_size(h.shape[1])
    g_steps, g_rest = _chunked(g, size, backwards)
    a_steps, a_rest = _chunked(a, size, backwards)
    y_steps, y_rest = _chunked(y, size, backwards)
    h_steps, h_rest = _chunked(h, size, backwards)

    # The chunk's steps as one: entering -> scale * entering + shift, where what enters a token is
    # a_{t+1} y_{t+1}.
    scale = torch.ones_like(g_steps[0], memory_format=torch.contiguous_format)
    shift = torch.zeros_like(scale)
    for g_t, a_t, h_t in zip(g_steps, a_steps, h_steps):
        shift.add_(g_t)
        if clip is not None:
            inside = _inside(h_t, clip)
            shift.mul_(inside)
            scale.mul_(inside)
        shift.mul_(a_t)
        scale.mul_(a_t)

    entering = torch.empty_like(shift)
    carry = torch.zeros_like(initial)
    for j in _order(shift.shape[1], backwards):
        entering[:, j] = carry
        carry = torch.addcmul(shift[:, j], scale[:, j], carry)

    for g_t, a_t, h_t, y_t in zip(g_steps, a_steps, h_steps, y_steps):
        torch.add(g_t, entering, out=y_t)
        if clip is not None:
            y_t.mul_(_inside(h_t, clip))
        torch.mul(a_t, y_t, out=entering)
    leaving = entering[:, 0 if backwards else -1].clone()
    for g_t, a_t, h_t, y_t in zip(g_rest, a_rest, h_rest, y_rest):
        torch.add(g_t, leaving, out=y_t)
        if clip is not None:
            y_t.mul_(_inside(h_t, clip))
        torch.mul(a_t, y_t, out=leaving)

    grad_a = torch.empty_like(h)
    if reverse:
        torch.mul(y[:, :-1], h[:, 1:], out=grad_a[:, :-1])
        torch.mul(y[:, -1], initial, out=grad_a[:, -1])
    else:
        torch.mul(y[:, 1:], h[:, :-1], out=grad_a[:, 1:])
        torch.mul(y[:, 0], initial, out=grad_a[:, 0])
    return grad_a, y, leaving


def _fake_scan(
    a: Tensor, b: Tensor, initial: Tensor, clip: float | None, log_decay: bool, reverse: bool
) -> Tensor:
    return torch.empty_like(b, memory_format=torch.contiguous_format)


def _fake_scan_backward(
    g: Tensor, a: Tensor, h: Tensor, initial: Tensor, clip: float | None, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(h), torch.empty_like(h), torch.empty_like(initial)


_scan_op = LIBRARY.register(
    "hgrn2_scan_torch(Tensor a, Tensor b, Tensor initial, float? clip, bool log_decay, "
    "bool reverse) -> Tensor",
    _scan,
    _fake_scan,
)
_backward_op = LIBRARY.register(
    "hgrn2_scan_torch_bwd(Tensor g, Tensor a, Tensor h, Tensor initial, float? clip, bool reverse)"
    " -> (Tensor, Tensor, Tensor)",
    _scan_backward,
    _fake_scan_backward,
)
