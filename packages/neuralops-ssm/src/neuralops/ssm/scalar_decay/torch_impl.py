"""The PyTorch form: every chunk of the sequence at once, with a short carry across the chunks.

Within a chunk the outputs are two matrix products around a triangular matrix of decays; a loop over
the chunks, never over tokens, carries the state. The backward computes the chunks anew, so that
nothing but the inputs, the output and the denominators is kept. Packed sequences are laid out anew,
so that each chunk belongs to one of them; the layout is computed on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from neuralops.core.library import signed
from neuralops.core.precision import state_dtype
from neuralops.ssm.library import LIBRARY
from neuralops.ssm.scalar_decay.chunks import (
    Decays,
    Layout,
    constant_decays,
    grad_of_constant,
    grad_of_tokens,
    in_chunks,
    in_rows,
    lay_out,
    token_decays,
)

Tensor = torch.Tensor


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
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
    r"""Compute the scan; differentiable any number of times.

    With $q' = \mathtt{query\_scale}\,\phi(q)$ and $k' = \mathtt{key\_scale}\,\phi(k)$:
    $S_t = g_t S_{t-1} + k'_t v_t^\top$, $Z_t = g_t Z_{t-1} + k'_t$, and the output
    $S_t^\top q'_t$, divided by $\max(q'_t \cdot Z_t, \mathtt{eps})$ if ``normalize``.

    Args:
        q: ``(B, H, L, Dk)``.
        k: ``(B, H, L, Dk)``.
        v: ``(B, H, L, Dv)``.
        gate: ``(H,)``, a constant decay, or ``(B, H, L)``.
        initial_state: ``(B, H, Dk, Dv)``; packed, ``(n, H, Dk, Dv)``.
        initial_key_sum: ``(B, H, Dk)`` or ``(n, H, Dk)``; only if ``normalize``.
        cu_seqlens: ``(n + 1,)``, the boundaries of packed sequences.
        feature_map: ``"elu+1"``, ``"relu"`` or ``"identity"``, applied to q and k.
        query_scale: the factor of the mapped queries.
        key_scale: the factor of the mapped keys.
        normalize: whether the output is divided by the decayed sum of the weights.
        eps: the least denominator.
        log_decay: whether ``gate`` holds natural logarithms.
        reverse: whether to run from the last token to the first.

    Returns:
        The output ``(B, H, L, Dv)`` in the dtype of v, the final state, and the final key sum or
        ``None``.
    """
    options = Options(feature_map, query_scale, key_scale, normalize, eps, log_decay, reverse)
    tensors = (q, k, v, gate, initial_state, initial_key_sum)
    tracked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    run: Callable[..., tuple[Tensor, ...]] = _Scan.apply if tracked else _forward_op
    out, final_state, final_key_sum, _ = run(*tensors, cu_seqlens, *options.values())
    return out, final_state, final_key_sum if normalize else None


@dataclass(frozen=True)
class Options:
    """The arguments of the scan that are no tensors, in their order."""

    feature_map: str
    query_scale: float
    key_scale: float
    normalize: bool
    eps: float
    log_decay: bool
    reverse: bool

    def values(self) -> tuple[Any, ...]:
        """All of them."""
        return tuple(vars(self).values())


class _Scan(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    @signed
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor,
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
    ) -> Any:
        return _forward_op(
            q, k, v, gate, initial_state, initial_key_sum, cu_seqlens,
            feature_map, query_scale, key_scale, normalize, eps, log_decay, reverse,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        out, _, key_sum, denominator = output
        ctx.save_for_backward(*inputs[:7], out, denominator)
        ctx.options = inputs[7:]
        unused = (denominator,) if ctx.options[3] else (key_sum, denominator)
        ctx.mark_non_differentiable(*unused)

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor, grad_state: Tensor, grad_key_sum: Tensor, _: Any
    ) -> Any:
        saved = ctx.saved_tensors
        gradients = _scan_backward(
            grad_out, grad_state, grad_key_sum, *saved, ctx.needs_input_grad[3], *ctx.options
        )
        narrow = [None if x is None else g.to(x.dtype) for x, g in zip(saved, gradients)]
        if not ctx.needs_input_grad[3]:
            narrow[3] = None
        return *narrow, *[None] * 8


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
        gate: Tensor,
        initial_state: Tensor | None,
        initial_key_sum: Tensor | None,
        cu_seqlens: Tensor | None,
        out: Tensor,
        denominator: Tensor,
        of_gate: bool,
        feature_map: str,
        query_scale: float,
        key_scale: float,
        normalize: bool,
        eps: float,
        log_decay: bool,
        reverse: bool,
    ) -> Any:
        return _backward_op(
            grad_out, grad_state, grad_key_sum, q, k, v, gate, initial_state, initial_key_sum,
            cu_seqlens, out, denominator, of_gate,
            feature_map, query_scale, key_scale, normalize, eps, log_decay, reverse,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:10])
        ctx.of_gate, *ctx.options = inputs[12:]

    @staticmethod
    def backward(ctx: Any, *of_gradients: Tensor) -> Any:
        *variables, cu_seqlens = ctx.saved_tensors
        options = Options(*ctx.options)
        present = [i for i, x in enumerate(variables) if x is not None]
        if not options.normalize:
            present.remove(2)
        inputs = [i - 3 for i in present if i >= 3]
        kept = [i for i in inputs if i != 3 or ctx.of_gate]

        def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
            given: list[Tensor | None] = [None] * 9
            for i, x in zip(present, tensors):
                given[i] = x

            def forward(*leaves: Tensor) -> tuple[Tensor, ...]:
                arguments: list[Any] = [None] * 6
                for i, x in zip(inputs, leaves):
                    arguments[i] = x
                with torch.autocast(leaves[0].device.type, enabled=False):
                    q, k, v, gate, state, key_sum = arguments
                    found = _plain(q, k, v, gate, state, key_sum, cu_seqlens, options)
                return found[: 3 if options.normalize else 2]

            outputs, pull = _vjp(forward, *tensors[len(present) - len(inputs) :])
            grads = given[: len(outputs)]
            found = pull(tuple(g.to(x.dtype) for g, x in zip(grads, outputs) if g is not None))
            return tuple(found[inputs.index(i)] for i in kept)

        outputs, pull = _vjp(gradients, *(variables[i] for i in present))
        seeds = tuple(of_gradients[i].to(x.dtype) for i, x in zip(kept, outputs))
        result: list[Tensor | None] = [None] * 20
        for i, x in zip(present, pull(seeds)):
            result[i] = x
        return tuple(result)


_vjp: Callable[..., Any] = torch.func.vjp
_scan_backward: Callable[..., tuple[Tensor, ...]] = _ScanBackward.apply


def _map(x: Tensor, feature_map: str, scale: float) -> Tensor:
    if feature_map == "elu+1":
        x = x.clamp(max=0.0).exp() + x.relu()
    elif feature_map == "relu":
        x = x.relu()
    return x if scale == 1.0 else x * scale


def _grad_of_map(grad: Tensor, x: Tensor, feature_map: str, scale: float) -> Tensor:
    if scale != 1.0:
        grad = grad.mul_(scale)
    if feature_map == "elu+1":
        return grad.mul_(x.clamp(max=0.0).exp_())
    return grad.mul_(x > 0) if feature_map == "relu" else grad


def _with_column(x: Tensor, column: Tensor | float) -> Tensor:
    wide = x.new_empty((*x.shape[:-1], x.shape[-1] + 1))
    wide[..., :-1] = x
    wide[..., -1] = column
    return wide


def _first_state(
    k: Tensor, v: Tensor, state: Tensor | None, key_sum: Tensor | None, rows: int, normalize: bool
) -> Tensor:
    """The first state, with the key sum as its last column if ``normalize``."""
    shape = (rows, k.shape[1], k.shape[-1], v.shape[-1])
    state = k.new_zeros(shape) if state is None else state.to(k.dtype)
    if not normalize:
        return state
    key_sum = k.new_zeros(shape[:-1]) if key_sum is None else key_sum.to(k.dtype)
    return torch.cat((state, key_sum.unsqueeze(-1)), -1)


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The scan in differentiable operations: output, final state, key sum and denominator."""
    dtype = state_dtype(q, k, v, gate, initial_state, initial_key_sum)
    length, normalize = q.shape[2], options.normalize
    keys, values = k.to(dtype), v.to(dtype)
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = _first_state(keys, values, initial_state, initial_key_sum, rows, normalize)
    if length == 0:
        out, final = values.clone(), state.clone()
        denominator = out.new_empty((*out.shape[:2], 0))
    else:
        queries = _map(q.to(dtype), options.feature_map, options.query_scale)
        keys = _map(keys, options.feature_map, options.key_scale)
        if normalize:
            # The key sum is the state of a value that is always 1.
            values = torch.cat((values, values.new_ones((*values.shape[:-1], 1))), -1)
        layout = lay_out(length, cu_seqlens, options.reverse, q.device)
        decays = _decays(gate.to(dtype), layout, options.log_decay)
        queries, keys, values = (in_chunks(x, layout) for x in (queries, keys, values))
        entering, final = _states(keys, values, decays, state, layout)
        out = (queries @ keys.transpose(-1, -2) * decays.pairs) @ values
        out = out + (queries * decays.entry.unsqueeze(-1)) @ entering
        out = in_rows(out, layout, length)
        denominator = out[..., -1] if normalize else out
        if normalize:
            out = out[..., :-1] / denominator.unsqueeze(-1).clamp(min=options.eps)
    empty = out.new_empty((0,))
    if not normalize:
        return out.to(v.dtype), final, empty, empty
    return out.to(v.dtype), final[..., :-1], final[..., -1], denominator


