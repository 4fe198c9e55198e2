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
from neuralops.ssm.scalar_decay import triton_impl as scalar_decay

Tensor = torch.Tensor

CHUNK = 64
LARGEST_WIDTH = 256


@dataclass(frozen=True)
class Tiles:
    """The blocks of a program: of key channels and of value channels, and its warps."""

    block_k: int
    block_v: int
    warps: int
    stages: int = 1


STATES = Tiles(block_k=64, block_v=64, warps=4, stages=3)
OUTPUTS = Tiles(block_k=64, block_v=64, warps=4)
GRADIENTS = Tiles(block_k=32, block_v=64, warps=4)
VALUES = Tiles(block_k=32, block_v=64, warps=4)
WIDE_STATES = Tiles(block_k=32, block_v=64, warps=4)
WIDE_OUTPUTS = Tiles(block_k=32, block_v=64, warps=4)
WIDE_GRADIENTS = Tiles(block_k=32, block_v=32, warps=4)
WIDE_VALUES = Tiles(block_k=32, block_v=64, warps=4)
"""The same where the products take float32, of which fewer fit the registers."""
ENOUGH_PROGRAMS = 0.9
"""With this many programs for each multiprocessor the walk is not split."""
SPLIT_PROGRAMS = 4
"""A split makes about this many programs for each multiprocessor."""
LEAST_PART = 4
"""Chunks in a part, at least."""
LIMIT, WIDE_LIMIT = 100.0, 32.0
"""How far the gates of a block that is taken in one product may go down, in powers of 2."""


def reasons(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    *options: Any,
) -> Sequence[str]:
    """Return every reason against these kernels."""
    found = triton_reasons(q, k, v, lambdas, initial_state, initial_key_sum)
    for name, width in (("q", q.shape[-1]), ("v", v.shape[-1])):
        if width > LARGEST_WIDTH:
            found.append(f"the width {width} of {name} is above the kernels' limit of 256")
    return found


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
    """Compute :func:`neuralops.ssm.gla_scan`; differentiable once."""
    if lambdas.dim() == 3:
        return scalar_decay.scan(
            q, k, v, lambdas, initial_state, initial_key_sum, cu_seqlens,
            "identity", scale, 1.0, normalize, eps, log_decay, reverse,
        )  # fmt: skip
    table, sequences = None, 0
    if cu_seqlens is not None:
        sequences = cu_seqlens.shape[0] - 1
        table = _table_op(cu_seqlens, q.shape[2])
    tensors = (q, k, v, lambdas, initial_state, initial_key_sum)
    run: Callable[..., tuple[Tensor, ...]] = _forward_op
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        run = _Scan.apply
    out, final_state, final_key_sum, _ = run(
        *tensors, table, sequences, scale, log_decay, normalize, eps, reverse
    )
    return out, final_state, final_key_sum if normalize else None


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
        table: Tensor | None,
        sequences: int,
        scale: float,
        log_decay: bool,
        normalize: bool,
        eps: float,
        reverse: bool,
    ) -> Any:
        return _forward_op(
            q, k, v, lambdas, initial_state, initial_key_sum, table, sequences,
            scale, log_decay, normalize, eps, reverse,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        out, _, key_sum, denominator = output
        ctx.sequences, *ctx.options = inputs[7:]
        normalize = inputs[10]
        kept = (out, denominator) if normalize else (None, None)
        ctx.save_for_backward(*inputs[:7], *kept)
        ctx.mark_non_differentiable(*((denominator,) if normalize else (key_sum, denominator)))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_state: Tensor | None, grad_sum: Tensor | None, _: Any
    ) -> Any:
        q, k, v, lambdas, state, key_sum, table, out, denominator = ctx.saved_tensors
        normalize = denominator is not None
        if grad is None and grad_state is None and grad_sum is None:
            return (None,) * 13
        if grad is None:
            grad = torch.zeros((), dtype=v.dtype, device=v.device).expand(v.shape)
        *found, of_state, of_sum = _backward(
            grad, grad_state, grad_sum if normalize else None, q, k, v, lambdas, state, key_sum,
            table, out, denominator, ctx.sequences, *ctx.options,
        )  # fmt: skip
        of_state = None if state is None else of_state.to(state.dtype)
        of_sum = None if key_sum is None or not normalize else of_sum.to(key_sum.dtype)
        return *found, of_state, of_sum, *[None] * 7


