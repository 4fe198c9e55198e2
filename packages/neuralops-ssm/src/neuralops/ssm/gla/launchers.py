"""Launches the kernels: sizes, tiles, parts, and memory for what lies between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from neuralops.core.hardware import multiprocessors
from neuralops.core.suitability import INTERPRETING

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
WIDE_OUTPUTS = Tiles(block_k=32, block_v=64, warps=4)
"""For more than 64 key channels."""
GRADIENTS = Tiles(block_k=32, block_v=64, warps=4)
VALUES = Tiles(block_k=32, block_v=64, warps=4)
LEAN_STATES = Tiles(block_k=32, block_v=32, warps=4)
LEAN_OUTPUTS = Tiles(block_k=16, block_v=64, warps=4)
LEAN_GRADIENTS = Tiles(block_k=16, block_v=32, warps=4)
LEAN_VALUES = Tiles(block_k=16, block_v=64, warps=4)
"""The same for what needs more registers: products of float32, strides of any number, plain gates
and the normaliser."""
ENOUGH_PROGRAMS = 0.9
"""With this many programs for each multiprocessor the walk is not split."""
SPLIT_PROGRAMS = 4
"""A split makes about this many programs for each multiprocessor."""
LEAST_PART = 4
"""Chunks in a part, at least."""
LIMIT, WIDE_LIMIT = 100.0, 32.0
"""How far the gates of a block that is taken in one product may go down, in powers of 2."""


def launch_table(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return where the chunks of packed sequences lie, ``(slots, 4)``."""
    from neuralops.ssm.gla import kernels

    table = fake_table(cu_seqlens, length)
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
    lean: bool
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
        precision, parts, sum_parts = "tf32" if wide else "ieee", 2, 2
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
    lean = wide or unit == 1 or not log_decay or normalize
    return _Plan(slots, unit, wide, lean, _ones(q.device), {**flags, "_": sum_parts})


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
    """Copy a tensor whose rows are too far apart for the kernels' 32-bit offsets in a chunk."""
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


def launch_forward(
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
    """Return the output, the final state, the final key sum and the denominators."""
    from neuralops.ssm.gla import forward_kernels, kernels

    batch, heads, length, key_width = q.shape
    value_width = v.shape[3]
    out, final_state, final_sum, denominator = outputs = fake_forward(
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
    tiles = LEAN_STATES if plan.lean else STATES
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

    tiles = OUTPUTS if key_width <= OUTPUTS.block_k else WIDE_OUTPUTS
    shape = _blocks(LEAN_OUTPUTS if plan.lean else tiles, key_width, value_width)
    columns = -(-value_width // shape["BLOCK_V"])
    forward_kernels.outputs_kernel[(columns * plan.slots * batch * heads,)](
        q, k, v, lambdas, states, sums, table, plan.ones, out, denominator,
        scale, eps, heads, length, plan.slots,
        *_strides(q, plan.unit), *_strides(k, plan.unit), *_strides(v, plan.unit),
        *_strides(lambdas, plan.unit),
        LIMIT=WIDE_LIMIT if plan.wide else LIMIT, **flags, **shape,
    )  # fmt: skip
    return outputs


def _without_work(
    outputs: tuple[Tensor, Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a call on empty tensors returns: nothing is summed."""
    outputs[0].zero_()
    outputs[3].zero_()
    return outputs


def _count(shape: dict[str, Any], key_width: int, value_width: int) -> int:
    count: int = -(-key_width // shape["BLOCK_K"]) * -(-value_width // shape["BLOCK_V"])
    return count


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


def launch_backward(
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
    """Return the gradients of q, k, v, the gates, the initial state and its key sum."""
    from neuralops.ssm.gla import backward_kernels, kernels

    batch, heads, length, key_width = q.shape
    value_width = v.shape[3]
    gradients = fake_backward(
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
    if denominator is not None:
        along = torch.empty_like(denominator)
        rows = 32
        backward_kernels.denominators_kernel[(-(-length // rows) * batch * heads,)](
            grad, out, denominator, along, eps, heads, length, *_strides(grad, plan.unit),
            DV=value_width, UNIT=plan.unit, ROWS=rows, BLOCK_V=_block(value_width, 64),
        )  # fmt: skip
    states, sums = _states(q, plan, value_width, normalize)
    grad_states, grad_sums = _states(q, plan, value_width, normalize)
    tiles = LEAN_STATES if plan.lean else STATES
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
    shape = _blocks(LEAN_GRADIENTS if plan.lean else GRADIENTS, key_width, value_width)
    columns = -(-key_width // shape["BLOCK_K"])
    backward_kernels.gradients_kernel[(columns * plan.slots * batch * heads,)](
        q, k, v, lambdas, grad, denominator, along, states, sums, grad_states, grad_sums, table,
        plan.ones, grad_q, grad_k, grad_gates, scale, eps, heads, length, plan.slots, *strides,
        LIMIT=limit, SUM_PARTS=sum_parts, **flags, **shape,
    )  # fmt: skip
    if not log_decay:
        backward_kernels.restarts_kernel[(columns * plan.slots * batch * heads,)](
            q, k, v, lambdas, grad, denominator, along, states, sums, grad_states, grad_sums,
            table, grad_gates, scale, eps, heads, length, plan.slots, *strides, **flags, **shape,
        )  # fmt: skip
    shape = _blocks(LEAN_VALUES if plan.lean else VALUES, key_width, value_width)
    columns = -(-value_width // shape["BLOCK_V"])
    backward_kernels.values_kernel[(columns * plan.slots * batch * heads,)](
        q, k, lambdas, grad, denominator, grad_states, table, plan.ones, grad_v,
        scale, eps, heads, length, plan.slots, *strides[:8], *strides[12:],
        LIMIT=limit, **flags, **shape,
    )  # fmt: skip
    return gradients


# --- Shapes ---------------------------------------------------------------------------------


def fake_table(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return what `launch_table` does, empty."""
    slots = length // CHUNK + cu_seqlens.shape[0] - 1
    return cu_seqlens.new_empty((slots, 4), dtype=torch.int32)


def fake_forward(
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
    """Return what `launch_forward` does, empty."""
    batch, heads, length, key_width = q.shape
    state = (batch if table is None else sequences, heads, key_width)
    return (
        v.new_empty((batch, heads, length, v.shape[3])),
        q.new_empty((*state, v.shape[3]), dtype=torch.float32),
        q.new_empty(state if normalize else (0,), dtype=torch.float32),
        q.new_empty((batch, heads, length) if normalize else (0,), dtype=torch.float32),
    )


def fake_backward(
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
    """Return what `launch_backward` does, empty."""
    asked = (initial_state, initial_state if normalize else None)
    return (
        *(x.new_empty(x.shape) for x in (q, k, v, lambdas)),
        *(
            q.new_empty((0,) if x is None else x.shape[: 4 - i], dtype=torch.float32)
            for i, x in enumerate(asked)
        ),
    )
