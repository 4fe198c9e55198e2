"""The PyTorch form: chunks of tokens as matrix products, and a carry from chunk to chunk.

Within a chunk that the state ``S`` enters, with ``D[r, s]`` the product of the decays after token
s up to token r, and E the same for the rows of the error (in nlms one decay fewer),

    e = T (v - enter * k S),    T = (I + k k^T * E * b)^-1, the errors of the tokens,
    o = leave * q S + A e,      A = q k^T * D * b,
    S = whole * S + (last * b * k)^T e.

All chunks' T are found at once. The loop over chunks is two small products each; everything
else, forward and backward, is done for all chunks together. Products of decays are formed by
multiplying, never by dividing, so that a decay of 0 has its own gradient.

Inside, tensors are ``(chunks, sequences * heads, chunk, width)``, contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from neuralops.core.library import signed
from neuralops.core.precision import state_dtype
from neuralops.ssm.library import LIBRARY

Tensor = torch.Tensor
CHUNK = 32
BLOCK = 8


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
    """Compute :func:`neuralops.ssm.gdn_scan`, or with ``nlms`` :func:`neuralops.ssm.nlms_scan`.

    It is differentiable any number of times.
    """
    dtype = state_dtype(q, k, v, beta, alpha, initial_state)
    query, key, value = q.to(dtype), k.to(dtype), v.to(dtype)
    strength, decay = beta.to(dtype), alpha.to(dtype)
    if log_decay:
        decay = decay.exp()
    if normalize_qk:
        query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + 1e-6)
        key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6)
    if scale != 1.0:
        query = query * scale
    divisor = 1 + key.square().sum(-1) if nlms else None
    batch, heads, length, value_width = v.shape
    if heads != q.shape[1]:
        group = heads // q.shape[1]
        query, key = _expand(query, group), _expand(key, group)
        divisor = None if divisor is None else _expand(divisor, group)
    if divisor is not None:
        strength = strength / divisor
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is None:
        initial_state = value.new_zeros(sequences, heads, q.shape[3], value_width)
    initial_state = initial_state.to(dtype)
    if length == 0:
        weight = (query * key).sum(-1) * strength * decay
        return weight.unsqueeze(-1).mul(value).to(v.dtype), initial_state.clone()
    tokens = (query, key, value, strength, decay)
    if cu_seqlens is None:
        o, final_state, *_ = _delta_rule(*tokens, initial_state, None, nlms)
        return o.to(v.dtype), final_state
    o, final_state = _packed(tokens, initial_state, cu_seqlens, nlms)
    return o.to(v.dtype), final_state


def _expand(x: Tensor, group: int) -> Tensor:
    """Repeat each key head for the value heads that read it."""
    return x.unsqueeze(2).expand(-1, -1, group, *x.shape[2:]).flatten(1, 2)


def _packed(
    tokens: tuple[Tensor, ...], initial_state: Tensor, cu_seqlens: Tensor, nlms: bool
) -> tuple[Tensor, Tensor]:
    """Scan packed sequences, each moved so that it starts a chunk.

    Sequence i starts in chunk ``start // CHUNK + i``, which leaves room for those before it.
    """
    length, device = tokens[0].shape[2], tokens[0].device
    count = cu_seqlens.shape[0] - 1
    chunks = length // CHUNK + max(count, 1)
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    first_chunk = starts // CHUNK + torch.arange(count, device=device)
    position = torch.arange(length, device=device)
    sequence = torch.searchsorted(ends, position, right=True)
    inside = position < cu_seqlens[-1]
    if count == 0:
        place = torch.full_like(position, chunks * CHUNK)
    else:
        of_token = sequence.clamp(max=count - 1)
        place = first_chunk[of_token] * CHUNK + position - starts[of_token]
        place = torch.where(inside, place, chunks * CHUNK)

    source = torch.full((chunks * CHUNK + 1,), length, device=device)
    source = source.scatter(0, place, position)[:-1]
    filled = source < length
    source = source.clamp(max=length - 1)
    q, k, v, b, a = (x.index_select(2, source) for x in tokens)
    q, k, v = (x.masked_fill(~filled.unsqueeze(-1), 0.0) for x in (q, k, v))
    b, a = b.masked_fill(~filled, 0.0), a.masked_fill(~filled, 1.0)
    last_chunk = first_chunk + (ends - starts - 1).clamp(min=0) // CHUNK
    last_chunk = torch.where(ends > starts, last_chunk, -1)
    table = torch.stack((first_chunk, last_chunk))
    o, final_state, *_ = _delta_rule(q, k, v, b, a, initial_state, table, nlms)
    o = o.index_select(2, place.clamp(max=chunks * CHUNK - 1))
    return o.masked_fill(~inside.unsqueeze(-1), 0.0), final_state


class _DeltaRule(torch.autograd.Function):
    """The scan over ``q, k (B, H, L, Dk)``, ``v (B, H, L, Dv)``, ``b, a (B, H, L)``, L > 0.

    ``table (2, n)`` has the first and the last chunk of each packed sequence, -1 where it is
    empty. The outputs after ``o`` and the final state are what the backward needs.
    """

    generate_vmap_rule = True

    @staticmethod
    @signed
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        b: Tensor,
        a: Tensor,
        initial: Tensor,
        table: Tensor | None,
        nlms: bool,
    ) -> Any:
        return _forward_op(q, k, v, b, a, initial, table, nlms)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.nlms = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*tensors, *output[2:])

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor, grad_final: Tensor, *_: Any) -> Any:
        grads = _delta_rule_backward(grad_o, grad_final, *ctx.saved_tensors, ctx.nlms)
        return *grads, None, None


class _DeltaRuleBackward(torch.autograd.Function):
    """The gradients of the scan; differentiated through the plain recurrence of chunks."""

    generate_vmap_rule = True

    @staticmethod
    @signed
    def forward(
        grad_o: Tensor,
        grad_final: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        b: Tensor,
        a: Tensor,
        initial: Tensor,
        table: Tensor | None,
        inverse: Tensor,
        errors: Tensor,
        states: Tensor,
        nlms: bool,
    ) -> Any:
        return _backward_op(
            grad_o, grad_final, q, k, v, b, a, initial, table, inverse, errors, states, nlms
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.nlms = inputs[-1]
        ctx.save_for_backward(*inputs[:9])

    @staticmethod
    def backward(ctx: Any, *of_grads: Tensor) -> Any:
        *differentiable, table = ctx.saved_tensors

        def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            return _differentiable(tensors, table, ctx.nlms)

        def gradients(*arguments: Tensor) -> Any:
            return torch.func.vjp(run, *arguments[2:])[1](arguments[:2])

        with torch.autocast(of_grads[0].device.type, enabled=False):
            grads = torch.func.vjp(gradients, *differentiable)[1](of_grads)
        return *grads, None, None, None, None, None


_delta_rule: Callable[..., tuple[Tensor, ...]] = _DeltaRule.apply
_delta_rule_backward: Callable[..., tuple[Tensor, ...]] = _DeltaRuleBackward.apply


def _chunk_count(length: int) -> int:
    return (length + CHUNK - 1) // CHUNK


def _chunked(x: Tensor, fill: float = 0.0) -> Tensor:
    """Cut ``x (B, H, L, ...)`` into ``(chunks, B * H, CHUNK, ...)``, the last chunk filled up."""
    batch, heads, length = x.shape[:3]
    count = _chunk_count(length)
    missing = count * CHUNK - length
    if missing:
        x = functional.pad(x, (0, 0) * (x.dim() - 3) + (0, missing), value=fill)
    x = x.reshape(batch * heads, count, CHUNK, *x.shape[3:])
    return x.transpose(0, 1).contiguous()


def _whole(x: Tensor, like: Tensor) -> Tensor:
    """Undo `_chunked`, to the batch, heads and length of ``like``."""
    batch, heads, length = like.shape[:3]
    count = x.shape[0]
    x = x.transpose(0, 1).reshape(batch, heads, count * CHUNK, *x.shape[3:])
    return x[:, :, :length].contiguous()


def _products(a: Tensor) -> Tensor:
    """``(..., C)`` -> ``(..., C, C)``: the product of ``a`` after s up to r, at [s, r], r >= s."""
    size = a.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=a.device).triu(1)
    one = torch.ones((), dtype=a.dtype, device=a.device)
    return torch.where(later, a.unsqueeze(-2), one).cumprod(-1).triu_()


@dataclass(frozen=True)
class _Decays:
    """The products of decays that a chunk needs."""

    within: Tensor
    """``(..., C, C)``: from what token s wrote to the state after token r."""
    to_error: Tensor
    """``(..., C, C)``: from what token s wrote to what the error of token r > s reads."""
    leave: Tensor
    """``(..., C, 1)``: from the entering state to the state after token r."""
    enter: Tensor
    """``(..., C, 1)``: from the entering state to what the error of token r reads."""
    last: Tensor
    """``(..., C, 1)``: from what token s wrote to the state after the chunk."""
    whole: Tensor
    """``(..., 1, 1)``: from the entering state to the state after the chunk."""


def _decays(a: Tensor, products: Tensor, nlms: bool) -> _Decays:
    """Collect them from ``a (..., C)`` and the transposed ``products (..., C, C)``."""
    leave = a[..., :1] * products[..., 0, :]
    to_error, enter = products.triu(1), leave
    if nlms:
        to_error = functional.pad(products[..., :-1], (1, 0))
        enter = functional.pad(leave[..., :-1], (1, 0), value=1.0)
    return _Decays(
        within=products.transpose(-1, -2),
        to_error=to_error.transpose(-1, -2),
        leave=leave.unsqueeze(-1),
        enter=enter.unsqueeze(-1),
        last=products[..., -1:],
        whole=leave[..., -1:].unsqueeze(-1),
    )


def _inverse(lower: Tensor) -> Tensor:
    """``(I + lower)^-1`` of strictly lower triangular ``(..., CHUNK, CHUNK)``.

    The blocks on the diagonal row by row, all side by side; then two neighbours at a time, whose
    common block is ``-T2 lower21 T1``.
    """
    block, shape = BLOCK, lower.shape
    lower = lower.flatten(0, -3)
    count = CHUNK // block
    blocks = lower.unflatten(1, (count, block)).unflatten(3, (count, block))
    blocks = blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1).contiguous()
    solved = torch.zeros_like(blocks)
    solved.diagonal(dim1=-1, dim2=-2).fill_(1.0)
    for r in range(1, block):
        solved[..., r, :r] = -(blocks[..., r : r + 1, :r] @ solved[..., :r, :r]).squeeze(-2)
    inverse = torch.zeros_like(lower, memory_format=torch.contiguous_format)
    for i in range(count):
        part = slice(i * block, (i + 1) * block)
        inverse[:, part, part] = solved[:, i]
    while block < CHUNK:
        for start in range(0, CHUNK, 2 * block):
            one, two = slice(start, start + block), slice(start + block, start + 2 * block)
            across = lower[:, two, one] @ inverse[:, one, one]
            inverse[:, two, one] = (inverse[:, two, two] @ across).neg_()
        block *= 2
    return inverse.view(shape)


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep autocast from computing our matrix products in another dtype."""

    def run(first: Tensor, *others: Any) -> Any:
        with torch.autocast(first.device.type, enabled=False):
            return function(first, *others)

    return run


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    a: Tensor,
    initial: Tensor,
    table: Tensor | None,
    nlms: bool,
) -> tuple[Tensor, ...]:
    like = v
    q, k, v, b = _chunked(q), _chunked(k), _chunked(v), _chunked(b).unsqueeze(-1)
    a = _chunked(a, 1.0)
    count, rows = v.shape[:2]
    decays = _decays(a, _products(a), nlms)
    of_beta = b.transpose(-1, -2)
    inverse = _inverse((k @ k.transpose(-1, -2)).mul_(decays.to_error).mul_(of_beta))
    errors = inverse @ v
    of_state = (inverse * decays.enter.transpose(-1, -2)) @ k
    onward = (decays.last * b * k).transpose(-1, -2)
    states = v.new_empty(count + 1, rows, k.shape[-1], v.shape[-1])
    states[0] = initial.flatten(0, 1) if table is None else 0.0
    leaving = states[1:] if table is None else torch.empty_like(states[1:])
    enters = None if table is None else _Entering(table, initial, count)
    for c in range(count):
        if enters is not None:
            states[c] = enters.state(c, leaving[c - 1] if c else states[0])
        errors[c].baddbmm_(of_state[c], states[c], alpha=-1)
        torch.mul(decays.whole[c], states[c], out=leaving[c]).baddbmm_(onward[c], errors[c])
    o = (q @ states[:-1]).mul_(decays.leave)
    scores = (q @ k.transpose(-1, -2)).mul_(decays.within).mul_(of_beta)
    _add_product(o, scores, errors)
    if table is None:
        final_state = states[-1].reshape(initial.shape).clone()
    else:
        final_state = leaving.index_select(0, table[1].clamp(min=0)) if count else initial
        final_state = torch.where((table[1] >= 0)[:, None, None, None], final_state, initial)
    kept = (inverse, errors, states[:-1])
    return _whole(o, like), final_state, *(x.flatten(0, 2) for x in kept)


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    out.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1))


