"""The Triton kernels of the backward; `kernels` has the formulas.

With ``g`` the gradient of the outputs and ``dS`` that of the state after a chunk, the gradients
of the errors and of the values, which are those of ``v - enter * k S``, are

    de = A^T g + last * k dS,   dv = T^T de,
    dS = whole * dS + (leave * q)^T g - (enter * k)^T dv      at the chunk's begin.

One walk forwards writes the state that enters every other chunk, from the errors that the forward
kept, and one backwards dv and dS after each chunk. Then every chunk is on its own: the gradients
of q, k, beta and of each product of decays, and from those products that of each decay.
"""

import triton
import triton.language as tl

from neuralops.ssm.gdn.forward_kernels import apply_map, walk
from neuralops.ssm.gdn.kernels import (
    ENTER,
    LAST,
    LEAVE,
    NORM_EPS,
    dot,
    from_start,
    load_decays,
    load_rows,
    load_square,
    load_state,
    products,
    sequence_of_chunk,
    store_state,
    sum_of_squares,
    to_end,
)

WALK = ["B", "H", "L", "part", "splits", "chunks", "q_sb", "q_sh", "q_sl", "k_sb", "k_sh", "k_sl",
        "g_sb", "g_sh", "g_sl"]  # fmt: skip


@triton.jit(do_not_specialize=WALK)
def states_kernel(
    k, errors, factors, maps, initial_state, cu_seqlens, states,
    B, H, L, part, splits, chunks, k_sb, k_sh, k_sl, k_sd,
    DK: tl.constexpr, BK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr, HAS_INITIAL: tl.constexpr, SPLIT: tl.constexpr, PACKED: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the state that enters every other chunk: ``states (B, Hv, cdiv(chunks, 2), DK, DV)``.

    Packed, that which enters each one: ``states (B, Hv, chunks, DK, DV)``.
    """
    i_block, i_part, i_row, i_state, i_h, start, end, place = walk(
        cu_seqlens, tl.program_id(0), H, L, part, splits, chunks, B, (DV + BV - 1) // BV, C, PACKED
    )
    DTYPE: tl.constexpr = states.dtype.element_ty
    rows = B.to(tl.int64) * H * L
    o_k = tl.arange(0, BK)
    o_v = i_block * BV + tl.arange(0, BV)
    p_k = k + (i_row // H * k_sb + i_h // GROUP * k_sh) * UNIT
    b_state = tl.zeros((BK, BV), tl.float32)
    if HAS_INITIAL:
        b_state = load_state(initial_state + i_state * DK * DV, o_k, o_v, DK, DV).to(tl.float32)
    if SPLIT:  # noqa: SIM102 - a constant
        if i_part > 0:
            WIDTH: tl.constexpr = 2 * DV + DK
            p_enters = maps + (i_row * splits + i_part) * DK * WIDTH + DV + DK
            m_state = (o_k < DK)[:, None] & (o_v < DV)[None, :]
            o_state = o_k[:, None] * WIDTH + o_v[None, :]
            b_state = tl.load(p_enters + o_state, mask=m_state, other=0.0)
    p_errors = errors + i_row * L * DV
    for first in tl.range(start, end, C, num_stages=STAGES):
        row = first + tl.arange(0, C)
        valid = row < end
        o_row = i_row * L + row
        i_chunk = i_row * chunks + place + (first - start) // C
        if PACKED:
            store_state(states + i_chunk * DK * DV, b_state, o_k, o_v, DK, DV)
        elif first // C % 2 == 0:
            p_state = states + (i_row * ((chunks + 1) // 2) + first // C // 2) * DK * DV
            store_state(p_state, b_state, o_k, o_v, DK, DV)
        b_k = load_rows(p_k, row, valid, o_k, DK, k_sl, k_sd, UNIT)
        o_e = row.to(tl.int64)[:, None] * DV + o_v[None, :]
        b_e = tl.load(p_errors + o_e, mask=valid[:, None] & (o_v < DV)[None, :], other=0.0)
        b_last = tl.load(factors + LAST * rows + o_row, mask=valid, other=0.0)
        whole = tl.load(factors + 3 * rows + i_chunk)
        b_e = b_last[:, None] * b_e.to(tl.float32)
        b_state = b_state * whole + dot(tl.trans(b_k), b_e, DTYPE, PRECISION)


@triton.jit(do_not_specialize=WALK)
def gradient_walk_kernel(
    q, k, g, squares, factors, maps, grad_parts, grad_final, cu_seqlens,
    grad_v, grad_states, grad_initial,
    B, H, L, part, splits, chunks,
    q_sb, q_sh, q_sl, q_sd, k_sb, k_sh, k_sl, k_sd, g_sb, g_sh, g_sl, g_sd,
    DK: tl.constexpr, BK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr, HAS_GRAD_FINAL: tl.constexpr, HAS_INITIAL: tl.constexpr,
    PARTS: tl.constexpr, SPLIT: tl.constexpr, PACKED: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the values, of the state after each chunk, and of initial states.

    To find the PARTS it starts each part but the last from zero, and only writes the gradient at
    the part's begin: ``grad_parts (B, Hv, 2, splits, DK, DV)``, whose other half is memory to
    work in.
    """
    i_block, i_part, i_row, i_state, i_h, start, end, place = walk(
        cu_seqlens, tl.program_id(0), H, L, part, splits, chunks, B, (DV + BV - 1) // BV, C, PACKED
    )
    if PARTS:  # noqa: SIM102 - a constant
        if i_part == 0:
            return
    DTYPE: tl.constexpr = squares.dtype.element_ty
    rows = B.to(tl.int64) * H * L
    o_k = tl.arange(0, BK)
    o_v = i_block * BV + tl.arange(0, BV)
    p_q = q + (i_row // H * q_sb + i_h // GROUP * q_sh) * UNIT
    p_k = k + (i_row // H * k_sb + i_h // GROUP * k_sh) * UNIT
    p_g = g + (i_row // H * g_sb + i_h * g_sh) * UNIT
    b_grad = tl.zeros((BK, BV), tl.float32)
    if HAS_GRAD_FINAL:  # noqa: SIM102 - a constant
        if i_part == splits - 1:
            p_final = grad_final + i_state * DK * DV
            b_grad = load_state(p_final, o_k, o_v, DK, DV).to(tl.float32)
    if SPLIT:
        # The last part began with the gradient of the final state, so that it needs no map.
        p_parts = grad_parts + i_row * 2 * splits * DK * DV
        p_out = p_parts + (splits + i_part) * DK * DV
        p_maps = maps + i_row * splits * DK * (2 * DV + DK)
        for i in range(splits - 1, i_part, -1):
            if i < splits - 1:
                b_grad = apply_map(
                    p_maps + i * DK * (2 * DV + DK), p_out, b_grad, o_k, o_v, DK, DV, BK, DV, True,
                    PRECISION,
                )  # fmt: skip
            b_grad += load_state(p_parts + i * DK * DV, o_k, o_v, DK, DV)

    n_chunks = (end - start + C - 1) // C
    for i in tl.range(0, n_chunks, num_stages=STAGES):
        first = start + (n_chunks - 1 - i) * C
        row = first + tl.arange(0, C)
        valid = row < end
        o_row = i_row * L + row
        i_chunk = i_row * chunks + place + (first - start) // C
        b_k = load_rows(p_k, row, valid, o_k, DK, k_sl, k_sd, UNIT)
        b_q = load_rows(p_q, row, valid, o_k, DK, q_sl, q_sd, UNIT)
        b_g = load_rows(p_g, row, valid, o_v, DV, g_sl, g_sd, UNIT)
        b_t = load_square(squares, o_row, valid, C)
        b_a = load_square(squares + rows * C, o_row, valid, C)
        b_enter = tl.load(factors + ENTER * rows + o_row, mask=valid, other=0.0)
        b_leave = tl.load(factors + LEAVE * rows + o_row, mask=valid, other=0.0)
        b_last = tl.load(factors + LAST * rows + o_row, mask=valid, other=0.0)
        whole = tl.load(factors + 3 * rows + i_chunk)
        if PARTS == 0:
            store_state(grad_states + i_chunk * DK * DV, b_grad, o_k, o_v, DK, DV)
        b_de = dot(tl.trans(b_a), b_g, DTYPE, PRECISION)
        b_de += b_last[:, None] * dot(b_k, b_grad, DTYPE, PRECISION)
        b_dv = dot(tl.trans(b_t), b_de, DTYPE, PRECISION)
        if PARTS == 0:
            o_out = o_row[:, None] * DV + o_v[None, :]
            m_out = valid[:, None] & (o_v < DV)[None, :]
            tl.store(grad_v + o_out, b_dv.to(grad_v.dtype.element_ty), mask=m_out)
        b_grad = b_grad * whole
        b_grad += dot(tl.trans(b_q), b_leave[:, None] * b_g.to(tl.float32), DTYPE, PRECISION)
        b_grad -= dot(tl.trans(b_k), b_enter[:, None] * b_dv, DTYPE, PRECISION)
    if PARTS:
        p_part = grad_parts + (i_row * 2 * splits + i_part) * DK * DV
        store_state(p_part, b_grad, o_k, o_v, DK, DV)
    elif HAS_INITIAL:  # noqa: SIM102 - a constant
        if i_part == 0:
            store_state(grad_initial + i_state * DK * DV, b_grad, o_k, o_v, DK, DV)


@triton.jit
def _of_pairs(
    b_of_pairs, sums_r, sums, b_reset, variants,
    BEFORE: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of each decay's logarithm ``(C,)`` from the products between tokens s < r.

    That of a reset is its own, the product of all others: so there are two VARIANTS where there
    are resets, without a reset in the product and with one that counts as 1. Where token r reads
    the state BEFORE its decay, that decay is not in.
    """
    r, s = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    b_grad = tl.zeros((C,), tl.float32)
    for resets in range(variants):
        b_pairs = b_of_pairs * products(sums_r, sums, resets)
        b_pairs = tl.where(r > s, b_pairs, 0.0)
        # [r, j]: what goes from before token j to token r
        b_through = tl.dot(b_pairs, tl.where(r < s, 1.0, 0.0), input_precision=PRECISION)
        b_through = tl.where((r > s) if BEFORE else (r >= s), b_through, 0.0)
        b_grad = tl.where(b_reset == resets, tl.sum(b_through, 0), b_grad)
    return b_grad


@triton.jit
def _of_states(
    b_of_leave, b_of_enter, b_of_last, of_whole, sums, sums_e, total, b_reset, variants,
    BEFORE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The same from the products between the chunk's tokens and its two ends."""
    r, s = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    b_grad = tl.zeros((C,), tl.float32)
    for resets in range(variants):
        b_leave = from_start(sums, resets) * b_of_leave
        b_enter = from_start(sums_e, resets) * b_of_enter
        b_last = to_end(sums, total, resets) * b_of_last
        if BEFORE:
            b_through = tl.where(r >= s, b_leave[:, None], b_last[:, None])
            b_through += tl.where(r > s, b_enter[:, None], 0.0)
        else:
            b_through = tl.where(r >= s, (b_leave + b_enter)[:, None], b_last[:, None])
        b_through = tl.sum(b_through, 0) + from_start(total, resets) * of_whole
        b_grad = tl.where(b_reset == resets, b_through, b_grad)
    return b_grad


CHUNKS = ["scale", "H", "L", "chunks", "n", "steps", "key_width", "value_width",
          "q_sb", "q_sh", "q_sl", "k_sb", "k_sh", "k_sl", "g_sb", "g_sh", "g_sl",
          "b_sb", "b_sh", "b_sl", "a_sb", "a_sh", "a_sl"]  # fmt: skip


@triton.jit
def _norms(
    p_q, p_k, row, valid, o_k, DK: tl.constexpr, q_sl, q_sd, k_sl, k_sd,
    NORMALIZE: tl.constexpr, NLMS: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """What a chunk's queries and keys are multiplied by, and what its steps are divided by."""
    one = tl.full((C,), 1.0, tl.float32)
    if NORMALIZE:
        b_q = load_rows(p_q, row, valid, o_k, DK, q_sl, q_sd, UNIT)
        b_k = load_rows(p_k, row, valid, o_k, DK, k_sl, k_sd, UNIT)
        return (
            tl.rsqrt(sum_of_squares(b_q) + NORM_EPS),
            tl.rsqrt(sum_of_squares(b_k) + NORM_EPS),
            one,
        )
    if NLMS:
        b_k = load_rows(p_k, row, valid, o_k, DK, k_sl, k_sd, UNIT)
        return one, one, 1.0 + sum_of_squares(b_k)
    return one, one, one


@triton.jit(do_not_specialize=CHUNKS)
def within_kernel(
    q, k, beta, alpha, g, errors, grad_v, cu_seqlens, grad_q, grad_k, grad_gates,
    scale, H, L, chunks, n, steps, key_width, value_width,
    q_sb, q_sh, q_sl, q_sd, k_sb, k_sh, k_sl, k_sd, g_sb, g_sh, g_sl, g_sd,
    b_sb, b_sh, b_sl, a_sb, a_sh, a_sl,
    DK: tl.constexpr, BK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr, LOG_DECAY: tl.constexpr, NORMALIZE: tl.constexpr, NLMS: tl.constexpr,
    PACKED: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, ROUGH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Write what the gradients get through A and T, for the effective queries and keys.

    The program has a chunk of a key head, and sums over the value heads that read it. H counts
    key heads. ``grad_gates (2, B, Hv, L)`` is for the effective beta and the decay's logarithm.
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
    DTYPE: tl.constexpr = errors.dtype.element_ty
    # Products of fewer than 16 rows a warp are spread well over the warps in a loop only.
    PIECE: tl.constexpr = min(BK, 64)
    r, s = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    p_q = q + (i_b * q_sb + i_h * q_sh) * UNIT
    p_k = k + (i_b * k_sb + i_h * k_sh) * UNIT
    b_norm_q, b_norm, b_divisor = _norms(
        p_q, p_k, row, valid, o_k, DK, q_sl, q_sd, k_sl, k_sd, NORMALIZE, NLMS, C, UNIT
    )
    b_scale = b_norm_q * scale
    rows = tl.num_programs(0).to(tl.int64) // chunks * GROUP * L

    b_of_a = tl.zeros((C, C), tl.float32)
    b_of_t = tl.zeros((C, C), tl.float32)
    for i_group in range(GROUP):
        i_value = i_row * GROUP + i_group
        i_hv = i_h * GROUP + i_group
        p_beta = beta + i_b * b_sb + i_hv * b_sh + row.to(tl.int64) * b_sl
        b_beta = tl.load(p_beta, mask=valid, other=0.0).to(tl.float32) / b_divisor
        p_alpha = alpha + i_b * a_sb + i_hv * a_sh
        _, b_reset, sums, sums_e, total = load_decays(p_alpha, row, valid, a_sl, LOG_DECAY, NLMS)
        variants = 1
        if not LOG_DECAY:
            variants = 1 + (total[2] > 0).to(tl.int32)
        p_g = g + (i_b * g_sb + i_hv * g_sh) * UNIT
        b_ge = tl.zeros((C, C), tl.float32)
        b_dve = tl.zeros((C, C), tl.float32)
        for first in tl.range(0, value_width, BV, num_stages=STAGES):
            o_v = first + tl.arange(0, BV)
            m_v = valid[:, None] & (o_v < DV)[None, :]
            o_value = (i_value * L + row)[:, None] * DV + o_v[None, :]
            b_g = load_rows(p_g, row, valid, o_v, DV, g_sl, g_sd, UNIT)
            b_e = tl.load(errors + o_value, mask=m_v, other=0.0)
            b_dv = tl.load(grad_v + o_value, mask=m_v, other=0.0)
            b_ge += dot(b_g, tl.trans(b_e), DTYPE, PRECISION)
            b_dve -= dot(b_dv, tl.trans(b_e), DTYPE, PRECISION)

        b_pairs = tl.zeros((C, C), tl.float32)
        for first in tl.range(0, key_width, PIECE):
            o_piece = first + tl.arange(0, PIECE)
            b_q = load_rows(p_q, row, valid, o_piece, DK, q_sl, q_sd, UNIT)
            b_k = load_rows(p_k, row, valid, o_piece, DK, k_sl, k_sd, UNIT)
            b_pairs += dot(b_q, tl.trans(b_k), DTYPE, PRECISION)
        b_pairs = b_pairs * b_ge * b_scale[:, None] * b_norm[None, :]
        b_d = tl.where(r >= s, products(sums, sums, 0), 0.0)
        b_grad_beta = tl.sum(b_pairs * b_d, 0)
        b_of_a += b_d * b_ge * b_beta[None, :]
        b_pairs *= b_beta[None, :]
        b_grad_alpha = _of_pairs(b_pairs, sums, sums, b_reset, variants, False, C, ROUGH)

        b_pairs = tl.zeros((C, C), tl.float32)
        for first in tl.range(0, key_width, PIECE):
            o_piece = first + tl.arange(0, PIECE)
            b_k = load_rows(p_k, row, valid, o_piece, DK, k_sl, k_sd, UNIT)
            b_pairs += dot(b_k, tl.trans(b_k), DTYPE, PRECISION)
        b_pairs = b_pairs * b_dve * b_norm[:, None] * b_norm[None, :]
        b_d = tl.where(r > s, products(sums_e, sums, 0), 0.0)
        b_grad_beta += tl.sum(b_pairs * b_d, 0)
        b_of_t += b_d * b_dve * b_beta[None, :]
        b_pairs *= b_beta[None, :]
        b_grad_alpha += _of_pairs(b_pairs, sums_e, sums, b_reset, variants, NLMS, C, ROUGH)
        o_row = i_value * L + row
        tl.store(grad_gates + o_row, b_grad_beta, mask=valid)
        tl.store(grad_gates + rows + o_row, b_grad_alpha, mask=valid)

    o_out = (i_row * L + row)[:, None] * DK + o_k[None, :]
    m_out = valid[:, None] & (o_k < DK)[None, :]
    b_k = load_rows(p_k, row, valid, o_k, DK, k_sl, k_sd, UNIT)
    b_dq = dot(b_of_a * b_norm[None, :], b_k, DTYPE, PRECISION)
    tl.store(grad_q + o_out, b_dq.to(grad_q.dtype.element_ty), mask=m_out)
    b_dk = dot((b_of_t + tl.trans(b_of_t)) * b_norm[None, :], b_k, DTYPE, PRECISION)
    b_q = load_rows(p_q, row, valid, o_k, DK, q_sl, q_sd, UNIT)
    b_dk += dot(tl.trans(b_of_a * b_scale[:, None]), b_q, DTYPE, PRECISION)
    tl.store(grad_k + o_out, b_dk.to(grad_k.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=CHUNKS)
def between_kernel(
    q, k, beta, alpha, g, errors, factors, grad_v, states, grad_states, cu_seqlens,
    grad_q, grad_k, grad_gates, grad_beta, grad_alpha,
    scale, H, L, chunks, n, steps, key_width, value_width,
    q_sb, q_sh, q_sl, q_sd, k_sb, k_sh, k_sl, k_sd, g_sb, g_sh, g_sl, g_sd,
    b_sb, b_sh, b_sl, a_sb, a_sh, a_sl,
    DK: tl.constexpr, BK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr, LOG_DECAY: tl.constexpr, NORMALIZE: tl.constexpr, NLMS: tl.constexpr,
    PACKED: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add what the gradients get through the states at the chunk's two ends, and finish them."""
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
    DTYPE: tl.constexpr = states.dtype.element_ty
    p_q = q + (i_b * q_sb + i_h * q_sh) * UNIT
    p_k = k + (i_b * k_sb + i_h * k_sh) * UNIT
    b_norm_q, b_norm, b_divisor = _norms(
        p_q, p_k, row, valid, o_k, DK, q_sl, q_sd, k_sl, k_sd, NORMALIZE, NLMS, C, UNIT
    )
    b_scale = b_norm_q * scale
    rows = tl.num_programs(0).to(tl.int64) // chunks * GROUP * L

    # The gradients of q and k, transposed: the more rows, the more warps share them.
    b_dq = tl.zeros((BK, C), tl.float32)
    b_dk = tl.zeros((BK, C), tl.float32)
    for i_group in range(GROUP):
        i_value = i_row * GROUP + i_group
        i_hv = i_h * GROUP + i_group
        p_g = g + (i_b * g_sb + i_hv * g_sh) * UNIT
        p_grad = grad_states + (i_value * chunks + place) * DK * DV
        p_state = states + (i_value * chunks + place) * DK * DV
        if not PACKED:
            p_state = states + (i_value * ((chunks + 1) // 2) + place // 2) * DK * DV
        b_gs = tl.zeros((BK, C), tl.float32)
        b_dvs = tl.zeros((BK, C), tl.float32)
        b_eds = tl.zeros((BK, C), tl.float32)
        b_of_whole = tl.zeros((BK,), tl.float32)
        for first in tl.range(0, value_width, BV, num_stages=STAGES):
            o_v = first + tl.arange(0, BV)
            m_v = valid[:, None] & (o_v < DV)[None, :]
            o_value = (i_value * L + row)[:, None] * DV + o_v[None, :]
            b_g = load_rows(p_g, row, valid, o_v, DV, g_sl, g_sd, UNIT)
            b_dv = tl.load(grad_v + o_value, mask=m_v, other=0.0)
            b_state = load_state(p_state, o_k, o_v, DK, DV)
            if not PACKED:  # noqa: SIM102 - a constant
                if place % 2 == 1:
                    # It is that of the chunk before: go through it.
                    before = i_value * L + row - C
                    b_last = tl.load(factors + LAST * rows + before)
                    whole = tl.load(factors + 3 * rows + i_value * chunks + place - 1)
                    o_before = before[:, None] * DV + o_v[None, :]
                    b_e = tl.load(errors + o_before, mask=(o_v < DV)[None, :], other=0.0)
                    b_k = load_rows(p_k, row - C, row >= C, o_k, DK, k_sl, k_sd, UNIT)
                    b_e = b_last[:, None] * b_e.to(tl.float32)
                    b_next = dot(tl.trans(b_k), b_e, DTYPE, PRECISION)
                    b_state = (b_state.to(tl.float32) * whole + b_next).to(DTYPE)
            b_e = tl.load(errors + o_value, mask=m_v, other=0.0)
            b_grad = load_state(p_grad, o_k, o_v, DK, DV)
            b_gs += dot(b_state, tl.trans(b_g), DTYPE, PRECISION)
            b_dvs += dot(b_state, tl.trans(b_dv), DTYPE, PRECISION)
            b_eds += dot(b_grad, tl.trans(b_e), DTYPE, PRECISION)
            b_of_whole += tl.sum(b_state.to(tl.float32) * b_grad.to(tl.float32), 1)

        p_beta = beta + i_b * b_sb + i_hv * b_sh + row.to(tl.int64) * b_sl
        b_beta = tl.load(p_beta, mask=valid, other=0.0).to(tl.float32) / b_divisor
        p_alpha = alpha + i_b * a_sb + i_hv * a_sh
        b_alpha, b_reset, sums, sums_e, total = load_decays(
            p_alpha, row, valid, a_sl, LOG_DECAY, NLMS
        )
        b_enter, b_leave = from_start(sums_e, 0), from_start(sums, 0)
        b_last = to_end(sums, total, 0)
        b_kt = tl.trans(load_rows(p_k, row, valid, o_k, DK, k_sl, k_sd, UNIT)).to(tl.float32)
        b_of_last = tl.sum(b_kt * b_eds, 0) * b_norm
        b_of_enter = -tl.sum(b_kt * b_dvs, 0) * b_norm
        b_qt = tl.trans(load_rows(p_q, row, valid, o_k, DK, q_sl, q_sd, UNIT)).to(tl.float32)
        b_of_leave = tl.sum(b_qt * b_gs, 0) * b_scale
        b_dq += b_gs * b_leave[None, :]
        b_dk += b_eds * (b_last * b_beta)[None, :] - b_dvs * b_enter[None, :]

        o_row = i_value * L + row
        of_whole = tl.sum(b_of_whole, 0)
        b_grad_beta = tl.load(grad_gates + o_row, mask=valid, other=0.0) + b_last * b_of_last
        variants = 1
        if not LOG_DECAY:
            variants = 1 + (total[2] > 0).to(tl.int32)
        b_grad_alpha = tl.load(grad_gates + rows + o_row, mask=valid, other=0.0)
        b_grad_alpha += _of_states(
            b_of_leave, b_of_enter, b_of_last * b_beta, of_whole, sums, sums_e, total,
            b_reset, variants, NLMS, C,
        )  # fmt: skip
        if not LOG_DECAY:
            b_grad_alpha = b_grad_alpha / tl.where(b_reset == 1, 1.0, b_alpha)
        if NLMS:
            b_dk += b_kt * (-2.0 * b_grad_beta * b_beta / b_divisor)[None, :]
        b_grad_beta = b_grad_beta / b_divisor
        tl.store(grad_beta + o_row, b_grad_beta.to(grad_beta.dtype.element_ty), mask=valid)
        tl.store(grad_alpha + o_row, b_grad_alpha.to(grad_alpha.dtype.element_ty), mask=valid)

    o_out = o_k[:, None] + (i_row * L + row)[None, :] * DK
    m_out = (o_k < DK)[:, None] & valid[None, :]
    b_dq += tl.load(grad_q + o_out, mask=m_out, other=0.0).to(tl.float32)
    b_dk += tl.load(grad_k + o_out, mask=m_out, other=0.0).to(tl.float32)
    if NORMALIZE:
        b_kt = tl.trans(load_rows(p_k, row, valid, o_k, DK, k_sl, k_sd, UNIT)).to(tl.float32)
        b_unit = b_kt * b_norm[None, :]
        b_dk = (b_dk - b_unit * tl.sum(b_unit * b_dk, 0)[None, :]) * b_norm[None, :]
        b_qt = tl.trans(load_rows(p_q, row, valid, o_k, DK, q_sl, q_sd, UNIT)).to(tl.float32)
        b_unit = b_qt * b_norm_q[None, :]
        b_dq = b_dq - b_unit * tl.sum(b_unit * b_dq, 0)[None, :]
    b_dq *= b_scale[None, :]
    tl.store(grad_q + o_out, b_dq.to(grad_q.dtype.element_ty), mask=m_out)
    tl.store(grad_k + o_out, b_dk.to(grad_k.dtype.element_ty), mask=m_out)
