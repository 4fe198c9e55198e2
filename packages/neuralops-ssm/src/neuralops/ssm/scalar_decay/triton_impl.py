"""The Triton form: launchers, registration and autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from neuralops.core.hardware import multiprocessors
from neuralops.core.library import backward_function, signed
from neuralops.core.suitability import INTERPRETING, triton_reasons
from neuralops.ssm.library import LIBRARY
from neuralops.ssm.scalar_decay import torch_impl

Tensor = torch.Tensor

LARGEST_WIDTH = 256


@dataclass(frozen=True)
class Tiles:
    """The shape of a program.

    Attributes:
        chunk: the tokens it works on at a time.
        columns: the columns of the state it owns, at most.
        slice: the rows of the state that it works on at a time, at most.
        warps: its warps.
        stages: how many chunks are loaded ahead, and one more.
    """

    chunk: int
    columns: int
    slice: int
    warps: int
    stages: int


def forward_tiles(width: int, narrow: bool, gated: bool) -> Tiles:
    """The tiles of the forward.

    Args:
        width: the largest number of rows or columns of a state.
        narrow: whether the products take 16-bit operands.
        gated: whether there is a gate for each token.
    """
    if INTERPRETING:
        return INTERPRETED
    if narrow and width <= 64:
        return Tiles(chunk=64, columns=64, slice=64, warps=8 if gated else 4, stages=2)
    if narrow and width <= 128:
        if gated:
            return Tiles(chunk=32, columns=64, slice=64, warps=8, stages=2)
        return Tiles(chunk=64, columns=64, slice=128, warps=8, stages=2)
    if width <= 64:
        return Tiles(chunk=16, columns=32, slice=32 if gated else 64, warps=4, stages=1)
    return Tiles(chunk=16, columns=32, slice=64, warps=8, stages=1)


def parts_tiles(width: int, narrow: bool) -> Tiles:
    """The tiles of the kernels that compute what each part adds to a state."""
    if INTERPRETING:
        return INTERPRETED
    if narrow and width <= 128:
        return Tiles(chunk=64, columns=64, slice=width, warps=4, stages=2)
    if narrow:
        return Tiles(chunk=64, columns=64, slice=width, warps=8, stages=1)
    return Tiles(chunk=32, columns=32, slice=width, warps=4 if width <= 64 else 8, stages=1)


def backward_tiles(width: int, narrow: bool, gated: bool, stateful: bool) -> Tiles:
    """The tiles of the backward; ``stateful``: whether states are given or differentiated."""
    if INTERPRETING:
        return INTERPRETED
    if narrow and width <= 64:
        chunk = 32 if gated or stateful else 64
        return Tiles(chunk=chunk, columns=64, slice=64, warps=8, stages=2)
    if narrow and width <= 128:
        if gated:
            return Tiles(chunk=16, columns=64, slice=64, warps=8, stages=1)
        return Tiles(chunk=32, columns=64, slice=128, warps=8, stages=2)
    return Tiles(chunk=16, columns=32, slice=32 if width <= 64 else 64, warps=8, stages=1)


INTERPRETED = Tiles(chunk=32, columns=64, slice=16, warps=4, stages=1)
"""Triton's interpreter takes a time for each operation, whatever its size."""
PART = 64
"""The tokens of a part are a multiple of it, and of every chunk."""
SPLIT_PROGRAMS = 2
"""A sequence is split into as many parts as make at most this many programs of 64 columns for
each multiprocessor."""


