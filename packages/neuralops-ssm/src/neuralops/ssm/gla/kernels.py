"""What the kernels share, and the walk along the states.

A chunk is CHUNK tokens in scan order: token i of a chunk lies in its row i, or in row CHUNK - 1 - i
where REVERSE is set. Rows past the chunk's end hold q = k = v = 0 and the gate 1. ``slots`` chunks
make a sequence, or all packed sequences together, some of them empty.

Gates are taken as logarithms, of base 2 or natural ones as they are given, no less than FLOOR, and
become base 2 after they are summed. Every decay is 2 to a sum of logarithms that is formed
directly, by a product with a matrix of ones, and never by a difference: nothing overflows, and a
gate of 0 gives 0.

Between two halves of a block of 2h tokens the decay splits at the middle: the gates up to the query
times the gates after the key. A chunk takes one product of matrices for each h = base, 2 base, ...,
and one for the blocks of ``base`` tokens, relative to their middle token. ``base`` is the largest
block whose gates are near enough to 1, and may be 1. Loops over these products are not pipelined:
when they were, a GPU gave wrong weights, as if products read ones that had not arrived.

A walk carries a matrix ``(Dk, Dv)`` from chunk to chunk: forwards the state, backwards its
gradient. Strides come divided by UNIT, so that the compiler knows what divides them without a
compilation for every length. ``b_`` is a block of values, ``p_`` a pointer, ``o_`` an offset,
``m_`` a mask.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
FLOOR = tl.constexpr(-16384.0)
UNTIL, AFTER, IN_WHOLE, IN_PART, SAME_BLOCK = (tl.constexpr(i) for i in range(5))
"""Matrices of ones, as the launcher lays them out; from LEVEL on those for h = 1, 2, 4, ..."""
LEVEL = tl.constexpr(5)
LEVELS = tl.constexpr(6)
WHOLE, PART = tl.constexpr(6), tl.constexpr(4)
"""The logarithms of the blocks that may be taken in one product: the chunk, and 16 tokens."""
MILD = tl.constexpr(1.0)
"""Plain gates are taken in one product only where their base 2 logarithms are no less than minus
it: their gradient is divided by them."""


@triton.jit
def operand(x, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Round a float32 block to what the matrix units take."""
    if PRECISION == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -8192
        return bits.to(tl.float32, bitcast=True)
    return x.to(OPERAND)


@triton.jit
def load_ones(ones, i, CHUNK: tl.constexpr):
    """Matrix i of the ones."""
    r, t = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    return tl.load(ones + i * (CHUNK * CHUNK) + r * CHUNK + t)


@triton.jit
def ones_product(b_ones, x, PARTS: tl.constexpr):
    """``b_ones @ x``: x in PARTS parts of bfloat16, or as it is if 0."""
    if PARTS == 0:
        return tl.dot(b_ones, x, input_precision="ieee")
    part = x.to(tl.bfloat16)
    total = tl.dot(b_ones, part)
    for _ in tl.static_range(PARTS - 1):
        x = x - part.to(tl.float32)
        part = x.to(tl.bfloat16)
        total = tl.dot(b_ones, part, total)
    return total