class _Entering:
    """The states that enter at the first chunk of each packed sequence."""

    def __init__(self, table: Tensor, initial: Tensor, count: int) -> None:
        device = table.device
        # An empty sequence starts nowhere: its place is past the last chunk.
        place = torch.where(table[1] >= 0, table[0], count)
        owner = torch.full((count + 1,), -1, dtype=torch.int64, device=device)
        owner = owner.scatter(0, place, torch.arange(place.shape[0], device=device))[:count]
        self.starts = (owner >= 0)[:, None, None, None]
        self.initial = initial.index_select(0, owner.clamp(min=0)) if len(initial) else None

    def state(self, c: int, carried: Tensor) -> Tensor:
        """Return what enters chunk ``c``."""
        if self.initial is None:
            return carried
        return torch.where(self.starts[c], self.initial[c], carried)


def _backward(
    grad_o: Tensor,
    grad_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    a: Tensor,
    initial: Tensor,
    table: Tensor | None,
    inverse: Tensor,
    errors: Tensor,
    states: Tensor,
    nlms: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    like = v
    q, k, v, b = _chunked(q), _chunked(k), _chunked(v), _chunked(b).unsqueeze(-1)
    a, g = _chunked(a, 1.0), _chunked(grad_o)
    count, rows = v.shape[:2]
    inverse = inverse.view(count, rows, CHUNK, CHUNK)
    errors = errors.view(v.shape)
    states = states.view(count, rows, k.shape[-1], v.shape[-1])
    products = _products(a)
    decays = _decays(a, products, nlms)
    of_beta, last = b.transpose(-1, -2), decays.last * b
    keys, scores = k @ k.transpose(-1, -2), q @ k.transpose(-1, -2)

    # From the last chunk to the first: the gradients of v - enter * k S and of the states.
    transposed = inverse.transpose(-1, -2)
    grad_v = transposed @ ((scores * decays.within).mul_(of_beta).transpose(-1, -2) @ g)
    of_state = (transposed * last.transpose(-1, -2)) @ k
    from_error = (decays.enter * k).transpose(-1, -2)
    # What goes into the state before chunk c is what comes out of the one after chunk c - 1.
    entering = torch.empty(count + 1, *states.shape[1:], dtype=v.dtype, device=v.device)
    torch.matmul(q.transpose(-1, -2), decays.leave * g, out=entering[:-1])
    entering[-1] = grad_final.flatten(0, 1) if table is None else 0.0
    grad_states = entering[1:] if table is None else torch.empty_like(states)
    leaves = None if table is None else _Leaving(table, grad_final, count)
    for c in reversed(range(count)):
        if leaves is not None:
            grad_states[c] = leaves.gradient(c, entering[c + 1])
        grad_v[c].baddbmm_(of_state[c], grad_states[c])
        entering[c].baddbmm_(from_error[c], grad_v[c], alpha=-1)
        entering[c].addcmul_(decays.whole[c], grad_states[c])
    if leaves is None:
        grad_initial = entering[0].reshape(initial.shape).clone()
    else:
        grad_initial = leaves.initial(entering)

    # For all chunks at once.
    errors_t, states_t = errors.transpose(-1, -2), states.transpose(-1, -2)
    of_scores = g @ errors_t
    of_keys = (grad_v @ errors_t).neg_()
    of_products, of_error = of_scores * scores, of_keys * keys
    grad_b = (of_products * decays.within).addcmul_(of_error, decays.to_error).sum(-2)
    of_products.mul_(of_beta)
    of_error.mul_(of_beta)
    of_scores.mul_(decays.within).mul_(of_beta)
    of_keys.mul_(decays.to_error).mul_(of_beta)
    from_next = errors @ grad_states.transpose(-1, -2)
    of_last = (k * from_next).sum(-1)
    grad_k = from_next.mul_(last)
    from_o = g @ states_t
    of_leave = (q * from_o).sum(-1)
    grad_q = from_o.mul_(decays.leave)
    from_error = grad_v @ states_t
    of_enter = (k * from_error).sum(-1).neg_()
    grad_k.addcmul_(decays.enter, from_error, value=-1)
    _add_product(grad_q, of_scores, k)
    _add_product(grad_k, of_scores.transpose(-1, -2), q)
    _add_product(grad_k, of_keys + of_keys.transpose(-1, -2), k)
    grad_b.addcmul_(decays.last.squeeze(-1), of_last)

    # The decays: how the loss depends on each product of them, then on each factor.
    if nlms:
        of_products[..., :-1, :] += of_error[..., 1:, :]
        of_leave[..., :-1] += of_enter[..., 1:]
    else:
        of_products += of_error
        of_leave += of_enter
    of_products[..., -1, :] += b.squeeze(-1) * of_last
    of_leave[..., -1] += (states * grad_states).sum((-1, -2))
    before = of_products @ products + of_leave.unsqueeze(-1) * decays.leave.transpose(-1, -2)
    before = torch.cat((of_leave.unsqueeze(-1), before[..., :-1]), -1)
    grad_a = (decays.within * before).sum(-2)
    return (
        _whole(grad_q, like),
        _whole(grad_k, like),
        _whole(grad_v, like),
        _whole(grad_b, like),
        _whole(grad_a, like),
        grad_initial,
    )


class _Leaving:
    """The gradients of the states that leave after the last chunk of each packed sequence."""

    def __init__(self, table: Tensor, grad_final: Tensor, count: int) -> None:
        self.table, self.grad_final = table, grad_final
        self.filled = (table[1] >= 0)[:, None, None, None]
        place = torch.where(table[1] >= 0, table[1], count)
        owner = torch.full((count + 1,), -1, dtype=torch.int64, device=table.device)
        owner = owner.scatter(0, place, torch.arange(place.shape[0], device=table.device))[:count]
        self.ends = (owner >= 0)[:, None, None, None]
        self.own = grad_final.index_select(0, owner.clamp(min=0)) if len(grad_final) else None

    def gradient(self, c: int, carried: Tensor) -> Tensor:
        """Return the gradient of the state after chunk ``c``; ``carried`` is the next one's."""
        if self.own is None:
            return carried
        return torch.where(self.ends[c], self.own[c], carried)

    def initial(self, entering: Tensor) -> Tensor:
        """Return the gradients of the initial states."""
        first = entering.index_select(0, self.table[0].clamp(min=0))
        return torch.where(self.filled, first, self.grad_final)


def _differentiable(
    tensors: tuple[Tensor, ...], table: Tensor | None, nlms: bool
) -> tuple[Tensor, Tensor]:
    """Compute what `_forward` does with operations that autograd knows."""
    q, k, v, b, a, initial = tensors
    like = v
    q, k, v, b = _chunked(q), _chunked(k), _chunked(v), _chunked(b).unsqueeze(-1)
    a = _chunked(a, 1.0)
    count = v.shape[0]
    rows = [torch.zeros_like(a)]
    for r, a_r in enumerate(a.split(1, -1)):
        diagonal = functional.one_hot(torch.tensor(r, device=a.device), CHUNK).to(a.dtype)
        rows.append(a_r * rows[-1] + diagonal)
    decays = _decays(a, torch.stack(rows[1:], -1), nlms)
    of_beta = b.transpose(-1, -2)
    lower = decays.to_error * (k @ k.transpose(-1, -2)) * of_beta
    identity = torch.eye(CHUNK, dtype=k.dtype, device=k.device).expand_as(lower)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)
    of_value, of_state = inverse @ v, inverse @ (decays.enter * k)
    scores = (q @ k.transpose(-1, -2)) * decays.within * of_beta
    onward = (decays.last * b * k).mT
    enters = None if table is None else _Entering(table, initial, count)
    state = initial.flatten(0, 1) if table is None else torch.zeros_like(q[0].mT @ v[0])
    outputs, leaving = [], []
    for c in range(count):
        if enters is not None:
            state = enters.state(c, state)
        errors = of_value[c] - of_state[c] @ state
        outputs.append(decays.leave[c] * (q[c] @ state) + scores[c] @ errors)
        state = decays.whole[c] * state + onward[c] @ errors
        leaving.append(state)
    o = _whole(torch.stack(outputs), like)
    if table is None:
        return o, state.reshape(initial.shape)
    final_state = torch.stack(leaving).index_select(0, table[1].clamp(min=0))
    return o, torch.where((table[1] >= 0)[:, None, None, None], final_state, initial)


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    a: Tensor,
    initial: Tensor,
    table: Tensor | None,
    nlms: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, heads, length, value_width = v.shape
    rows = _chunk_count(length) * batch * heads
    return (
        v.new_empty(v.shape),
        initial.new_empty(initial.shape),
        v.new_empty((rows * CHUNK, CHUNK)),
        v.new_empty((rows * CHUNK, value_width)),
        v.new_empty((rows * q.shape[3], value_width)),
    )


def _fake_backward(
    grad_o: Tensor,
    grad_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    a: Tensor,
    initial: Tensor,
    table: Tensor | None,
    inverse: Tensor,
    errors: Tensor,
    states: Tensor,
    nlms: bool,
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v, b, a, initial))


_forward_op = LIBRARY.register(
    "gdn_scan_torch(Tensor q, Tensor k, Tensor v, Tensor b, Tensor a, Tensor initial, "
    "Tensor? table, bool nlms) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _without_autocast(_forward),
    _fake_forward,
)
_backward_op = LIBRARY.register(
    "gdn_scan_torch_bwd(Tensor grad_o, Tensor grad_final, Tensor q, Tensor k, Tensor v, Tensor b, "
    "Tensor a, Tensor initial, Tensor? table, Tensor inverse, Tensor errors, Tensor states, "
    "bool nlms) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _without_autocast(_backward),
    _fake_backward,
)