def reasons(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    *rest: Any,
) -> Sequence[str]:
    """Return every reason why the kernels cannot serve the arguments of `scan`."""
    found = triton_reasons(q, k, v, gate, initial_state, initial_key_sum)
    for name, width in (("Dk", q.shape[3]), ("Dv", v.shape[3])):
        if width > LARGEST_WIDTH:
            found.append(f"{name} = {width} is above {LARGEST_WIDTH}, the most the kernels hold")
    return found


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
    """Compute :func:`neuralops.ssm.scalar_decay.torch_impl.scan`; differentiable once."""
    tracked = q.requires_grad or k.requires_grad or v.requires_grad or gate.requires_grad
    tracked = tracked or (initial_state is not None and initial_state.requires_grad)
    tracked = tracked or (initial_key_sum is not None and initial_key_sum.requires_grad)
    run: Callable[..., tuple[Tensor, ...]] = _forward_op
    if tracked and torch.is_grad_enabled():
        run = _Scan.apply
        if gate.requires_grad and gate.dim() == 1:
            # Its gradient is a sum over tokens, best in float32.
            gate = gate.float().view(1, -1, 1).expand(q.shape[0], -1, q.shape[2])
    out, final_state, final_key_sum, _ = run(
        q, k, v, gate, initial_state, initial_key_sum, cu_seqlens,
        feature_map, query_scale, key_scale, normalize, eps, log_decay, reverse,
    )  # fmt: skip
    return out, final_state, final_key_sum if normalize else None


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
        unused = (denominator,) if inputs[10] else (key_sum, denominator)
        ctx.mark_non_differentiable(*unused)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any,
        grad_out: Tensor | None,
        grad_state: Tensor | None,
        grad_sum: Tensor | None,
        _: Any,
    ) -> Any:
        saved = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(saved[7])
        of_gate = ctx.needs_input_grad[3]
        found = list(_backward(grad_out, grad_state, grad_sum, *saved, of_gate, *ctx.options))
        for i in (3, 4, 5):
            given = saved[i]
            if given is None or not ctx.needs_input_grad[i]:
                found[i] = None
            elif i > 3:
                found[i] = found[i].to(given.dtype)
        return *found, *[None] * 8


@dataclass(frozen=True)
class _Plan:
    """What the launches of one call share.

    Attributes:
        sizes: the sequences, the heads, the length, the tokens of a part and the number of parts.
        rows: how many sequences and heads walk side by side.
        split: whether a sequence may have several parts.
        narrow: whether the products take 16-bit operands, and tiles of at least 64 by 64.
        small: whether they take 16-bit operands in smaller tiles: two warps keep these from the
            warpgroups' matrix unit, which read past narrow tiles of 16-bit operands on an H200.
        options: the kernels' compile-time options.
    """

    sizes: tuple[int, ...]
    rows: int
    split: bool
    narrow: bool
    small: bool
    options: dict[str, Any]

    def warps(self, tiles: Tiles) -> int:
        """The warps of a program."""
        return 2 if self.small else tiles.warps

    @property
    def programs(self) -> int:
        """The programs of a launch with one block of columns."""
        return self.rows * self.sizes[4]