@triton.jit
def chunk(table, i_b, slot, slots, L, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Where a chunk's rows start and end, its sequence, and whether it is its first or last one."""
    if PACKED:
        p_row = table + slot * 4
        start, end = tl.load(p_row), tl.load(p_row + 1)
        owner, flags = tl.load(p_row + 2), tl.load(p_row + 3)
        return start, end, owner, (flags & 1) > 0, (flags & 2) > 0
    else:
        start = slot * CHUNK
        return start, tl.minimum(start + CHUNK, L), i_b, slot == 0, slot == slots - 1


@triton.jit
def rows(CHUNK: tl.constexpr, REVERSE: tl.constexpr):
    """The row of each token in its chunk."""
    o_c = tl.arange(0, CHUNK)
    return CHUNK - 1 - o_c if REVERSE else o_c


@triton.jit
def head(p, i_b, i_h, stride_b, stride_h, UNIT: tl.constexpr):
    """Where a head's rows begin."""
    return p + i_b * (stride_b.to(tl.int64) * UNIT) + i_h * (stride_h.to(tl.int64) * UNIT)


@triton.jit
def load_rows(p, start, o_row, m_row, o_d, stride, stride_d, D: tl.constexpr, UNIT: tl.constexpr):
    """Rows of a tensor, ``(CHUNK, BLOCK)``, 0 where there are none."""
    p += start.to(tl.int64) * (stride.to(tl.int64) * UNIT)
    offsets = o_row[:, None] * (stride * UNIT) + o_d[None, :] * stride_d
    return tl.load(p + offsets, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def load_gates(
    p, start, o_row, m_row, o_d, stride, stride_d, D: tl.constexpr, UNIT: tl.constexpr,
    LOG: tl.constexpr,
):  # fmt: skip
    """The gates' logarithms, ``(CHUNK, BLOCK)`` in float32, 0 where there are none."""
    p += start.to(tl.int64) * (stride.to(tl.int64) * UNIT)
    offsets = o_row[:, None] * (stride * UNIT) + o_d[None, :] * stride_d
    mask = m_row[:, None] & (o_d < D)[None, :]
    b_g = tl.load(p + offsets, mask=mask, other=0.0 if LOG else 1.0).to(tl.float32)
    if not LOG:
        b_g = tl.log2(b_g)
    return tl.maximum(b_g, FLOOR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def store_rows(p, x, o_row, m_row, o_d, D: tl.constexpr):
    """Store rows of a contiguous tensor, from ``p`` on."""
    mask = m_row[:, None] & (o_d < D)[None, :]
    tl.store(p + o_row[:, None] * D + o_d[None, :], x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def power(sums, LOG: tl.constexpr):
    """2 to sums of logarithms."""
    return tl.exp2(sums * LOG2_E if LOG else sums)


@triton.jit
def gate_sums(b_g, CHUNK: tl.constexpr):
    """All gates of the chunk, and those up to its middle token, ``(BLOCK,)`` each."""
    first = (tl.arange(0, CHUNK) <= CHUNK // 2)[:, None]
    return tl.sum(b_g, 0), tl.sum(tl.where(first, b_g, 0.0), 0)


@triton.jit
def choose_base(
    b_g, b_total, ones, LOG: tl.constexpr, PARTS: tl.constexpr, LIMIT: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest block whose gates go down no further than 2 to the minus LIMIT.

    It is given as the logarithm of its size: 6, 4 or 0.
    """
    b_range = tl.abs(b_total) * LOG2_E if LOG else tl.abs(b_total)
    base = tl.where(tl.max(b_range) > LIMIT, 0, WHOLE)
    if base == 0:
        b_size = tl.abs(b_g) * LOG2_E if LOG else tl.abs(b_g)
        b_sums = ones_product(load_ones(ones, SAME_BLOCK, CHUNK), b_size, PARTS)
        base = tl.where(tl.max(b_sums) > LIMIT, 0, PART)
    if not LOG:
        base = tl.where(tl.max(tl.abs(b_g)) > MILD, 0, base)
    return base


@triton.jit(do_not_specialize=["n", "L", "slots"])
def table_kernel(cu_seqlens, table, n, L, slots, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """For each slot: the rows of its chunk, the packed sequence, 1 if the first plus 2 if the last.

    Sequence i has the slots from ``cu_seqlens[i] // CHUNK + i`` on, so that none has another's.
    """
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros_like(slot)
    high = low + (n - 1)
    for _ in range(32):
        middle = (low + high + 1) // 2
        boundary = tl.load(cu_seqlens + middle).to(tl.int32)
        before = boundary // CHUNK + middle <= slot
        low = tl.where(before, middle, low)
        high = tl.where(before, high, tl.maximum(middle - 1, low))
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + low).to(tl.int32), 0), L)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + low + 1).to(tl.int32), start), L)
    row = start + (slot - (start // CHUNK + low)) * CHUNK
    used = (row >= start) & (row < end)
    first = used & (row == start)
    last = used & (row + CHUNK >= end)
    m_slot = slot < slots
    p_row = table + slot * 4
    tl.store(p_row, tl.where(used, row, 0), mask=m_slot)
    tl.store(p_row + 1, tl.where(used, tl.minimum(row + CHUNK, end), 0), mask=m_slot)
    tl.store(p_row + 2, low, mask=m_slot)
    tl.store(p_row + 3, first.to(tl.int32) + 2 * last.to(tl.int32), mask=m_slot)


@triton.jit
def _load_state(p, o_k, o_v, DK: tl.constexpr, DV: tl.constexpr):
    mask = (o_k < DK)[:, None] & (o_v < DV)[None, :]
    return tl.load(p + o_k[:, None] * DV + o_v[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_state(p, x, o_k, o_v, DK: tl.constexpr, DV: tl.constexpr):
    mask = (o_k < DK)[:, None] & (o_v < DV)[None, :]
    tl.store(p + o_k[:, None] * DV + o_v[None, :], x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def _walk(
    x, y, gates, denominator, along, entering, entering_sum, leaving, leaving_sum, states, sums,
    ends, end_sums, end_decays, table, ones, pid,
    scale, eps, H, L, slots, part, splits,
    x_sb, x_sh, x_sl, x_sd, y_sb, y_sh, y_sl, y_sd, g_sb, g_sh, g_sl, g_sd,
    DK: tl.constexpr, DV: tl.constexpr, LOG: tl.constexpr, REVERSE: tl.constexpr,
    BACKWARDS: tl.constexpr, NORMALIZE: tl.constexpr, PACKED: tl.constexpr,
    HAS_ENTERING: tl.constexpr, HAS_ENTERING_SUM: tl.constexpr, HAS_LEAVING: tl.constexpr,
    ONLY_ENDS: tl.constexpr, SPLIT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk ``part`` chunks with a block ``(BLOCK_K, BLOCK_V)`` of the state or its gradient.

    Forwards x is k and y is v; backwards, against the scan's order, x is q and y the gradient of
    the output. With ONLY_ENDS a part starts from nothing and its end is written; else it starts
    from the ends of the parts before it, and what enters each chunk is written.
    """
    blocks_v: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    blocks: tl.constexpr = (DK + BLOCK_K - 1) // BLOCK_K * blocks_v
    parts = splits - 1 if ONLY_ENDS else splits
    i_block = pid % blocks
    i_part = pid // blocks % parts
    i_bh = (pid // blocks // parts).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    o_k = i_block // blocks_v * BLOCK_K + tl.arange(0, BLOCK_K)
    o_v = i_block % blocks_v * BLOCK_V + tl.arange(0, BLOCK_V)
    m_sum = (o_k < DK) & (i_block % blocks_v == 0)
    p_x = head(x, i_b, i_h, x_sb, x_sh, UNIT)
    p_y = head(y, i_b, i_h, y_sb, y_sh, UNIT)
    p_g = head(gates, i_b, i_h, g_sb, g_sh, UNIT)
    o_row = rows(CHUNK, REVERSE)
    b_ones = load_ones(ones, UNTIL if BACKWARDS else AFTER, CHUNK)
    DESCENDING: tl.constexpr = REVERSE != BACKWARDS

    b_state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    b_sum = tl.zeros((BLOCK_K,), tl.float32)
    b_through = tl.full((BLOCK_K,), 1.0, tl.float32)
    if not PACKED and not ONLY_ENDS:
        if HAS_ENTERING:
            b_state = _load_state(entering + i_bh * DK * DV, o_k, o_v, DK, DV)
        if NORMALIZE and HAS_ENTERING_SUM:
            p_sum = entering_sum + i_bh * DK + o_k
            b_sum = tl.load(p_sum, mask=o_k < DK, other=0.0).to(tl.float32)
    if SPLIT and not ONLY_ENDS:
        for i in range(i_part):
            i_end = i_bh * (splits - 1) + i
            b_d = tl.load(end_decays + i_end * DK + o_k, mask=o_k < DK, other=0.0)
            b_state *= b_d[:, None]
            b_state += _load_state(ends + i_end * DK * DV, o_k, o_v, DK, DV)
            if NORMALIZE:
                b_end = tl.load(end_sums + i_end * DK + o_k, mask=o_k < DK, other=0.0)
                b_sum = b_sum * b_d + b_end

    first = i_part * part
    for i in tl.range(first, tl.minimum(first + part, slots), num_stages=STAGES):
        slot = (slots - 1 - i) if DESCENDING else i
        start, end, owner, is_first, is_last = chunk(table, i_b, slot, slots, L, CHUNK, PACKED)
        if PACKED:
            enters, leaves = (is_last, is_first) if DESCENDING else (is_first, is_last)
            o_owner = owner.to(tl.int64) * H + i_h
            if enters:
                if HAS_ENTERING:
                    b_state = _load_state(entering + o_owner * DK * DV, o_k, o_v, DK, DV)
                else:
                    b_state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
                b_through = tl.zeros((BLOCK_K,), tl.float32)
                b_sum = tl.zeros((BLOCK_K,), tl.float32)
                if NORMALIZE and HAS_ENTERING_SUM:
                    p_sum = entering_sum + o_owner * DK + o_k
                    b_sum = tl.load(p_sum, mask=o_k < DK, other=0.0).to(tl.float32)
        m_row = start + o_row < end
        if not ONLY_ENDS:
            o_slot = i_bh * slots + slot
            _store_state(states + o_slot * DK * DV, b_state, o_k, o_v, DK, DV)
            if NORMALIZE:
                tl.store(sums + o_slot * DK + o_k, b_sum, mask=m_sum)
        b_x = load_rows(p_x, start, o_row, m_row, o_k, x_sl, x_sd, DK, UNIT)  # (CHUNK, BLOCK_K)
        b_y = load_rows(p_y, start, o_row, m_row, o_v, y_sl, y_sd, DV, UNIT)  # (CHUNK, BLOCK_V)
        b_g = load_gates(p_g, start, o_row, m_row, o_k, g_sl, g_sd, DK, UNIT, LOG)
        b_d = power(tl.sum(b_g, 0), LOG)
        b_x = b_x.to(tl.float32) * power(ones_product(b_ones, b_g, PARTS), LOG)
        if BACKWARDS:
            b_x *= scale
            b_y = b_y.to(tl.float32)
            if NORMALIZE:
                p_den = denominator + i_bh * L + start + o_row
                b_den = tl.load(p_den, mask=m_row, other=1.0)
                b_y /= tl.maximum(b_den, eps)[:, None]
            b_y = operand(b_y, OPERAND, PRECISION)
        else:
            b_y = b_y.to(OPERAND)
        b_state = b_state * b_d[:, None] + tl.dot(
            tl.trans(operand(b_x, OPERAND, PRECISION)), b_y, input_precision=PRECISION
        )
        b_through *= b_d
        if NORMALIZE:
            if BACKWARDS:
                b_along = tl.load(along + i_bh * L + start + o_row, mask=m_row, other=0.0)
                b_x *= b_along[:, None]
            b_sum = b_sum * b_d + tl.sum(b_x, 0)
        if PACKED and HAS_LEAVING and not ONLY_ENDS:  # noqa: SIM102
            if leaves:
                _store_state(leaving + o_owner * DK * DV, b_state, o_k, o_v, DK, DV)
                if NORMALIZE:
                    tl.store(leaving_sum + o_owner * DK + o_k, b_sum, mask=m_sum)
    if ONLY_ENDS:
        i_end = i_bh * parts + i_part
        _store_state(ends + i_end * DK * DV, b_state, o_k, o_v, DK, DV)
        tl.store(end_decays + i_end * DK + o_k, b_through, mask=m_sum)
        if NORMALIZE:
            tl.store(end_sums + i_end * DK + o_k, b_sum, mask=m_sum)
    elif HAS_LEAVING and not PACKED:  # noqa: SIM102
        if i_part == splits - 1:
            _store_state(leaving + i_bh * DK * DV, b_state, o_k, o_v, DK, DV)
            if NORMALIZE:
                tl.store(leaving_sum + i_bh * DK + o_k, b_sum, mask=m_sum)


STRIDES = [f"{x}_s{axis}" for x in ("q", "k", "v", "g", "x") for axis in ("b", "h", "l")]
SCALARS = ["scale", "eps", "H", "L", "slots", "part", "splits", "half", *STRIDES]


@triton.jit(do_not_specialize=SCALARS)
def states_kernel(
    k, v, gates, initial_state, initial_sum, final_state, final_sum, states, sums,
    ends, end_sums, end_decays, table, ones,
    H, L, slots, part, splits,
    k_sb, k_sh, k_sl, k_sd, v_sb, v_sh, v_sl, v_sd, g_sb, g_sh, g_sl, g_sd,
    DK: tl.constexpr, DV: tl.constexpr, LOG: tl.constexpr, REVERSE: tl.constexpr,
    NORMALIZE: tl.constexpr, PACKED: tl.constexpr, HAS_INITIAL: tl.constexpr,
    ONLY_ENDS: tl.constexpr, SPLIT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the states that enter the chunks, ``(B H, slots, Dk, Dv)``, and the final ones."""
    _walk(
        k, v, gates, None, None, initial_state, initial_sum, final_state, final_sum, states, sums,
        ends, end_sums, end_decays, table, ones, tl.program_id(0),
        1.0, 0.0, H, L, slots, part, splits,
        k_sb, k_sh, k_sl, k_sd, v_sb, v_sh, v_sl, v_sd, g_sb, g_sh, g_sl, g_sd,
        DK, DV, LOG, REVERSE, False, NORMALIZE, PACKED, HAS_INITIAL, HAS_INITIAL, True,
        ONLY_ENDS, SPLIT, OPERAND, PRECISION, PARTS, UNIT, CHUNK, BLOCK_K, BLOCK_V, STAGES,
    )  # fmt: skip


@triton.jit(do_not_specialize=SCALARS)
def both_states_kernel(
    q, k, v, gates, grad, denominator, along, initial_state, initial_sum, grad_final,
    grad_final_sum, grad_initial, grad_initial_sum, states, sums, grad_states, grad_sums,
    ends, end_sums, end_decays, grad_ends, grad_end_sums, grad_end_decays, table, ones,
    scale, eps, H, L, slots, part, splits, half,
    q_sb, q_sh, q_sl, q_sd, k_sb, k_sh, k_sl, k_sd, v_sb, v_sh, v_sl, v_sd,
    g_sb, g_sh, g_sl, g_sd, x_sb, x_sh, x_sl, x_sd,
    DK: tl.constexpr, DV: tl.constexpr, LOG: tl.constexpr, REVERSE: tl.constexpr,
    NORMALIZE: tl.constexpr, PACKED: tl.constexpr, HAS_INITIAL: tl.constexpr,
    HAS_GRAD_FINAL: tl.constexpr, HAS_GRAD_FINAL_SUM: tl.constexpr,
    ONLY_ENDS: tl.constexpr, SPLIT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the states that enter the chunks, and the gradients of those that leave them.

    The first ``half`` programs walk forwards, the others backwards.
    """
    pid = tl.program_id(0)
    if pid < half:
        _walk(
            k, v, gates, None, None, initial_state, initial_sum, None, None, states, sums,
            ends, end_sums, end_decays, table, ones, pid,
            1.0, 0.0, H, L, slots, part, splits,
            k_sb, k_sh, k_sl, k_sd, v_sb, v_sh, v_sl, v_sd, g_sb, g_sh, g_sl, g_sd,
            DK, DV, LOG, REVERSE, False, NORMALIZE, PACKED, HAS_INITIAL, HAS_INITIAL, False,
            ONLY_ENDS, SPLIT, OPERAND, PRECISION, PARTS, UNIT, CHUNK, BLOCK_K, BLOCK_V, STAGES,
        )  # fmt: skip
    else:
        _walk(
            q, grad, gates, denominator, along, grad_final, grad_final_sum,
            grad_initial, grad_initial_sum, grad_states, grad_sums,
            grad_ends, grad_end_sums, grad_end_decays, table, ones, pid - half,
            scale, eps, H, L, slots, part, splits,
            q_sb, q_sh, q_sl, q_sd, x_sb, x_sh, x_sl, x_sd, g_sb, g_sh, g_sl, g_sd,
            DK, DV, LOG, REVERSE, True, NORMALIZE, PACKED, HAS_GRAD_FINAL, HAS_GRAD_FINAL_SUM,
            HAS_INITIAL, ONLY_ENDS, SPLIT, OPERAND, PRECISION, PARTS, UNIT,
            CHUNK, BLOCK_K, BLOCK_V, STAGES,
        )  # fmt: skip