def _decays(gate: Tensor, layout: Layout, log_decay: bool) -> Decays:
    if gate.dim() == 1:
        return constant_decays(gate, layout, log_decay)
    return token_decays(in_chunks(gate, layout, 0.0 if log_decay else 1.0), log_decay)


def _grad_of_gate(gate: Tensor, layout: Layout, log_decay: bool, of: Decays) -> Tensor:
    if gate.dim() == 1:
        later = torch.ones(layout.size, layout.size, dtype=torch.bool, device=gate.device).triu(1)
        of = replace(of, pairs=of.pairs.masked_fill(later, 0.0))
        return grad_of_constant(gate, layout, log_decay, of)
    chunks = in_chunks(gate, layout, 0.0 if log_decay else 1.0)
    grad = grad_of_tokens(chunks, log_decay, of)
    return in_rows(grad.unsqueeze(-1), layout, gate.shape[2]).squeeze(-1)


def _states(
    k: Tensor, v: Tensor, decays: Decays, state: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Return the states that enter the chunks, and those that leave the sequences."""
    steps = ((k * decays.exit.unsqueeze(-1)).transpose(-1, -2) @ v).unbind(2)
    through = decays.total[..., None, None].expand(*k.shape[:3], 1, 1).unbind(2)
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


def _grad_states(
    q: Tensor, grad: Tensor, decays: Decays, grad_final: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the states that leave the chunks, and of the first states."""
    steps = ((q * decays.entry.unsqueeze(-1)).transpose(-1, -2) @ grad).unbind(2)
    through = decays.total[..., None, None].expand(*q.shape[:3], 1, 1).unbind(2)
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


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    cu_seqlens: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the scan without keeping anything: output, final state, key sum and denominator."""
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        out, *rest = _plain(
            q, k, v, gate, initial_state, initial_key_sum, cu_seqlens, Options(*options)
        )
    final_state, final_key_sum, denominator = (_own(x) for x in rest)
    return out.contiguous(), final_state, final_key_sum, denominator


def _own(x: Tensor) -> Tensor:
    """Copy what may be a view of another result."""
    return x.clone(memory_format=torch.contiguous_format)


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    with torch.autocast(arguments[0].device.type, enabled=False):
        return _gradients(*arguments)


def _gradients(
    grad_out: Tensor,
    grad_state: Tensor,
    grad_key_sum: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    denominator: Tensor,
    of_gate: bool,
    *rest: Any,
) -> tuple[Tensor, ...]:
    options = Options(*rest)
    dtype = state_dtype(q, k, v, gate, initial_state, initial_key_sum)
    length, normalize = q.shape[2], options.normalize
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    grad_final = _first_state(k.to(dtype), v, grad_state, grad_key_sum, rows, normalize)
    if length == 0:
        grad_q, grad_k, grad_v = (x.to(dtype, copy=True) for x in (q, k, v))
        grad_gate, grad_initial = torch.zeros_like(gate, dtype=dtype), grad_final.clone()
    else:
        queries, keys = q.to(dtype), k.to(dtype)
        values, grad = v.to(dtype), grad_out.to(dtype)
        state = _first_state(keys, values, initial_state, initial_key_sum, rows, normalize)
        mapped_q = _map(queries, options.feature_map, options.query_scale)
        mapped_k = _map(keys, options.feature_map, options.key_scale)
        if normalize:
            values = _with_column(values, 1.0)
            divisor = denominator.clamp(min=options.eps).unsqueeze(-1)
            grad = grad / divisor
            along = -(grad * out).sum(-1)
            grad = _with_column(grad, along.masked_fill_(denominator < options.eps, 0.0))
        layout = lay_out(length, cu_seqlens, options.reverse, q.device)
        chunked = [in_chunks(x, layout) for x in (mapped_q, mapped_k, values, grad)]
        decays = _decays(gate.to(dtype), layout, options.log_decay)
        q_i, k_i, v_i, grad_i = chunked
        *found, grad_initial, of_decays = _grad_chunks(
            q_i, k_i, v_i, grad_i, decays, state, grad_final, layout, of_gate
        )
        if of_gate:
            grad_gate = _grad_of_gate(gate.to(dtype), layout, options.log_decay, of_decays)
        grad_q, grad_k, grad_v = (in_rows(x, layout, length) for x in found)
        grad_q = _grad_of_map(grad_q, queries, options.feature_map, options.query_scale)
        grad_k = _grad_of_map(grad_k, keys, options.feature_map, options.key_scale)
        grad_v = grad_v[..., :-1] if normalize else grad_v
    if not of_gate:
        grad_gate = gate.new_empty((0,), dtype=dtype)
    columns = v.shape[-1]
    grad_state, grad_key_sum = (
        _own(part) if given is not None else gate.new_empty((0,), dtype=dtype)
        for given, part in (
            (initial_state, grad_initial[..., :columns]),
            (initial_key_sum, grad_initial[..., -1]),
        )
    )
    grad_q, grad_k, grad_v = (x.contiguous() for x in (grad_q, grad_k, grad_v))
    return grad_q, grad_k, grad_v, grad_gate, grad_state, grad_key_sum


def _grad_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    decays: Decays,
    state: Tensor,
    grad_final: Tensor,
    layout: Layout,
    of_gate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Decays]:
    """Return the gradients of q, k, v, the first states and the decays (empty if not asked for)."""
    pairs, entry, exit_, total = decays.tensors()
    entering, _ = _states(k, v, decays, state, layout)
    leaving, grad_initial = _grad_states(q, grad, decays, grad_final, layout)

    weights = q @ k.transpose(-1, -2)
    grad_weights = grad @ v.transpose(-1, -2)
    of_pairs = weights * grad_weights if of_gate else weights
    grad_v = weights.mul_(pairs).transpose(-1, -2) @ grad
    grad_weights.mul_(pairs)
    grad_q, grad_k = grad_weights @ k, grad_weights.transpose(-1, -2) @ q
    del weights, grad_weights

    grad_v.add_((k @ leaving).mul_(exit_.unsqueeze(-1)))
    through_q = grad @ entering.transpose(-1, -2)
    through_k = v @ leaving.transpose(-1, -2)
    of_decays = decays
    if of_gate:
        of_decays = Decays(
            of_pairs.sum_to_size(pairs.shape),
            (q * through_q).sum(-1).sum_to_size(entry.shape),
            (k * through_k).sum(-1).sum_to_size(exit_.shape),
            (entering * leaving).sum((-1, -2)).sum_to_size(total.shape),
        )
    grad_q.add_(through_q.mul_(entry.unsqueeze(-1)))
    grad_k.add_(through_k.mul_(exit_.unsqueeze(-1)))
    return grad_q, grad_k, grad_v, grad_initial, of_decays


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, length, width = q.shape
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = state_dtype(q, k, v, gate, initial_state, initial_key_sum)
    return (
        v.new_empty(v.shape),
        v.new_empty((rows, heads, width, v.shape[3]), dtype=dtype),
        v.new_empty((rows, heads, width) if normalize else (0,), dtype=dtype),
        v.new_empty((batch, heads, length) if normalize else (0,), dtype=dtype),
    )


def _fake_backward(
    grad_out: Tensor,
    grad_state: Tensor,
    grad_key_sum: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    denominator: Tensor,
    of_gate: bool,
    feature_map: str,
    query_scale: float,
    key_scale: float,
    normalize: bool,
    eps: float,
    log_decay: bool,
    reverse: bool,
) -> tuple[Tensor, ...]:
    dtype = state_dtype(q, k, v, gate, initial_state, initial_key_sum)
    shapes = [
        x.shape if x is not None and wanted else (0,)
        for x, wanted in (
            (q, True), (k, True), (v, True), (gate, of_gate),
            (initial_state, True), (initial_key_sum, True),
        )
    ]  # fmt: skip
    return tuple(q.new_empty(shape, dtype=dtype) for shape in shapes)


OPTIONS = (
    "str feature_map, float query_scale, float key_scale, bool normalize, float eps, "
    "bool log_decay, bool reverse"
)
INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor gate, Tensor? initial_state, "
    "Tensor? initial_key_sum, Tensor? cu_seqlens"
)
_forward_op = LIBRARY.register(
    f"scalar_decay_torch({INPUTS}, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    forward,
    _fake_forward,
)
_backward_op = LIBRARY.register(
    f"scalar_decay_torch_bwd(Tensor grad_out, Tensor grad_state, Tensor grad_key_sum, {INPUTS}, "
    f"Tensor out, Tensor denominator, bool of_gate, {OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