def _plan(
    q: Tensor,
    v: Tensor,
    gate: Tensor,
    cu_seqlens: Tensor | None,
    strided: Sequence[Tensor],
    feature_map: str,
    normalize: bool,
    log_decay: bool,
    reverse: bool,
) -> _Plan:
    batch, heads, length, width = q.shape
    packed = cu_seqlens is not None
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    rows, slots = _slots(q, v, packed)
    part = -(-length // (max(slots, 1) * PART)) * PART
    parts = -(-length // part)
    split = parts > 1
    if packed:
        parts += max(sequences - 1, 0)
    unit = 16
    for x in strided:
        for stride in x.stride()[:3]:
            if stride % 16:
                unit = 1
    dot, precision = _operands(strided)
    bf16 = all(x.dtype == torch.bfloat16 for x in strided)
    wide = min(_block(width), _block(v.shape[3])) >= 64
    options = {
        "K": width, "V": v.shape[3], "NORMALIZE": normalize, "LOG_DECAY": log_decay,
        "GATED": gate.dim() == 3, "PACKED": packed, "UNIT": unit, "DOT": dot,
        "PRECISION": precision, "REVERSE": reverse, "ROW": _row_multiple(strided[:3], heads),
    }  # fmt: skip
    return _Plan(
        (sequences, heads, length, part, parts), rows, split,
        bf16 and wide, bf16 and not wide, options,
    )  # fmt: skip


def _operands(tensors: Sequence[Tensor]) -> tuple[Any, str]:
    """The dtype of the products' operands, and how exact products of float32 are.

    float16 is widened, so that states, weights and gradients have the range of float32.
    """
    import triton
    import triton.language as tl

    if INTERPRETING:
        return tl.float32, "ieee"
    if all(x.dtype == torch.bfloat16 for x in tensors):
        return tl.bfloat16, "tf32"
    if triton.runtime.driver.active.get_current_target().backend == "hip":
        return tl.float32, "ieee"
    return tl.float32, "tf32x3" if any(x.dtype == torch.float32 for x in tensors) else "tf32"


def _row_multiple(tensors: Sequence[Tensor], heads: int) -> int:
    """By how many widths the rows of ``tensors`` lie apart, if 1 or the number of heads, else 0."""
    for multiple in (1, heads):
        if all(x.stride(2) == multiple * x.shape[3] for x in tensors):
            return multiple
    return 0


def _slots(q: Tensor, v: Tensor, packed: bool) -> tuple[int, int]:
    """How many sequences and heads there are, and into how many parts each may be split."""
    rows = q.shape[1] if packed else q.shape[0] * q.shape[1]
    blocks = (v.shape[3] + 63) // 64
    programs = SPLIT_PROGRAMS * multiprocessors(q.device)
    return rows, programs // (rows * blocks)


def _carried(plan: _Plan, q: Tensor, v: Tensor) -> Any:
    """Memory for what the parts add to a state and a key sum, and for what they let through."""
    count, width = plan.programs, q.shape[3]
    first = count * width * v.shape[3]
    second = first + count * width
    memory = q.new_empty((second + count,), dtype=torch.float32)
    return memory[:first], memory[first:second], memory[second:]


def _forward_parts(
    plan: _Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    cu_seqlens: Tensor | None,
    feature_map: str,
    key_scale: float,
    strides: tuple[int, ...],
) -> Any:
    from neuralops.ssm.scalar_decay import kernels

    if not plan.split:
        return None, None, None
    states, sums, totals = _carried(plan, q, v)
    width, columns = _block(q.shape[3]), _block(v.shape[3])
    tiles = parts_tiles(max(width, columns), plan.narrow)
    tile_v = min(tiles.columns, columns)
    kernels.forward_parts_kernel[(plan.programs * -(-v.shape[3] // tile_v),)](
        k, v, gate, cu_seqlens, states, sums, totals, key_scale, *plan.sizes, *strides,
        **plan.options, MAP=feature_map, CHUNK=tiles.chunk, BLOCK_K=width,
        BLOCK_V=tile_v, STAGES=tiles.stages, num_warps=plan.warps(tiles),
    )  # fmt: skip
    return states, sums, totals


def _rows(x: Tensor) -> Tensor:
    """Give ``x`` a last dimension without gaps, and rows close enough for offsets of 32 bits."""
    return x if x.stride(3) == 1 and x.stride(2) < 2**24 else x.contiguous()


def _gate_strides(gate: Tensor) -> tuple[int, int, int]:
    if gate.dim() == 1:
        return 0, gate.stride(0), 0
    batch, head, token = gate.stride()
    return batch, head, token


def _block(size: int) -> int:
    """The least power of two that holds ``size`` and makes a product."""
    return max(16, 1 << (size - 1).bit_length())


def _launch_forward(
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
) -> tuple[Tensor, ...]:
    if q.numel() == 0 or v.numel() == 0:
        return torch_impl.forward(
            q, k, v, gate, initial_state, initial_key_sum, cu_seqlens,
            feature_map, query_scale, key_scale, normalize, eps, log_decay, reverse,
        )  # fmt: skip
    from neuralops.ssm.scalar_decay import kernels

    out, final_state, final_key_sum, denominator = _fake_forward(
        q, k, v, gate, initial_state, initial_key_sum, cu_seqlens,
        feature_map, query_scale, key_scale, normalize, eps, log_decay, reverse,
    )  # fmt: skip
    q, k, v = _rows(q), _rows(k), _rows(v)
    plan = _plan(q, v, gate, cu_seqlens, (q, k, v), feature_map, normalize, log_decay, reverse)
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    if initial_key_sum is not None:
        initial_key_sum = initial_key_sum.contiguous()
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.contiguous()
        out.zero_()
        denominator.zero_()
        _start(final_state, initial_state)
        if normalize:
            _start(final_key_sum, initial_key_sum)
    gate_strides = _gate_strides(gate)
    unit = plan.options["UNIT"]
    k_v_strides = (*_strides(k, unit), *_strides(v, unit), *gate_strides)
    width, columns = _block(q.shape[3]), _block(v.shape[3])
    states, sums, totals = _forward_parts(
        plan, q, k, v, gate, cu_seqlens, feature_map, key_scale, k_v_strides
    )
    tiles = forward_tiles(max(width, columns), plan.narrow, gate.dim() == 3)
    tile_v = min(tiles.columns, columns)
    blocks = -(-v.shape[3] // tile_v)
    kernels.forward_kernel[(plan.programs * blocks,)](
        q, k, v, gate, initial_state, initial_key_sum, cu_seqlens, states, sums, totals,
        out, denominator, final_state, final_key_sum,
        query_scale, key_scale, eps, *plan.sizes, *_strides(q, unit), *k_v_strides,
        **plan.options, MAP=feature_map, SPLIT=plan.split,
        HAS_STATE=initial_state is not None, HAS_KEY_SUM=normalize and initial_key_sum is not None,
        CHUNK=tiles.chunk, SLICE=min(width, tiles.slice), SLICES=-(-width // tiles.slice),
        BLOCK_V=tile_v, STAGES=tiles.stages, num_warps=plan.warps(tiles),
    )  # fmt: skip
    return out, final_state, final_key_sum, denominator


def _strides(x: Tensor, unit: int) -> tuple[int, int, int]:
    batch, head, row, _ = x.stride()
    return batch // unit, head // unit, row // unit


def _start(states: Tensor, given: Tensor | None) -> None:
    """Fill what an empty sequence hands through."""
    if given is None:
        states.zero_()
    else:
        states.copy_(given)


def _launch_backward(
    grad_out: Tensor,
    grad_state: Tensor | None,
    grad_key_sum: Tensor | None,
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
    found = _fake_backward(
        grad_out, grad_state, grad_key_sum, q, k, v, gate, initial_state, initial_key_sum,
        cu_seqlens, out, denominator, of_gate,
        feature_map, query_scale, key_scale, normalize, eps, log_decay, reverse,
    )  # fmt: skip
    if q.numel() == 0 or v.numel() == 0:
        _empty_backward(found, grad_state, grad_key_sum, initial_state, initial_key_sum)
        return found
    from neuralops.ssm.scalar_decay import backward_kernels as kernels

    grad_q, grad_k, grad_v, grad_gate, grad_initial_state, grad_initial_key_sum = found
    q, k, v, grad = _rows(q), _rows(k), _rows(v), _rows(grad_out)
    plan = _plan(
        q, v, gate, cu_seqlens, (q, k, v, grad), feature_map, normalize, log_decay, reverse
    )
    _, heads, length, _, parts = plan.sizes
    row_g = _row_multiple((grad,), heads)
    contiguous = (
        x if x is None else x.contiguous()
        for x in (initial_state, initial_key_sum, grad_state, grad_key_sum, cu_seqlens)
    )  # fmt: skip
    initial_state, initial_key_sum, grad_state, grad_key_sum, cu_seqlens = contiguous
    if not normalize:
        initial_key_sum = grad_key_sum = None
    if cu_seqlens is not None:
        for x in (grad_q, grad_k, grad_v, grad_gate):
            x.zero_()
        for x, given, start in (
            (grad_initial_state, initial_state, grad_state),
            (grad_initial_key_sum, initial_key_sum, grad_key_sum),
        ):
            if given is not None:
                _start(x, start)
    gate_strides = _gate_strides(gate)
    unit = plan.options["UNIT"]
    q_strides, g_strides = _strides(q, unit), _strides(grad, unit)
    width, columns = _block(q.shape[3]), _block(v.shape[3])
    count = q.shape[0] * heads * length

    inverse = grad_denominator = None
    if normalize:
        inverse, grad_denominator = denominator.new_empty((2, *denominator.shape)).unbind(0)
        block = max(1, 2048 // columns)
        kernels.denominator_kernel[(-(-count // block),)](
            grad, out, denominator, inverse, grad_denominator,
            eps, heads, length, count, *g_strides,
            V=v.shape[3], BLOCK_V=columns, ROWS=block, UNIT=unit, num_warps=4,
        )  # fmt: skip
    k_v_strides = (*_strides(k, unit), *_strides(v, unit), *gate_strides)
    states, sums, totals = _forward_parts(
        plan, q, k, v, gate, cu_seqlens, feature_map, key_scale, k_v_strides
    )
    grad_states = grad_sums = grad_totals = None
    if plan.split:
        grad_states, grad_sums, grad_totals = _carried(plan, q, v)
        tiles = parts_tiles(max(width, columns), plan.narrow)
        tile_v = min(tiles.columns, columns)
        blocks = -(-v.shape[3] // tile_v)
        kernels.backward_parts_kernel[(plan.programs * blocks,)](
            q, grad, gate, cu_seqlens, inverse, grad_denominator,
            grad_states, grad_sums, grad_totals,
            query_scale, *plan.sizes, *q_strides, *g_strides, *gate_strides,
            **plan.options, MAP=feature_map, ROW_G=row_g, CHUNK=tiles.chunk, BLOCK_K=width,
            BLOCK_V=tile_v, STAGES=tiles.stages, num_warps=plan.warps(tiles),
        )  # fmt: skip

    states_given = (initial_state, initial_key_sum, grad_state, grad_key_sum)
    stateful = any(x is not None for x in states_given)
    tiles = backward_tiles(max(width, columns), plan.narrow, gate.dim() == 3, stateful)
    tile_k, tile_v = min(tiles.columns, width), min(tiles.columns, columns)
    k_blocks, v_blocks = -(-q.shape[3] // tile_k), -(-v.shape[3] // tile_v)
    grad_gates = chunk_states = chunk_key_sums = None
    if of_gate:
        grad_gates = q.new_empty((2 * k_blocks, count), dtype=torch.float32)
        if cu_seqlens is not None:
            grad_gates.zero_()
        chunks = q.shape[0] * heads * (-(-length // tiles.chunk) + parts)
        kind = q.dtype if plan.narrow else torch.float32
        chunk_states = q.new_empty((chunks, v.shape[3] * q.shape[3]), dtype=kind)
        chunk_key_sums = q.new_empty((chunks, q.shape[3]), dtype=torch.float32)
    for of_q, of_kv in ((True, False), (False, True)) if of_gate else ((True, True),):
        roles = (k_blocks if of_q else 0) + (k_blocks + v_blocks if of_kv else 0)
        kernels.backward_kernel[(plan.programs * roles,)](
            q, k, v, grad, gate, cu_seqlens,
            initial_state, initial_key_sum, grad_state, grad_key_sum,
            states, sums, totals, grad_states, grad_sums, grad_totals,
            inverse, grad_denominator, grad_q, grad_k, grad_v, grad_gates,
            grad_initial_state, grad_initial_key_sum, chunk_states, chunk_key_sums,
            query_scale, key_scale, *plan.sizes, count,
            *q_strides, *_strides(k, unit), *_strides(v, unit), *g_strides, *gate_strides,
            **plan.options, MAP=feature_map, SPLIT=plan.split, OF_GATE=of_gate,
            OF_Q=int(of_q), OF_KV=int(of_kv), ROW_G=row_g,
            HAS_STATE=initial_state is not None, HAS_KEY_SUM=initial_key_sum is not None,
            HAS_GRAD_STATE=grad_state is not None, HAS_GRAD_KEY_SUM=grad_key_sum is not None,
            CHUNK=tiles.chunk, SLICE=min(width, tiles.slice), SLICES=-(-width // tiles.slice),
            BLOCK_V=columns, TILE_K=tile_k, TILE_V=tile_v, STAGES=tiles.stages,
            num_warps=plan.warps(tiles),
        )  # fmt: skip
    if of_gate:
        kernels.gate_kernel[(-(-count // 1024),)](
            grad_gates, gate, grad_gate, heads, length, count, *gate_strides,
            SLOTS=2 * k_blocks, LOG_DECAY=log_decay, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return found


def _empty_backward(
    found: tuple[Tensor, ...],
    grad_state: Tensor | None,
    grad_key_sum: Tensor | None,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
) -> None:
    """The gradients where there is no token, or no channel: states are handed through."""
    for x in found[:4]:
        x.zero_()
    for x, given, grad in (
        (found[4], initial_state, grad_state),
        (found[5], initial_key_sum, grad_key_sum),
    ):
        if given is not None:
            _start(x, grad)


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
) -> tuple[Tensor, ...]:
    batch, heads, length, width = q.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    kind = torch.float32
    return (
        v.new_empty(v.shape),
        q.new_empty((sequences, heads, width, v.shape[3]), dtype=kind),
        q.new_empty((sequences, heads, width) if normalize else (0,), dtype=kind),
        q.new_empty((batch, heads, length) if normalize else (0,), dtype=kind),
    )


def _fake_backward(
    grad_out: Tensor,
    grad_state: Tensor | None,
    grad_key_sum: Tensor | None,
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
    nothing = (0,)
    kind = torch.float32
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        gate.new_empty(gate.shape if of_gate else nothing),
        q.new_empty(nothing if initial_state is None else initial_state.shape, dtype=kind),
        q.new_empty(nothing if initial_key_sum is None else initial_key_sum.shape, dtype=kind),
    )


_forward_op = LIBRARY.register(
    f"scalar_decay_fwd({torch_impl.INPUTS}, {torch_impl.OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _launch_forward,
    _fake_forward,
)
_backward = backward_function(
    "a scan with a scalar decay",
    LIBRARY.register(
        "scalar_decay_bwd(Tensor grad_out, Tensor? grad_state, Tensor? grad_key_sum, "
        f"{torch_impl.INPUTS}, Tensor out, Tensor denominator, bool of_gate, "
        f"{torch_impl.OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        _launch_backward,
        _fake_backward,
    ),
    _fake_backward,
)