# --- Launchers ------------------------------------------------------------------------------


def _launch_table(cu_seqlens: Tensor, length: int) -> Tensor:
    from neuralops.ssm.gla import kernels

    table = _fake_table(cu_seqlens, length)
    slots, sequences = table.shape[0], cu_seqlens.shape[0] - 1
    if slots > 0 and sequences > 0:
        kernels.table_kernel[(-(-slots // 128),)](
            cu_seqlens.contiguous(), table, sequences, length, slots, CHUNK=CHUNK, BLOCK=128
        )
    return table.zero_() if sequences == 0 else table


@dataclass(frozen=True)
class _Plan:
    """What the launches of a call have in common."""

    slots: int
    unit: int
    wide: bool
    ones: Tensor
    flags: dict[str, Any]


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    grad: Tensor | None,
    table: Tensor | None,
    log_decay: bool,
    normalize: bool,
    reverse: bool,
) -> _Plan:
    import triton.language as tl

    length = q.shape[2]
    unit = 16
    for x in (q, k, v, lambdas) if grad is None else (q, k, v, lambdas, grad):
        batch, head, row, _ = x.stride()
        if batch % 16 or head % 16 or row % 16:
            unit = 1
    dtypes = (q.dtype, k.dtype, v.dtype)
    wide = True
    if INTERPRETING:
        precision, parts, sum_parts = "ieee", 0, 0
    elif torch.float32 in dtypes:
        precision, parts, sum_parts = "bf16x6", 3, 3
    else:
        wide = dtypes != (torch.bfloat16,) * 3
        precision, parts, sum_parts = "tf32", 2, 2
    if parts and log_decay and lambdas.dtype != torch.float32:
        # A logarithm as it is given is exact in one part or two.
        parts = 1 if lambdas.dtype == torch.bfloat16 else 2
    flags = {
        "DK": q.shape[3], "DV": v.shape[3], "LOG": log_decay, "REVERSE": reverse,
        "NORMALIZE": normalize, "PACKED": table is not None, "PRECISION": precision,
        "OPERAND": tl.float32 if wide else tl.bfloat16, "PARTS": parts, "UNIT": unit,
        "CHUNK": CHUNK,
    }  # fmt: skip
    slots = -(-length // CHUNK) if table is None else table.shape[0]
    return _Plan(slots, unit, wide, _ones(q.device), {**flags, "_": sum_parts})


_ONES: dict[torch.device, Tensor] = {}


def _ones(device: torch.device) -> Tensor:
    """The matrices that sum gates, as the kernels number them: ``(11, CHUNK, CHUNK)``."""
    known = _ONES.get(device)
    if known is not None:
        return known
    r, t = torch.arange(CHUNK).unsqueeze(1), torch.arange(CHUNK)
    matrices = [t <= r, t > r]
    for size in (CHUNK, 16):
        middle = r // size * size + size // 2
        up, down = (t > middle) & (t <= r), (t > r) & (t <= middle)
        matrices.append(up.float() - down.float())
    matrices.append(r // 16 == t // 16)
    for h in (1, 2, 4, 8, 16, 32):
        last = r // (2 * h) * (2 * h) + h - 1
        matrices.append(((t > last) & (t <= r)) | ((t > r) & (t <= last)))
    dtype = torch.float32 if INTERPRETING else torch.bfloat16
    made = torch.stack([matrix.to(dtype) for matrix in matrices]).to(device)
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            # A graph fills its own copy only when it is replayed.
            return made
        torch.cuda.current_stream(device).synchronize()
    _ONES[device] = made
    return made


def _near(x: Tensor) -> Tensor:
    """Copy a tensor whose rows are so far apart that a chunk is past the kernels' 32-bit offsets."""
    _, _, row, column = x.stride()
    return x if row * CHUNK + column * LARGEST_WIDTH < 2**31 else x.contiguous()


def _strides(x: Tensor, unit: int) -> tuple[int, int, int, int]:
    batch, head, row, column = x.stride()
    return batch // unit, head // unit, row // unit, column


def _block(width: int, largest: int) -> int:
    """The power of 2, at least 16, that holds ``width``, or else the largest block."""
    return min(largest, max(16, 1 << (width - 1).bit_length()))


def _blocks(tiles: Tiles, key_width: int, value_width: int) -> dict[str, Any]:
    return {
        "BLOCK_K": _block(key_width, tiles.block_k),
        "BLOCK_V": _block(value_width, tiles.block_v),
        "num_warps": tiles.warps,
    }


def _split(programs: int, slots: int, device: torch.device) -> tuple[int, int]:
    """Return of how many chunks each part of the walk is, and how many parts there are."""
    processors = multiprocessors(device)
    splits = 1
    if programs < ENOUGH_PROGRAMS * processors:
        splits = min(-(-SPLIT_PROGRAMS * processors // programs), max(slots // LEAST_PART, 1))
    part = -(-slots // splits)
    return part, -(-slots // part)


def _launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    table: Tensor | None,
    sequences: int,
    scale: float,
    log_decay: bool,
    normalize: bool,
    eps: float,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from neuralops.ssm.gla import forward_kernels, kernels

    batch, heads, length, key_width = q.shape
    value_width = v.shape[3]
    out, final_state, final_sum, denominator = outputs = _fake_forward(
        q, k, v, lambdas, initial_state, initial_key_sum, table, sequences,
        scale, log_decay, normalize, eps, reverse,
    )  # fmt: skip
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    if initial_key_sum is not None:
        initial_key_sum = initial_key_sum.contiguous()
    if table is not None:
        out.zero_()
        denominator.zero_()
    if table is not None or length == 0 or value_width == 0 or key_width == 0:
        _start(final_state, initial_state)
        _start(final_sum, initial_key_sum)
    if 0 in (batch, heads, length, key_width, value_width):
        return _without_work(outputs)

    q, k, v, lambdas = (_near(x) for x in (q, k, v, lambdas))
    plan = _plan(q, k, v, lambdas, None, table, log_decay, normalize, reverse)
    flags = dict(plan.flags)
    del flags["_"]
    states, sums = _states(q, plan, value_width, normalize)
    tiles = WIDE_STATES if plan.wide else STATES
    shape = _blocks(tiles, key_width, value_width)
    programs = batch * heads * _count(shape, key_width, value_width)
    part, splits = _split(programs, plan.slots, q.device)
    ends = _ends(q, splits, value_width, normalize)
    sizes = (
        heads, length, plan.slots, part, splits,
        *_strides(k, plan.unit), *_strides(v, plan.unit), *_strides(lambdas, plan.unit),
    )  # fmt: skip
    arguments = (
        k, v, lambdas, initial_state, initial_key_sum, final_state, final_sum, states, sums,
        *ends, table, plan.ones, *sizes,
    )  # fmt: skip
    walk = {
        **flags, **shape, "HAS_INITIAL": initial_state is not None,
        "SPLIT": splits > 1, "STAGES": tiles.stages,
    }  # fmt: skip
    if splits > 1:
        kernels.states_kernel[(programs * (splits - 1),)](*arguments, ONLY_ENDS=True, **walk)
    kernels.states_kernel[(programs * splits,)](*arguments, ONLY_ENDS=False, **walk)

    shape = _blocks(WIDE_OUTPUTS if plan.wide else OUTPUTS, key_width, value_width)
    columns = -(-value_width // shape["BLOCK_V"])
    forward_kernels.outputs_kernel[(columns * plan.slots * batch * heads,)](
        q, k, v, lambdas, states, sums, table, plan.ones, out, denominator,
        scale, eps, heads, length, plan.slots,
        *_strides(q, plan.unit), *_strides(k, plan.unit), *_strides(v, plan.unit),
        *_strides(lambdas, plan.unit),
        LIMIT=WIDE_LIMIT if plan.wide else LIMIT, **flags, **shape,
    )  # fmt: skip
    return outputs


def _without_work(outputs: tuple[Tensor, ...]) -> Any:
    """What a call on empty tensors returns: nothing is summed."""
    outputs[0].zero_()
    outputs[3].zero_()
    return outputs


def _count(shape: dict[str, Any], key_width: int, value_width: int) -> int:
    return -(-key_width // shape["BLOCK_K"]) * -(-value_width // shape["BLOCK_V"])


def _states(
    q: Tensor, plan: _Plan, value_width: int, normalize: bool
) -> tuple[Tensor, Tensor | None]:
    """Memory for what enters the chunks: states and key sums, or their gradients."""
    batch, heads, _, key_width = q.shape
    rows = batch * heads * plan.slots
    dtype = torch.float32 if plan.wide else torch.bfloat16
    states = q.new_empty((rows, key_width, value_width), dtype=dtype)
    return states, q.new_empty((rows, key_width), dtype=torch.float32) if normalize else None


def _ends(
    q: Tensor, splits: int, value_width: int, normalize: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Memory for what the parts of a walk end with: states, key sums and decays."""
    if splits == 1:
        return None, None, None
    batch, heads, _, key_width = q.shape
    rows = (batch * heads * (splits - 1), key_width)
    return (
        q.new_empty((*rows, value_width), dtype=torch.float32),
        q.new_empty(rows, dtype=torch.float32) if normalize else None,
        q.new_empty(rows, dtype=torch.float32),
    )


def _start(states: Tensor, given: Tensor | None) -> None:
    """Fill what an empty sequence hands through."""
    if states.numel() == 0:
        return
    if given is None:
        states.zero_()
    else:
        states.copy_(given)


def _launch_backward(
    grad: Tensor,
    grad_state: Tensor | None,
    grad_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    table: Tensor | None,
    out: Tensor | None,
    denominator: Tensor | None,
    sequences: int,
    scale: float,
    log_decay: bool,
    normalize: bool,
    eps: float,
    reverse: bool,
) -> tuple[Tensor, ...]:
    from neuralops.ssm.gla import backward_kernels, kernels

    batch, heads, length, key_width = q.shape
    value_width = v.shape[3]
    gradients = _fake_backward(
        grad, grad_state, grad_sum, q, k, v, lambdas, initial_state, initial_key_sum, table,
        out, denominator, sequences, scale, log_decay, normalize, eps, reverse,
    )  # fmt: skip
    grad_q, grad_k, grad_v, grad_gates, grad_initial, grad_initial_sum = gradients
    found = (grad_q, grad_k, grad_v, grad_gates)
    given = (grad_state, grad_sum, initial_state, initial_key_sum)
    grad_state, grad_sum, initial_state, initial_key_sum = (
        None if x is None else x.contiguous() for x in given
    )
    if 0 in (batch, heads, length, key_width, value_width):
        for x in found:
            x.zero_()
    if table is not None:
        for x in found:
            x.zero_()
    if table is not None or 0 in (length, key_width, value_width):
        _start(grad_initial, grad_state)
        _start(grad_initial_sum, grad_sum)
    if 0 in (batch, heads, length, key_width, value_width):
        return gradients

    q, k, v, lambdas, grad = (_near(x) for x in (q, k, v, lambdas, grad))
    plan = _plan(q, k, v, lambdas, grad, table, log_decay, normalize, reverse)
    flags = dict(plan.flags)
    sum_parts = flags.pop("_")
    along = None
    if normalize:
        along = torch.empty_like(denominator)
        rows = 32
        backward_kernels.denominators_kernel[(-(-length // rows) * batch * heads,)](
            grad, out, denominator, along, eps, heads, length, *_strides(grad, plan.unit),
            DV=value_width, UNIT=plan.unit, ROWS=rows, BLOCK_V=_block(value_width, 64),
        )  # fmt: skip
    states, sums = _states(q, plan, value_width, normalize)
    grad_states, grad_sums = _states(q, plan, value_width, normalize)
    tiles = WIDE_STATES if plan.wide else STATES
    shape = _blocks(tiles, key_width, value_width)
    half = batch * heads * _count(shape, key_width, value_width)
    part, splits = _split(2 * half, plan.slots, q.device)
    ends, grad_ends = (_ends(q, splits, value_width, normalize) for _ in range(2))
    strides = [n for x in (q, k, v, lambdas, grad) for n in _strides(x, plan.unit)]
    arguments = (
        q, k, v, lambdas, grad, denominator, along, initial_state, initial_key_sum,
        grad_state, grad_sum, grad_initial, grad_initial_sum, states, sums, grad_states, grad_sums,
        *ends, *grad_ends, table, plan.ones, scale, eps, heads, length, plan.slots, part, splits,
    )  # fmt: skip
    walk = {
        **flags, **shape, "HAS_INITIAL": initial_state is not None,
        "HAS_GRAD_FINAL": grad_state is not None, "HAS_GRAD_FINAL_SUM": grad_sum is not None,
        "SPLIT": splits > 1, "STAGES": tiles.stages,
    }  # fmt: skip
    if splits > 1:
        n = half * (splits - 1)
        kernels.both_states_kernel[(2 * n,)](*arguments, n, *strides, ONLY_ENDS=True, **walk)
    n = half * splits
    kernels.both_states_kernel[(2 * n,)](*arguments, n, *strides, ONLY_ENDS=False, **walk)

    limit = WIDE_LIMIT if plan.wide else LIMIT
    shape = _blocks(WIDE_GRADIENTS if plan.wide else GRADIENTS, key_width, value_width)
    columns = -(-key_width // shape["BLOCK_K"])
    backward_kernels.gradients_kernel[(columns * plan.slots * batch * heads,)](
        q, k, v, lambdas, grad, denominator, along, states, sums, grad_states, grad_sums, table,
        plan.ones, grad_q, grad_k, grad_gates, scale, eps, heads, length, plan.slots, *strides,
        LIMIT=limit, SUM_PARTS=sum_parts, **flags, **shape,
    )  # fmt: skip
    shape = _blocks(WIDE_VALUES if plan.wide else VALUES, key_width, value_width)
    columns = -(-value_width // shape["BLOCK_V"])
    backward_kernels.values_kernel[(columns * plan.slots * batch * heads,)](
        q, k, lambdas, grad, denominator, grad_states, table, plan.ones, grad_v,
        scale, eps, heads, length, plan.slots, *strides[:8], *strides[12:],
        LIMIT=limit, **flags, **shape,
    )  # fmt: skip
    return gradients


# --- Registration ---------------------------------------------------------------------------


def _fake_table(cu_seqlens: Tensor, length: int) -> Tensor:
    slots = length // CHUNK + cu_seqlens.shape[0] - 1
    return cu_seqlens.new_empty((slots, 4), dtype=torch.int32)


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    table: Tensor | None,
    sequences: int,
    scale: float,
    log_decay: bool,
    normalize: bool,
    eps: float,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, length, key_width = q.shape
    state = (batch if table is None else sequences, heads, key_width)
    return (
        v.new_empty((batch, heads, length, v.shape[3])),
        q.new_empty((*state, v.shape[3]), dtype=torch.float32),
        q.new_empty(state if normalize else (0,), dtype=torch.float32),
        q.new_empty((batch, heads, length) if normalize else (0,), dtype=torch.float32),
    )


def _fake_backward(
    grad: Tensor,
    grad_state: Tensor | None,
    grad_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    table: Tensor | None,
    out: Tensor | None,
    denominator: Tensor | None,
    sequences: int,
    scale: float,
    log_decay: bool,
    normalize: bool,
    eps: float,
    reverse: bool,
) -> tuple[Tensor, ...]:
    asked = (initial_state, initial_state if normalize else None)
    return (
        *(x.new_empty(x.shape) for x in (q, k, v, lambdas)),
        *(
            q.new_empty((0,) if x is None else x.shape[: 4 - i], dtype=torch.float32)
            for i, x in enumerate(asked)
        ),
    )


_table_op = LIBRARY.register(
    "gla_chunks(Tensor cu_seqlens, SymInt length) -> Tensor", _launch_table, _fake_table
)
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor lambdas, Tensor? initial_state, "
    "Tensor? initial_key_sum, Tensor? table"
)
_OPTIONS = "SymInt sequences, float scale, bool log_decay, bool normalize, float eps, bool reverse"
_forward_op = LIBRARY.register(
    f"gla_scan_fwd({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _launch_forward,
    _fake_forward,
)
_backward = backward_function(
    "gla_scan",
    LIBRARY.register(
        "gla_scan_bwd(Tensor grad, Tensor? grad_state, Tensor? grad_sum, "
        f"{_INPUTS}, Tensor? out, Tensor? denominator, {_OPTIONS})"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        _launch_backward,
        _fake_backward,
    ),
    _fake_backward,
)
