"""The Triton kernels of the forward; `kernels` has the formulas."""

import triton
import triton.language as tl

from neuralops.ssm.gdn.kernels import (
    ENTER,
    LAST,
    LEAVE,
    NORM_EPS,
    dot,
    from_start,
    inverse,
    load_decays,
    load_rows,
    load_square,
    load_state,
    products,
    sequence_of_chunk,
    sequence_rows,
    store_state,
    sum_of_squares,
    to_end,
)

CHUNKS = ["scale", "H", "L", "chunks", "n", "steps",
          "q_sb", "q_sh", "q_sl", "k_sb", "k_sh", "k_sl",
          "b_sb", "b_sh", "b_sl", "a_sb", "a_sh", "a_sl"]  # fmt: skip


@triton.jit(do_not_specialize=CHUNKS)
def chunk_kernel(
    q, k, beta, alpha, cu_seqlens, squares, factors,
    scale, H, L, chunks, n, steps,
    q_sb, q_sh, q_sl, q_sd, k_sb, k_sh, k_sl, k_sd, b_sb, b_sh, b_sl, a_sb, a_sh, a_sl,
    DK: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr,
    LOG_DECAY: tl.constexpr, NORMALIZE: tl.constexpr, NLMS: tl.constexpr, PACKED: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr, ROUGH: tl.constexpr,
):  # fmt: skip
    """Write what a chunk's walk needs beside q, k and v.

    ``squares (2, B, Hv, L, C)`` are T and A. ``factors`` are those of rows, ``enter, leave, last
    (3, B, Hv, L)``, and then ``whole (B, Hv, chunks)``.
    """
    pid = tl.program_id(0)
    place, i_row = pid % chunks, (pid // chunks).to(tl.int64)
    i_b, i_h = i_row // H, i_row % H
    start, end = place * C, L
    if PACKED:
        start, end = sequence_of_chunk(cu_seqlens, place, n, steps, L, C)
        if start >= end:
            return
    row = start + tl.arange(0, C)
    valid = row < end
    o_k = tl.arange(0, BK)
    p_q = q + (i_b * q_sb + i_h // GROUP * q_sh) * UNIT
    p_k = k + (i_b * k_sb + i_h // GROUP * k_sh) * UNIT
    b_k = load_rows(p_k, row, valid, o_k, DK, k_sl, k_sd, UNIT)
    p_beta = beta + i_b * b_sb + i_h * b_sh + row.to(tl.int64) * b_sl
    b_beta = tl.load(p_beta, mask=valid, other=0.0).to(tl.float32)
    p_alpha = alpha + i_b * a_sb + i_h * a_sh
    _, _, sums, sums_e, total = load_decays(p_alpha, row, valid, a_sl, LOG_DECAY, NLMS)

    DTYPE: tl.constexpr = squares.dtype.element_ty
    rows = tl.num_programs(0).to(tl.int64) // chunks * L
    o_row = i_row * L + row
    r, s = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    o_square = o_row[:, None] * C + s
    b_norm = tl.full((C,), 1.0, tl.float32)
    if NORMALIZE:
        b_norm = tl.rsqrt(sum_of_squares(b_k) + NORM_EPS)
    if NLMS:
        b_beta = b_beta / (1.0 + sum_of_squares(b_k))
    b_lower = dot(b_k, tl.trans(b_k), DTYPE, PRECISION) * products(sums_e, sums, 0)
    b_lower *= b_norm[:, None] * (b_norm * b_beta)[None, :]
    b_t = inverse(tl.where(r > s, b_lower, 0.0), C, ROUGH)
    tl.store(squares + o_square, b_t.to(DTYPE), mask=valid[:, None])

    b_q = load_rows(p_q, row, valid, o_k, DK, q_sl, q_sd, UNIT)
    b_scale = tl.full((C,), 1.0, tl.float32) * scale
    if NORMALIZE:
        b_scale *= tl.rsqrt(sum_of_squares(b_q) + NORM_EPS)
    b_a = dot(b_q, tl.trans(b_k), DTYPE, PRECISION) * products(sums, sums, 0)
    b_a *= b_scale[:, None] * (b_norm * b_beta)[None, :]
    b_a = tl.where(r >= s, b_a, 0.0)
    tl.store(squares + rows * C + o_square, b_a.to(DTYPE), mask=valid[:, None])
    p_factors = factors + o_row
    tl.store(p_factors + ENTER * rows, from_start(sums_e, 0) * b_norm, mask=valid)
    tl.store(p_factors + LEAVE * rows, from_start(sums, 0) * b_scale, mask=valid)
    tl.store(p_factors + LAST * rows, to_end(sums, total, 0) * b_norm * b_beta, mask=valid)
    tl.store(factors + 3 * rows + i_row * chunks + place, from_start(total, 0))


@triton.jit
def walk(cu_seqlens, pid, H, L, part, splits, chunks, B, BLOCKS: tl.constexpr, C: tl.constexpr,
         PACKED: tl.constexpr):  # fmt: skip
    """Which block, part and row ``b * H + h`` is this program's, and which rows it walks along.

    Also the batch row or packed sequence, and the place of its first chunk.
    """
    i_block = pid % BLOCKS
    i_part = pid // BLOCKS % splits
    i_row = pid // BLOCKS // splits
    i_b, i_h = i_row // H, (i_row % H).to(tl.int64)
    i_row = i_row.to(tl.int64)
    if PACKED:
        start, end = sequence_rows(cu_seqlens, i_b, L)
        return i_block, i_part, i_h, i_row, i_h, start, end, start // C + i_b
    start = i_part * part
    end = tl.minimum(L, start + part)
    return i_block, i_part, i_row, i_row, i_h, start, end, start // C


WALK = ["B", "H", "L", "part", "splits", "chunks", "q_sb", "q_sh", "q_sl", "k_sb", "k_sh", "k_sl",
        "v_sb", "v_sh", "v_sl"]  # fmt: skip


@triton.jit(do_not_specialize=WALK)
def forward_parts_kernel(
    k, v, squares, factors, maps,
    B, H, L, part, splits, chunks, k_sb, k_sh, k_sl, k_sd, v_sb, v_sh, v_sl, v_sd,
    DK: tl.constexpr, BK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each part but the last as a map of the state: ``S -> M S + N``.

    ``maps (B, Hv, splits, DK, 2 DV + DK)`` has N and M side by side: N is the state after the
    part from a zero one, and M that from the identity with values of zero. Beside them is place
    for the state that enters the part.
    """
    OF_V: tl.constexpr = (DV + BV - 1) // BV
    BLOCKS: tl.constexpr = OF_V + (DK + BV - 1) // BV
    i_block, i_part, i_row, _, i_h, start, end, _ = walk(
        k, tl.program_id(0), H, L, part, splits - 1, chunks, B, BLOCKS, C, False
    )
    DTYPE: tl.constexpr = squares.dtype.element_ty
    rows = B.to(tl.int64) * H * L
    o_k = tl.arange(0, BK)
    of_values = i_block < OF_V
    o_v = tl.where(of_values, i_block, i_block - OF_V) * BV + tl.arange(0, BV)
    p_k = k + (i_row // H * k_sb + i_h // GROUP * k_sh) * UNIT
    p_v = v + (i_row // H * v_sb + i_h * v_sh) * UNIT
    b_state = tl.where((o_k[:, None] == o_v[None, :]) & (of_values == 0), 1.0, 0.0)
    for first in tl.range(start, end, C, num_stages=STAGES):
        row = first + tl.arange(0, C)
        valid = row < end
        o_row = i_row * L + row
        b_k = load_rows(p_k, row, valid, o_k, DK, k_sl, k_sd, UNIT)
        b_v = load_rows(p_v, row, valid & of_values, o_v, DV, v_sl, v_sd, UNIT)
        b_t = load_square(squares, o_row, valid, C)
        b_enter = tl.load(factors + ENTER * rows + o_row, mask=valid, other=0.0)
        b_last = tl.load(factors + LAST * rows + o_row, mask=valid, other=0.0)
        whole = tl.load(factors + 3 * rows + i_row * chunks + first // C)
        b_read = dot(b_k, b_state, DTYPE, PRECISION)
        b_e = dot(b_t, b_v.to(tl.float32) - b_enter[:, None] * b_read, DTYPE, PRECISION)
        b_state = b_state * whole + dot(tl.trans(b_k), b_last[:, None] * b_e, DTYPE, PRECISION)
    WIDTH: tl.constexpr = 2 * DV + DK
    p_maps = maps + (i_row * splits + i_part) * DK * WIDTH
    o_column = o_v + tl.where(of_values, 0, DV)
    m_column = o_v < tl.where(of_values, DV, DK)
    mask = (o_k < DK)[:, None] & m_column[None, :]
    tl.store(p_maps + o_k[:, None] * WIDTH + o_column[None, :], b_state, mask=mask)


@triton.jit
def apply_map(
    p_map, p_out, b_state, o_k, o_v, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr,
    PITCH: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``M S + N``, or ``M^T S``, some rows at a time, by way of ``p_out``, whose rows are PITCH."""
    WIDTH: tl.constexpr = 2 * DV + DK
    ROWS: tl.constexpr = min(BK, 32)
    for first in tl.range(0, BK, ROWS, num_stages=1):
        o_row = first + tl.arange(0, ROWS)
        m_row = o_row < DK
        if TRANSPOSED:
            o_map = o_k[None, :] * WIDTH + DV + o_row[:, None]
        else:
            o_map = o_row[:, None] * WIDTH + DV + o_k[None, :]
        b_map = tl.load(p_map + o_map, mask=m_row[:, None] & (o_k < DK)[None, :], other=0.0)
        b_rows = dot(b_map, b_state, tl.float32, PRECISION)
        m_out = m_row[:, None] & (o_v < DV)[None, :]
        if not TRANSPOSED:
            o_add = o_row[:, None] * WIDTH + o_v[None, :]
            b_rows += tl.load(p_map + o_add, mask=m_out, other=0.0)
        tl.store(p_out + o_row[:, None] * PITCH + o_v[None, :], b_rows, mask=m_out)
    tl.debug_barrier()
    m_state = (o_k < DK)[:, None] & (o_v < DV)[None, :]
    b_state = tl.load(p_out + o_k[:, None] * PITCH + o_v[None, :], mask=m_state, other=0.0)
    tl.debug_barrier()
    return b_state


@triton.jit(do_not_specialize=WALK)
def forward_kernel(
    q, k, v, squares, factors, maps, initial_state, cu_seqlens,
    o, errors, final_state,
    B, H, L, part, splits, chunks,
    q_sb, q_sh, q_sl, q_sd, k_sb, k_sh, k_sl, k_sd, v_sb, v_sh, v_sl, v_sd,
    DK: tl.constexpr, BK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr, HAS_INITIAL: tl.constexpr, KEEP: tl.constexpr, SPLIT: tl.constexpr,
    PACKED: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write ``o (B, Hv, L, DV)``, the final states and, to KEEP, the errors ``(B, Hv, L, DV)``."""
    i_block, i_part, i_row, i_state, i_h, start, end, place = walk(
        cu_seqlens, tl.program_id(0), H, L, part, splits, chunks, B, (DV + BV - 1) // BV, C, PACKED
    )
    DTYPE: tl.constexpr = squares.dtype.element_ty
    rows = B.to(tl.int64) * H * L
    o_k = tl.arange(0, BK)
    o_v = i_block * BV + tl.arange(0, BV)
    p_q = q + (i_row // H * q_sb + i_h // GROUP * q_sh) * UNIT
    p_k = k + (i_row // H * k_sb + i_h // GROUP * k_sh) * UNIT
    p_v = v + (i_row // H * v_sb + i_h * v_sh) * UNIT
    b_state = tl.zeros((BK, BV), tl.float32)
    if HAS_INITIAL:
        b_state = load_state(initial_state + i_state * DK * DV, o_k, o_v, DK, DV).to(tl.float32)
    if SPLIT:
        WIDTH: tl.constexpr = 2 * DV + DK
        p_maps = maps + i_row * splits * DK * WIDTH
        p_enters = p_maps + i_part * DK * WIDTH + DV + DK
        for i in range(i_part):
            b_state = apply_map(
                p_maps + i * DK * WIDTH, p_enters, b_state, o_k, o_v, DK, DV, BK, WIDTH, False,
                PRECISION,
            )  # fmt: skip

    for first in tl.range(start, end, C, num_stages=STAGES):
        row = first + tl.arange(0, C)
        valid = row < end
        o_row = i_row * L + row
        b_k = load_rows(p_k, row, valid, o_k, DK, k_sl, k_sd, UNIT)
        b_q = load_rows(p_q, row, valid, o_k, DK, q_sl, q_sd, UNIT)
        b_v = load_rows(p_v, row, valid, o_v, DV, v_sl, v_sd, UNIT)
        b_t = load_square(squares, o_row, valid, C)
        b_a = load_square(squares + rows * C, o_row, valid, C)
        b_enter = tl.load(factors + ENTER * rows + o_row, mask=valid, other=0.0)
        b_leave = tl.load(factors + LEAVE * rows + o_row, mask=valid, other=0.0)
        b_last = tl.load(factors + LAST * rows + o_row, mask=valid, other=0.0)
        whole = tl.load(factors + 3 * rows + i_row * chunks + place + (first - start) // C)
        b_16 = b_state.to(DTYPE)
        b_read = dot(b_k, b_16, DTYPE, PRECISION)
        b_e = dot(b_t, b_v.to(tl.float32) - b_enter[:, None] * b_read, DTYPE, PRECISION)
        b_o = b_leave[:, None] * dot(b_q, b_16, DTYPE, PRECISION)
        b_o += dot(b_a, b_e, DTYPE, PRECISION)
        b_state = b_state * whole + dot(tl.trans(b_k), b_last[:, None] * b_e, DTYPE, PRECISION)
        o_out = o_row[:, None] * DV + o_v[None, :]
        m_out = valid[:, None] & (o_v < DV)[None, :]
        tl.store(o + o_out, b_o.to(o.dtype.element_ty), mask=m_out)
        if KEEP:
            tl.store(errors + o_out, b_e.to(DTYPE), mask=m_out)
    if i_part == splits - 1:
        store_state(final_state + i_state * DK * DV, b_state, o_k, o_v, DK, DV)
