"""The PyTorch form: every chunk of the sequence at once, with a short carry across the chunks.

Between two halves of a block of ``2h`` tokens the weight of the pair (r, s), ``q_r k_s`` times the
gates in between, splits at the middle: the gates up to r times the gates after s. Both are products
of gates, so nothing overflows, a gate of 0 stays one, and every gate's gradient is the recurrence's
own. A chunk takes one such product of matrices for h = 1, 2, 4, ..., each level's gates made from
those of the level below. Where a block's gates are near 1, its ``base`` tokens take a single one
instead: then a quotient of products from the block's start is exact enough.

A loop over the chunks, never over tokens, carries the state. The backward computes the chunks anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from neuralops.core.library import signed
from neuralops.core.precision import state_dtype
from neuralops.ssm.gla.decays import (
    Decays,
    choose_base,
    diagonal,
    gate_products,
    halves,
    weights_of_pairs,
    within_blocks,
)
from neuralops.ssm.library import LIBRARY
from neuralops.ssm.scalar_decay import torch_impl as scalar_decay
from neuralops.ssm.scalar_decay.chunks import Layout, in_chunks, in_rows, lay_out

Tensor = torch.Tensor


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
    """Compute :func:`neuralops.ssm.gla_scan`; differentiable any number of times."""
    if lambdas.dim() == 3:
        return scalar_decay.scan(
            q, k, v, lambdas, initial_state, initial_key_sum, cu_seqlens,
            "identity", scale, 1.0, normalize, eps, log_decay, reverse,
        )  # fmt: skip
    tensors = (q, k, v, lambdas, initial_state, initial_key_sum)
    tracked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    run: Callable[..., tuple[Tensor, ...]] = _Scan.apply if tracked else _forward_op
    out, final_state, final_key_sum, _ = run(
        *tensors, cu_seqlens, scale, log_decay, normalize, eps, reverse
    )
    return out, final_state, final_key_sum if normalize else None


@dataclass(frozen=True)
class Options:
    """The arguments of the scan that are no tensors, in their order."""

    scale: float
    log_decay: bool
    normalize: bool
    eps: float
    reverse: bool


class _Scan(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    @signed
    def forward(
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
    ) -> Any:
        return _forward_op(
            q, k, v, lambdas, initial_state, initial_key_sum, cu_seqlens,
            scale, log_decay, normalize, eps, reverse,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        out, _, key_sum, denominator = output
        ctx.options = inputs[7:]
        normalize = inputs[9]
        kept = (out, denominator) if normalize else (denominator, denominator)
        ctx.save_for_backward(*inputs[:7], *kept)
        ctx.mark_non_differentiable(*((denominator,) if normalize else (key_sum, denominator)))

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor, grad_state: Tensor, grad_key_sum: Tensor, _: Any
    ) -> Any:
        saved = ctx.saved_tensors
        gradients = _scan_backward(grad_out, grad_state, grad_key_sum, *saved, *ctx.options)
        narrow = [None if x is None else g.to(x.dtype) for x, g in zip(saved, gradients)]
        return *narrow, *[None] * 6


class _ScanBackward(torch.autograd.Function):
    """The gradients of the inputs; its own derivatives come from plain PyTorch."""

    generate_vmap_rule = True

    @staticmethod
    @signed
    def forward(
        grad_out: Tensor,
        grad_state: Tensor,
        grad_key_sum: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lambdas: Tensor,
        initial_state: Tensor | None,
        initial_key_sum: Tensor | None,
        cu_seqlens: Tensor | None,
        out: Tensor,
        denominator: Tensor,
        scale: float,
        log_decay: bool,
        normalize: bool,
        eps: float,
        reverse: bool,
    ) -> Any:
        return _backward_op(
            grad_out, grad_state, grad_key_sum, q, k, v, lambdas, initial_state, initial_key_sum,
            cu_seqlens, out, denominator, scale, log_decay, normalize, eps, reverse,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:10])
        ctx.options = inputs[12:]

    @staticmethod
    def backward(ctx: Any, *of_gradients: Tensor) -> Any:
        *variables, cu_seqlens = ctx.saved_tensors
        options = Options(*ctx.options)
        outputs = 3 if options.normalize else 2
        present = [i for i, x in enumerate(variables) if x is not None and (i < outputs or i >= 3)]
        inputs = [i for i in present if i >= 3]

        def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
            def forward(*leaves: Tensor) -> tuple[Tensor, ...]:
                arguments: list[Any] = [None] * 6
                for i, x in zip(inputs, leaves):
                    arguments[i - 3] = x
                q, k, v, lambdas, state, key_sum = arguments
                return _plain(q, k, v, lambdas, state, key_sum, cu_seqlens, options)[:outputs]

            results, pull, *_ = torch.func.vjp(forward, *tensors[outputs:])
            found: tuple[Tensor, ...] = pull(tuple(g.to(x.dtype) for g, x in zip(tensors, results)))
            return found

        results, pull, *_ = torch.func.vjp(gradients, *(variables[i] for i in present))
        seeds = tuple(of_gradients[i - 3].to(x.dtype) for i, x in zip(inputs, results))
        found: list[Tensor | None] = [None] * 17
        for i, x in zip(present, pull(seeds)):
            found[i] = x
        return tuple(found)


_scan_backward: Callable[..., tuple[Tensor, ...]] = _ScanBackward.apply


# --- Forward --------------------------------------------------------------------------------


def _first_state(
    like: Tensor, width: int, state: Tensor | None, key_sum: Tensor | None, rows: int, key: bool
) -> Tensor:
    """A state, with the key sum as its last column if ``key``; zero where there is none."""
    shape = (rows, like.shape[1], like.shape[-1], width)
    state = like.new_zeros(shape) if state is None else state.to(like.dtype)
    if not key:
        return state
    key_sum = like.new_zeros(shape[:-1]) if key_sum is None else key_sum.to(like.dtype)
    return torch.cat((state, key_sum.unsqueeze(-1)), -1)


def _gates(lambdas: Tensor, dtype: torch.dtype, log_decay: bool) -> Tensor:
    return lambdas.to(dtype).exp() if log_decay else lambdas.to(dtype)


def _chunks(x: Tensor, layout: Layout, fill: float = 0.0) -> Tensor:
    """Lay out in chunks whose size is a power of 2."""
    x = in_chunks(x, layout, fill)
    missing = (1 << (layout.size - 1).bit_length()) - layout.size
    if missing:
        x = torch.cat((x, x.new_full((*x.shape[:3], missing, x.shape[4]), fill)), 3)
    return x


def _rows(x: Tensor, layout: Layout, length: int) -> Tensor:
    return in_rows(x[:, :, :, : layout.size], layout, length)


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
    base: Callable[[Tensor], int] = lambda gate: 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The scan in differentiable operations: output, final state, key sum and denominator."""
    dtype = state_dtype(q, k, v, lambdas, initial_state, initial_key_sum)
    length, normalize = q.shape[2], options.normalize
    keys, values = k.to(dtype), v.to(dtype)
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = _first_state(keys, v.shape[-1], initial_state, initial_key_sum, rows, normalize)
    if normalize:
        # The key sum is the state of a value that is always 1.
        values = torch.cat((values, torch.ones_like(values[..., :1])), -1)
    queries = q.to(dtype)
    if options.scale != 1.0:
        queries = queries * options.scale
    if length == 0:
        out, final = values.clone(), state.clone()
    else:
        layout = lay_out(length, cu_seqlens, options.reverse, q.device)
        gate = _chunks(_gates(lambdas, dtype, options.log_decay), layout, 1.0)
        queries, keys, values = (_chunks(x, layout) for x in (queries, keys, values))
        decays = gate_products(gate, base(gate))
        entering, final = _states(keys, values, decays, state, layout)
        out = weights_of_pairs(queries, keys, decays, within_blocks(queries, keys, decays)) @ values
        out = out + (queries * decays.until) @ entering
        out = _rows(out, layout, length)
    empty = out.new_empty((0,))
    if not normalize:
        return out.to(v.dtype), final, empty, empty
    denominator = out[..., -1]
    out = out[..., :-1] / denominator.unsqueeze(-1).clamp(min=options.eps)
    return out.to(v.dtype), final[..., :-1], final[..., -1], denominator


def _states(
    k: Tensor, v: Tensor, decays: Decays, state: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Return the states that enter the chunks, and those that leave the sequences."""
    steps = ((k * decays.after).transpose(-1, -2) @ v).unbind(2)
    through = decays.until[..., -1, :].unsqueeze(-1).unbind(2)
    entering, current = [], state
    packed = layout.packed
    if packed is None:
        for step, decay in zip(steps, through):
            entering.append(current)
            current = torch.addcmul(step, decay, current)
        return torch.stack(entering, 2), current

    if state.shape[0] == 0 or not steps:
        shape = (*k.shape[:3], k.shape[-1], v.shape[-1])
        return k.new_zeros(shape), state.clone()
    firsts = state.index_select(0, packed.owner).unsqueeze(1).unbind(0)
    current = torch.zeros_like(firsts[0])
    leaving = []
    for first, is_first, step, decay in zip(firsts, packed.is_first, steps, through):
        current = torch.where(is_first, first, current)
        entering.append(current)
        current = torch.addcmul(step, decay, current)
        leaving.append(current)
    final = torch.cat(leaving).index_select(0, packed.last)
    final = torch.where(packed.empty.view(-1, 1, 1, 1), state, final)
    return torch.stack(entering, 2), final


def _forward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = Options(scale, log_decay, normalize, eps, reverse)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        out, *rest = _plain(
            q, k, v, lambdas, initial_state, initial_key_sum, cu_seqlens, options, choose_base
        )
    final_state, final_key_sum, denominator = (_own(x) for x in rest)
    return out.contiguous(), final_state, final_key_sum, denominator


def _own(x: Tensor) -> Tensor:
    """Copy what may be a view of another result."""
    return x.clone(memory_format=torch.contiguous_format)


# --- Backward -------------------------------------------------------------------------------


def _backward(
    grad_out: Tensor,
    grad_state: Tensor,
    grad_key_sum: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    denominator: Tensor,
    scale: float,
    log_decay: bool,
    normalize: bool,
    eps: float,
    reverse: bool,
) -> tuple[Tensor, ...]:
    dtype = state_dtype(q, k, v, lambdas, initial_state, initial_key_sum)
    length, columns = q.shape[2], v.shape[-1]
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    keys, values, grad = k.to(dtype), v.to(dtype), grad_out.to(dtype)
    gate = _gates(lambdas, dtype, log_decay)
    grad_final = _first_state(keys, columns, grad_state, grad_key_sum, rows, normalize)
    if length == 0:
        found = [torch.zeros_like(x) for x in (keys, keys, values, gate)]
        grad_initial = grad_final.clone()
    else:
        state = _first_state(keys, columns, initial_state, initial_key_sum, rows, normalize)
        queries = q.to(dtype)
        if scale != 1.0:
            queries = queries * scale
        if normalize:
            values = torch.cat((values, torch.ones_like(values[..., :1])), -1)
            grad = grad / denominator.unsqueeze(-1).clamp(min=eps)
            along = -(grad * out).sum(-1, keepdim=True)
            along = along.masked_fill((denominator < eps).unsqueeze(-1), 0.0)
            grad = torch.cat((grad, along), -1)
        layout = lay_out(length, cu_seqlens, reverse, q.device)
        queries, keys, values, grad = (_chunks(x, layout) for x in (queries, keys, values, grad))
        chunk_gate = _chunks(gate, layout, 1.0)
        decays = gate_products(chunk_gate, choose_base(chunk_gate))
        with torch.autocast(q.device.type, enabled=False):
            *found, grad_initial = _grad_chunks(
                queries, keys, values, grad, decays, state, grad_final, layout
            )
        found = [_rows(x, layout, length) for x in found]
        if scale != 1.0:
            found[0] = found[0] * scale
        if log_decay:
            found[3] = found[3] * gate
        found[2] = found[2][..., :columns]
    for given, part in (
        (initial_state, grad_initial[..., :columns]),
        (initial_key_sum, grad_initial[..., -1] if normalize else None),
    ):
        asked = given is not None and part is not None
        found.append(_own(part) if asked and part is not None else q.new_empty((0,), dtype=dtype))
    return tuple(x.contiguous() for x in found)


def _grad_states(
    q: Tensor, grad: Tensor, decays: Decays, grad_final: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the states that leave the chunks, and of the first states."""
    steps = ((q * decays.until).transpose(-1, -2) @ grad).unbind(2)
    through = decays.until[..., -1, :].unsqueeze(-1).unbind(2)
    leaving, current = [], grad_final
    packed = layout.packed
    if packed is None:
        for step, decay in zip(reversed(steps), reversed(through)):
            leaving.append(current)
            current = torch.addcmul(step, decay, current)
        return torch.stack(leaving[::-1], 2), current

    if grad_final.shape[0] == 0 or not steps:
        shape = (*q.shape[:3], q.shape[-1], grad.shape[-1])
        return q.new_zeros(shape), grad_final.clone()
    lasts = grad_final.index_select(0, packed.owner).unsqueeze(1).unbind(0)
    current = torch.zeros_like(lasts[0])
    entering = []
    for i in reversed(range(layout.chunks)):
        current = torch.where(packed.is_last[i], lasts[i], current)
        leaving.append(current)
        current = torch.addcmul(steps[i], through[i], current)
        entering.append(current)
    initial = torch.cat(entering[::-1]).index_select(0, packed.first)
    initial = torch.where(packed.empty.view(-1, 1, 1, 1), grad_final, initial)
    return torch.stack(leaving[::-1], 2), initial


def _grad_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    decays: Decays,
    state: Tensor,
    grad_final: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, the gates and the first states."""
    entering, _ = _states(k, v, decays, state, layout)
    leaving, grad_initial = _grad_states(q, grad, decays, grad_final, layout)
    relative = within_blocks(q, k, decays)
    grad_v = weights_of_pairs(q, k, decays, relative).transpose(-1, -2) @ grad
    grad_v += (k * decays.after) @ leaving
    of_weights = grad @ v.transpose(-1, -2)

    into_q = grad @ entering.transpose(-1, -2)
    into_k = v @ leaving.transpose(-1, -2)
    of_until, of_after = q * into_q, k * into_k
    of_until[..., -1, :] += (entering * leaving).sum(-1)
    grad_q, grad_k = into_q.mul_(decays.until), into_k.mul_(decays.after)

    h = q.shape[-2]
    for level in reversed(decays.levels):
        h //= 2
        q_2, k_1 = halves(q, h)[1], halves(k, h)[0]
        pairs = diagonal(of_weights, 2 * h)[..., h:, :h]
        into_2 = pairs @ (k_1 * level.after)
        into_1 = pairs.transpose(-1, -2) @ (q_2 * level.until)
        (until_1, until_2), (after_1, _) = halves(of_until, h), halves(of_after, h)
        until_1[..., -1:, :].add_((until_2 * level.until).sum(-2, keepdim=True))
        until_2.mul_(level.first).addcmul_(q_2, into_2)
        until_2[..., -1:, :].add_((after_1 * level.after).sum(-2, keepdim=True))
        after_1.mul_(level.second).addcmul_(k_1, into_1)
        halves(grad_q, h)[1].addcmul_(into_2, level.until)
        halves(grad_k, h)[0].addcmul_(into_1, level.after)

    block = decays.block
    if block is None:
        weights = of_weights.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        grad_q.addcmul_(weights, k)
        grad_k.addcmul_(weights, q)
        return grad_q, grad_k, grad_v, of_until, grad_initial

    queries, keys = relative
    pairs = diagonal(of_weights, decays.base).tril()
    into_q, into_k = pairs @ keys, pairs.transpose(-1, -2) @ queries
    grad_q.addcmul_(into_q.flatten(-3, -2), block.until)
    grad_k.addcdiv_(into_k.flatten(-3, -2), block.until)

    # The gradient of log gate t: of what ends at t or later, less what begins there, and of what
    # leaves the block from before t.
    shape = queries.shape[-3:-1]
    ended = queries.mul_(into_q).sub_(keys.mul_(into_k))
    ended.add_(of_until.mul_(block.until).unflatten(-2, shape))
    left = of_after.mul_(block.after).unflatten(-2, shape)
    ones = q.new_ones(shape[-1:] * 2)
    grad_gate = (ones.triu() @ ended + ones.tril(-1) @ left).flatten(-3, -2)
    return grad_q, grad_k, grad_v, grad_gate.div_(decays.gate), grad_initial


# --- Registration ---------------------------------------------------------------------------


def _fake_forward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = state_dtype(q, k, v, lambdas, initial_state, initial_key_sum)
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    batch, heads, length, key_width = q.shape
    state = (rows, heads, key_width)
    return (
        v.new_empty((batch, heads, length, v.shape[3])),
        q.new_empty((*state, v.shape[3]), dtype=dtype),
        q.new_empty(state if normalize else (0,), dtype=dtype),
        q.new_empty((batch, heads, length) if normalize else (0,), dtype=dtype),
    )


def _fake_backward(
    grad_out: Tensor,
    grad_state: Tensor,
    grad_key_sum: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    denominator: Tensor,
    scale: float,
    log_decay: bool,
    normalize: bool,
    eps: float,
    reverse: bool,
) -> tuple[Tensor, ...]:
    dtype = state_dtype(q, k, v, lambdas, initial_state, initial_key_sum)
    asked = (initial_state, initial_key_sum if normalize else None)
    found = [q.new_empty(x.shape, dtype=dtype) for x in (q, k, v, lambdas)]
    return *found, *(q.new_empty((0,) if x is None else x.shape, dtype=dtype) for x in asked)


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor lambdas, Tensor? initial_state, "
    "Tensor? initial_key_sum, Tensor? cu_seqlens"
)
_OPTIONS = "float scale, bool log_decay, bool normalize, float eps, bool reverse"
_forward_op = LIBRARY.register(
    f"gla_scan_torch({_ARGUMENTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
)
_backward_op = LIBRARY.register(
    "gla_scan_torch_bwd(Tensor grad_out, Tensor grad_state, Tensor grad_key_sum, "
    f"{_ARGUMENTS}, Tensor out, Tensor denominator, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
