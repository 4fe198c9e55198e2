"""The gradients; `kernels` tells how a chunk is computed."""

import triton
import triton.language as tl

from neuralops.ssm.gla.forward_kernels import add_weights
from neuralops.ssm.gla.kernels import (
    AFTER,
    IN_PART,
    IN_WHOLE,
    LEVEL,
    LEVELS,
    PART,
    SCALARS,
    UNTIL,
    WHOLE,
    choose_base,
    chunk,
    gate_sums,
    head,
    load_gates,
    load_ones,
    load_rows,
    ones_product,
    operand,
    power,
    rows,
    store_rows,
)

RESTART = tl.constexpr(-64.0)
"""A plain gate whose base 2 logarithm is below it: its gradient is not divided by it."""


@triton.jit(do_not_specialize=SCALARS)
def denominators_kernel(
    grad, out, denominator, along, eps, H, L, x_sb, x_sh, x_sl, x_sd,
    DV: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the denominators, ``along (B, H, L)``: 0 where they are clamped."""
    blocks = tl.cdiv(L, ROWS)
    pid = tl.program_id(0)
    i_bh = (pid // blocks).to(tl.int64)
    start = pid % blocks * ROWS
    o_row = tl.arange(0, ROWS)
    m_row = start + o_row < L
    p_grad = head(grad, i_bh // H, i_bh % H, x_sb, x_sh, UNIT)
    p_out = out + (i_bh * L + start) * DV
    b_along = tl.zeros((ROWS,), tl.float32)
    for i_v in tl.range(0, DV, BLOCK_V):
        o_v = i_v + tl.arange(0, BLOCK_V)
        b_grad = load_rows(p_grad, start, o_row, m_row, o_v, x_sl, x_sd, DV, UNIT)
        m_out = m_row[:, None] & (o_v < DV)[None, :]
        b_out = tl.load(p_out + o_row[:, None] * DV + o_v[None, :], mask=m_out, other=0.0)
        b_along += tl.sum(b_grad.to(tl.float32) * b_out.to(tl.float32), 1)
    o_den = i_bh * L + start + o_row
    b_den = tl.load(denominator + o_den, mask=m_row, other=1.0)
    b_along = tl.where(b_den >= eps, -b_along / tl.maximum(b_den, eps), 0.0)
    tl.store(along + o_den, b_along, mask=m_row)


@triton.jit
def _load_grad(
    p_grad, b_den, start, o_row, m_row, o_v, stride, stride_d,
    DV: tl.constexpr, UNIT: tl.constexpr, NORMALIZE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the numerators, ``(CHUNK, BLOCK_V)``."""
    b_grad = load_rows(p_grad, start, o_row, m_row, o_v, stride, stride_d, DV, UNIT)
    if NORMALIZE:
        b_grad = operand(b_grad.to(tl.float32) / b_den[:, None], OPERAND, PRECISION)
    return b_grad.to(OPERAND)


@triton.jit
def _through(
    p_rows, b_den, b_factor, start, o_row, m_row, p_state, o_k, stride, stride_d,
    DK: tl.constexpr, DV: tl.constexpr, UNIT: tl.constexpr, NORMALIZE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """What the rows take from the transposed state times a factor, ``(CHUNK, BLOCK_K)``."""
    b_into = tl.zeros((CHUNK, o_k.shape[0]), tl.float32)
    for i_v in tl.range(0, DV, BLOCK_V, num_stages=1):
        o_v = i_v + tl.arange(0, BLOCK_V)
        b_rows = _load_grad(
            p_rows, b_den, start, o_row, m_row, o_v, stride, stride_d,
            DV, UNIT, NORMALIZE, OPERAND, PRECISION,
        )  # fmt: skip
        m_state = (o_k < DK)[None, :] & (o_v < DV)[:, None]
        b_state = tl.load(p_state + o_k[None, :] * DV + o_v[:, None], mask=m_state, other=0.0)
        b_state = operand(b_state.to(tl.float32) * b_factor[None, :], OPERAND, PRECISION)
        b_into = tl.dot(b_rows, b_state, b_into, input_precision=PRECISION)
    return b_into


@triton.jit
def _crossing(
    p_state, p_grad_state, o_k,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The entering state times the leaving state's gradient, summed over Dv, ``(BLOCK_K,)``."""
    b_sum = tl.zeros((BLOCK_K,), tl.float32)
    for i_v in tl.range(0, DV, BLOCK_V, num_stages=1):
        o_v = i_v + tl.arange(0, BLOCK_V)
        mask = (o_k < DK)[:, None] & (o_v < DV)[None, :]
        o_tile = o_k[:, None] * DV + o_v[None, :]
        b_state = tl.load(p_state + o_tile, mask=mask, other=0.0).to(tl.float32)
        b_grad_state = tl.load(p_grad_state + o_tile, mask=mask, other=0.0).to(tl.float32)
        b_sum += tl.sum(b_state * b_grad_state, 1)
    return b_sum


@triton.jit
def _pairs(
    grad, v, b_den, b_along, start, o_row, m_row, x_sl, x_sd, v_sl, v_sd,
    DV: tl.constexpr, UNIT: tl.constexpr, NORMALIZE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradients of the weights of all pairs of tokens, a lower triangle ``(CHUNK, CHUNK)``."""
    r, t = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    b_pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
    for i_v in tl.range(0, DV, BLOCK_V, num_stages=1):
        o_v = i_v + tl.arange(0, BLOCK_V)
        b_x = _load_grad(
            grad, b_den, start, o_row, m_row, o_v, x_sl, x_sd,
            DV, UNIT, NORMALIZE, OPERAND, PRECISION,
        )  # fmt: skip
        b_v = load_rows(v, start, o_row, m_row, o_v, v_sl, v_sd, DV, UNIT).to(OPERAND)
        b_pairs = tl.dot(b_x, tl.trans(b_v), b_pairs, input_precision=PRECISION)
    if NORMALIZE:
        b_pairs += b_along[:, None]
    return operand(tl.where(t <= r, b_pairs, 0.0), OPERAND, PRECISION)


@triton.jit
def _whole(
    b_grad_g, b_g, b_total, b_middle, q, k, grad, v, state, grad_state, key_sum, grad_sum,
    b_den, b_along, scale, ones, start, o_row, m_row, o_k, grad_q, grad_k,
    q_sl, q_sd, k_sl, k_sd, x_sl, x_sd, v_sl, v_sd,
    DK: tl.constexpr, DV: tl.constexpr, LOG: tl.constexpr, NORMALIZE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
    SUM_PARTS: tl.constexpr, UNIT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store the gradients of q and k where one product takes the chunk; add to that of the gates.

    Queries, keys and states all are relative to the middle token.
    """
    b_sums = ones_product(load_ones(ones, IN_WHOLE, CHUNK), b_g, PARTS)
    b_up, b_down = power(b_sums, LOG), power(-b_sums, LOG)
    b_q = load_rows(q, start, o_row, m_row, o_k, q_sl, q_sd, DK, UNIT).to(tl.float32) * scale
    b_k = load_rows(k, start, o_row, m_row, o_k, k_sl, k_sd, DK, UNIT).to(tl.float32)
    b_queries = operand(b_q * b_up, OPERAND, PRECISION)
    b_keys = operand(b_k * b_down, OPERAND, PRECISION)
    b_pairs = _pairs(
        grad, v, b_den, b_along, start, o_row, m_row, x_sl, x_sd, v_sl, v_sd,
        DV, UNIT, NORMALIZE, OPERAND, PRECISION, CHUNK, BLOCK_V,
    )  # fmt: skip

    b_before, b_after = power(b_middle, LOG), power(b_total - b_middle, LOG)
    b_into = _through(
        grad, b_den, b_before, start, o_row, m_row, state, o_k, x_sl, x_sd,
        DK, DV, UNIT, NORMALIZE, OPERAND, PRECISION, CHUNK, BLOCK_V,
    )  # fmt: skip
    if NORMALIZE:
        b_sum = tl.load(key_sum + o_k, mask=o_k < DK, other=0.0)
        b_into += b_along[:, None] * (b_sum * b_before)[None, :]
    b_into = tl.dot(b_pairs, b_keys, b_into, input_precision=PRECISION)
    store_rows(grad_q, b_into * b_up * scale, o_row, m_row, o_k, DK)
    b_ended = b_queries.to(tl.float32) * b_into

    b_into = _through(
        v, b_den, b_after, start, o_row, m_row, grad_state, o_k, v_sl, v_sd,
        DK, DV, UNIT, False, OPERAND, PRECISION, CHUNK, BLOCK_V,
    )  # fmt: skip
    if NORMALIZE:
        b_sum = tl.load(grad_sum + o_k, mask=o_k < DK, other=0.0)
        b_into += (b_sum * b_after)[None, :]
    # What leaves the chunk passes the gates after it; below all keys are taken from t on.
    b_grad_g += tl.sum(b_keys.to(tl.float32) * b_into, 0)[None, :]
    b_into = tl.dot(tl.trans(b_pairs), b_queries, b_into, input_precision=PRECISION)
    store_rows(grad_k, b_into * b_down, o_row, m_row, o_k, DK)
    b_ended -= b_keys.to(tl.float32) * b_into
    b_ones = tl.trans(load_ones(ones, UNTIL, CHUNK))
    return b_grad_g + ones_product(b_ones, b_ended, SUM_PARTS)


@triton.jit
def _side(
    b_grad_g, own, other, gates, row_values, column_values, state, own_sum, row_along,
    column_along, row_den, column_den, factor, other_factor, base, ones, start, o_row, m_row, o_k,
    own_sl, own_sd, other_sl, other_sd, g_sl, g_sd, row_sl, row_sd, column_sl, column_sd,
    DK: tl.constexpr, DV: tl.constexpr, LOG: tl.constexpr, NORMALIZE: tl.constexpr,
    LATER: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
    SUM_PARTS: tl.constexpr, UNIT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradient of the later tokens' own q, or of the earlier ones' k, ``(CHUNK, BLOCK_K)``.

    Rows are the tokens whose gradient it is, columns the others. It adds the part of the gates'
    gradients that goes through it, in logarithms.
    """
    r, t = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    b_g = load_gates(gates, start, o_row, m_row, o_k, g_sl, g_sd, DK, UNIT, LOG)
    b_own = load_rows(own, start, o_row, m_row, o_k, own_sl, own_sd, DK, UNIT)
    b_own = b_own.to(tl.float32) * factor
    b_other = load_rows(other, start, o_row, m_row, o_k, other_sl, other_sd, DK, UNIT)
    b_other = b_other.to(tl.float32) * other_factor

    # Across the chunk's border.
    b_one = tl.full((BLOCK_K,), 1.0, tl.float32)
    b_grad = _through(
        row_values, row_den, b_one, start, o_row, m_row, state, o_k, row_sl, row_sd,
        DK, DV, UNIT, NORMALIZE and LATER, OPERAND, PRECISION, CHUNK, BLOCK_V,
    )  # fmt: skip
    if NORMALIZE:
        b_sum = tl.load(own_sum + o_k, mask=o_k < DK, other=0.0)
        b_grad += row_along[:, None] * b_sum[None, :]
    b_ones = load_ones(ones, UNTIL if LATER else AFTER, CHUNK)
    b_grad *= power(ones_product(b_ones, b_g, PARTS), LOG)
    b_grad_g += ones_product(tl.trans(b_ones), b_own * b_grad, SUM_PARTS)

    # The gradients of the weights of all pairs of tokens.
    b_pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
    for i_v in tl.range(0, DV, BLOCK_V, num_stages=1):
        o_v = i_v + tl.arange(0, BLOCK_V)
        b_rows = _load_grad(
            row_values, row_den, start, o_row, m_row, o_v, row_sl, row_sd,
            DV, UNIT, NORMALIZE and LATER, OPERAND, PRECISION,
        )  # fmt: skip
        b_columns = _load_grad(
            column_values, column_den, start, o_row, m_row, o_v, column_sl, column_sd,
            DV, UNIT, NORMALIZE and not LATER, OPERAND, PRECISION,
        )  # fmt: skip
        b_pairs = tl.dot(b_rows, tl.trans(b_columns), b_pairs, input_precision=PRECISION)
    if NORMALIZE:
        b_pairs += row_along[:, None] if LATER else column_along[None, :]
    m_pairs = t <= r if LATER else t >= r
    b_pairs = operand(tl.where(m_pairs, b_pairs, 0.0), OPERAND, PRECISION)

    # Within blocks that are taken in one product.
    if base == 0:
        b_same = tl.sum(tl.where(r == t, b_pairs.to(tl.float32), 0.0), 1)
        b_grad += b_same[:, None] * b_other
    else:
        b_ones = load_ones(ones, IN_PART, CHUNK)
        b_sums = ones_product(b_ones, b_g, PARTS)
        b_sums = b_sums if LATER else -b_sums
        b_others = operand(b_other * power(-b_sums, LOG), OPERAND, PRECISION)
        b_block = tl.where(r >> PART == t >> PART, b_pairs, 0.0).to(OPERAND)
        b_into = tl.dot(b_block, b_others, input_precision=PRECISION)
        b_up = power(b_sums, LOG)
        b_grad += b_into * b_up
        # Rounded as the other side rounds it, so that what cancels does so exactly.
        b_into *= operand(b_own * b_up, OPERAND, PRECISION).to(tl.float32)
        b_into = ones_product(tl.trans(b_ones), b_into, SUM_PARTS)
        b_grad_g += b_into if LATER else -b_into

    # Between the halves of larger blocks.
    for i in tl.range(base, LEVELS, num_stages=1):
        b_ones = load_ones(ones, LEVEL + i, CHUNK)
        b_decays = power(ones_product(b_ones, b_g, PARTS), LOG)
        here = ((r >> i) % 2 == 1) == LATER
        b_others = operand(tl.where(here, 0.0, b_other * b_decays), OPERAND, PRECISION)
        b_block = tl.where(r >> (i + 1) == t >> (i + 1), b_pairs, 0.0).to(OPERAND)
        b_into = tl.dot(b_block, b_others, input_precision=PRECISION)
        b_into = tl.where(here, b_into * b_decays, 0.0)
        b_grad += b_into
        b_grad_g += ones_product(tl.trans(b_ones), b_into * b_own, SUM_PARTS)
    return b_grad, b_grad_g


@triton.jit(do_not_specialize=SCALARS)
def gradients_kernel(
    q, k, v, gates, grad, denominator, along, states, sums, grad_states, grad_sums, table, ones,
    grad_q, grad_k, grad_gates,
    scale, eps, H, L, slots,
    q_sb, q_sh, q_sl, q_sd, k_sb, k_sh, k_sl, k_sd, v_sb, v_sh, v_sl, v_sd,
    g_sb, g_sh, g_sl, g_sd, x_sb, x_sh, x_sl, x_sd,
    DK: tl.constexpr, DV: tl.constexpr, LOG: tl.constexpr, REVERSE: tl.constexpr,
    NORMALIZE: tl.constexpr, PACKED: tl.constexpr, LIMIT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
    SUM_PARTS: tl.constexpr, UNIT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write the gradients of one chunk's q, k and gates in BLOCK_K channels."""
    blocks_k: tl.constexpr = (DK + BLOCK_K - 1) // BLOCK_K
    pid = tl.program_id(0)
    o_k = pid % blocks_k * BLOCK_K + tl.arange(0, BLOCK_K)
    slot = pid // blocks_k % slots
    i_bh = (pid // blocks_k // slots).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    start, end, _, _, _ = chunk(table, i_b, slot, slots, L, CHUNK, PACKED)
    if start >= end:
        return
    o_row = rows(CHUNK, REVERSE)
    m_row = start + o_row < end
    p_q = head(q, i_b, i_h, q_sb, q_sh, UNIT)
    p_k = head(k, i_b, i_h, k_sb, k_sh, UNIT)
    p_v = head(v, i_b, i_h, v_sb, v_sh, UNIT)
    p_g = head(gates, i_b, i_h, g_sb, g_sh, UNIT)
    p_x = head(grad, i_b, i_h, x_sb, x_sh, UNIT)
    p_state = states + (i_bh * slots + slot) * DK * DV
    p_grad_state = grad_states + (i_bh * slots + slot) * DK * DV
    p_sum = sums + (i_bh * slots + slot) * DK if NORMALIZE else sums
    p_grad_sum = grad_sums + (i_bh * slots + slot) * DK if NORMALIZE else grad_sums
    o_first = i_bh * L + start
    b_one = tl.full((CHUNK,), 1.0, tl.float32)
    b_den, b_along = b_one, b_one
    if NORMALIZE:
        b_den = tl.load(denominator + o_first + o_row, mask=m_row, other=1.0)
        b_den = tl.maximum(b_den, eps)
        b_along = tl.load(along + o_first + o_row, mask=m_row, other=0.0)

    b_through = _crossing(p_state, p_grad_state, o_k, DK, DV, BLOCK_K, BLOCK_V)
    if NORMALIZE:
        b_sum = tl.load(p_sum + o_k, mask=o_k < DK, other=0.0)
        b_grad_sum = tl.load(p_grad_sum + o_k, mask=o_k < DK, other=0.0)
        b_through += b_sum * b_grad_sum
    b_g = load_gates(p_g, start, o_row, m_row, o_k, g_sl, g_sd, DK, UNIT, LOG)
    b_total, b_middle = gate_sums(b_g, CHUNK)
    b_grad_g = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    b_grad_g += (power(b_total, LOG) * b_through)[None, :]
    base = choose_base(b_g, b_total, ones, LOG, PARTS, LIMIT, CHUNK)
    if base == WHOLE:
        b_grad_g = _whole(
            b_grad_g, b_g, b_total, b_middle, p_q, p_k, p_x, p_v, p_state, p_grad_state,
            p_sum, p_grad_sum, b_den, b_along, scale, ones, start, o_row, m_row, o_k,
            grad_q + o_first * DK, grad_k + o_first * DK,
            q_sl, q_sd, k_sl, k_sd, x_sl, x_sd, v_sl, v_sd,
            DK, DV, LOG, NORMALIZE, OPERAND, PRECISION, PARTS, SUM_PARTS, UNIT,
            CHUNK, BLOCK_K, BLOCK_V,
        )  # fmt: skip
    else:
        b_grad, b_grad_g = _side(
            b_grad_g, p_q, p_k, p_g, p_x, p_v, p_state, p_sum, b_along, b_one, b_den, b_one,
            scale, 1.0, base, ones, start, o_row, m_row, o_k,
            q_sl, q_sd, k_sl, k_sd, g_sl, g_sd, x_sl, x_sd, v_sl, v_sd,
            DK, DV, LOG, NORMALIZE, True,
            OPERAND, PRECISION, PARTS, SUM_PARTS, UNIT, CHUNK, BLOCK_K, BLOCK_V,
        )  # fmt: skip
        store_rows(grad_q + o_first * DK, b_grad * scale, o_row, m_row, o_k, DK)
        b_grad, b_grad_g = _side(
            b_grad_g, p_k, p_q, p_g, p_v, p_x, p_grad_state, p_grad_sum, b_one, b_along, b_one,
            b_den, 1.0, scale, base, ones, start, o_row, m_row, o_k,
            k_sl, k_sd, q_sl, q_sd, g_sl, g_sd, v_sl, v_sd, x_sl, x_sd,
            DK, DV, LOG, NORMALIZE, False,
            OPERAND, PRECISION, PARTS, SUM_PARTS, UNIT, CHUNK, BLOCK_K, BLOCK_V,
        )  # fmt: skip
        store_rows(grad_k + o_first * DK, b_grad, o_row, m_row, o_k, DK)
    if not LOG:
        b_g = load_gates(p_g, start, o_row, m_row, o_k, g_sl, g_sd, DK, UNIT, LOG)
        b_grad_g = tl.where(b_g < RESTART, 0.0, b_grad_g * tl.exp2(-b_g))
    store_rows(grad_gates + o_first * DK, b_grad_g, o_row, m_row, o_k, DK)


@triton.jit(do_not_specialize=SCALARS)
def values_kernel(
    q, k, gates, grad, denominator, grad_states, table, ones, grad_v,
    scale, eps, H, L, slots,
    q_sb, q_sh, q_sl, q_sd, k_sb, k_sh, k_sl, k_sd, g_sb, g_sh, g_sl, g_sd, x_sb, x_sh, x_sl, x_sd,
    DK: tl.constexpr, DV: tl.constexpr, LOG: tl.constexpr, REVERSE: tl.constexpr,
    NORMALIZE: tl.constexpr, PACKED: tl.constexpr, LIMIT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write the gradients of one chunk's v in BLOCK_V columns."""
    blocks_v: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    o_v = pid % blocks_v * BLOCK_V + tl.arange(0, BLOCK_V)
    slot = pid // blocks_v % slots
    i_bh = (pid // blocks_v // slots).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    start, end, _, _, _ = chunk(table, i_b, slot, slots, L, CHUNK, PACKED)
    if start >= end:
        return
    o_row = rows(CHUNK, REVERSE)
    m_row = start + o_row < end
    p_q = head(q, i_b, i_h, q_sb, q_sh, UNIT)
    p_k = head(k, i_b, i_h, k_sb, k_sh, UNIT)
    p_g = head(gates, i_b, i_h, g_sb, g_sh, UNIT)
    p_x = head(grad, i_b, i_h, x_sb, x_sh, UNIT)
    p_grad_state = grad_states + (i_bh * slots + slot) * DK * DV
    o_first = i_bh * L + start
    b_den = tl.full((CHUNK,), 1.0, tl.float32)
    if NORMALIZE:
        b_den = tl.load(denominator + o_first + o_row, mask=m_row, other=1.0)
        b_den = tl.maximum(b_den, eps)
    r, t = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    b_grad = tl.zeros((CHUNK, BLOCK_V), tl.float32)
    b_weights = tl.zeros((CHUNK, CHUNK), tl.float32)
    for i_k in tl.range(0, DK, BLOCK_K, num_stages=1):
        o_k = i_k + tl.arange(0, BLOCK_K)
        b_g = load_gates(p_g, start, o_row, m_row, o_k, g_sl, g_sd, DK, UNIT, LOG)
        b_q = load_rows(p_q, start, o_row, m_row, o_k, q_sl, q_sd, DK, UNIT)
        b_q = b_q.to(tl.float32) * scale
        b_k = load_rows(p_k, start, o_row, m_row, o_k, k_sl, k_sd, DK, UNIT).to(tl.float32)
        m_state = (o_k < DK)[:, None] & (o_v < DV)[None, :]
        o_tile = o_k[:, None] * DV + o_v[None, :]
        b_grad_state = tl.load(p_grad_state + o_tile, mask=m_state, other=0.0)
        b_total, b_middle = gate_sums(b_g, CHUNK)
        base = choose_base(b_g, b_total, ones, LOG, PARTS, LIMIT, CHUNK)
        b_grad_state = b_grad_state.to(tl.float32)
        if base == WHOLE:
            b_sums = ones_product(load_ones(ones, IN_WHOLE, CHUNK), b_g, PARTS)
            b_queries = operand(b_q * power(b_sums, LOG), OPERAND, PRECISION)
            b_keys = operand(b_k * power(-b_sums, LOG), OPERAND, PRECISION)
            b_weights = tl.dot(b_queries, tl.trans(b_keys), b_weights, input_precision=PRECISION)
            b_grad_state *= power(b_total - b_middle, LOG)[:, None]
        else:
            b_after = power(ones_product(load_ones(ones, AFTER, CHUNK), b_g, PARTS), LOG)
            b_keys = operand(b_k * b_after, OPERAND, PRECISION)
            b_weights = add_weights(
                b_weights, b_q, b_k, b_g, base, ones, LOG, OPERAND, PRECISION, PARTS, CHUNK
            )
        b_grad_state = operand(b_grad_state, OPERAND, PRECISION)
        b_grad = tl.dot(b_keys, b_grad_state, b_grad, input_precision=PRECISION)
    b_weights = tl.where(t <= r, b_weights, 0.0)
    b_x = _load_grad(
        p_x, b_den, start, o_row, m_row, o_v, x_sl, x_sd,
        DV, UNIT, NORMALIZE, OPERAND, PRECISION,
    )  # fmt: skip
    b_weights = tl.trans(operand(b_weights, OPERAND, PRECISION))
    b_grad = tl.dot(b_weights, b_x, b_grad, input_precision=PRECISION)
    store_rows(grad_v + o_first * DV, b_grad, o_row, m_row, o_v, DV)


@triton.jit(do_not_specialize=SCALARS)
def restarts_kernel(
    q, k, v, gates, grad, denominator, along, states, sums, grad_states, grad_sums, table,
    grad_gates,
    scale, eps, H, L, slots,
    q_sb, q_sh, q_sl, q_sd, k_sb, k_sh, k_sl, k_sd, v_sb, v_sh, v_sl, v_sd,
    g_sb, g_sh, g_sl, g_sd, x_sb, x_sh, x_sl, x_sd,
    DK: tl.constexpr, DV: tl.constexpr, LOG: tl.constexpr, REVERSE: tl.constexpr,
    NORMALIZE: tl.constexpr, PACKED: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write the gradients of plain gates that are 0 or nearly so, token by token.

    Token i splits the chunk: what the tokens from i on take from those before it, without gate i.
    """
    blocks_k: tl.constexpr = (DK + BLOCK_K - 1) // BLOCK_K
    pid = tl.program_id(0)
    o_k = pid % blocks_k * BLOCK_K + tl.arange(0, BLOCK_K)
    slot = pid // blocks_k % slots
    i_bh = (pid // blocks_k // slots).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    start, end, _, _, _ = chunk(table, i_b, slot, slots, L, CHUNK, PACKED)
    if start >= end:
        return
    o_row = rows(CHUNK, REVERSE)
    m_row = start + o_row < end
    p_g = head(gates, i_b, i_h, g_sb, g_sh, UNIT)
    b_g = load_gates(p_g, start, o_row, m_row, o_k, g_sl, g_sd, DK, UNIT, LOG)
    if tl.min(b_g) >= RESTART:
        return
    p_q = head(q, i_b, i_h, q_sb, q_sh, UNIT)
    p_k = head(k, i_b, i_h, k_sb, k_sh, UNIT)
    p_v = head(v, i_b, i_h, v_sb, v_sh, UNIT)
    p_x = head(grad, i_b, i_h, x_sb, x_sh, UNIT)
    p_state = states + (i_bh * slots + slot) * DK * DV
    p_grad_state = grad_states + (i_bh * slots + slot) * DK * DV
    o_first = i_bh * L + start
    b_one = tl.full((CHUNK,), 1.0, tl.float32)
    b_den, b_along = b_one, b_one
    if NORMALIZE:
        b_den = tl.load(denominator + o_first + o_row, mask=m_row, other=1.0)
        b_den = tl.maximum(b_den, eps)
        b_along = tl.load(along + o_first + o_row, mask=m_row, other=0.0)
    b_pairs = _pairs(
        p_x, p_v, b_den, b_along, start, o_row, m_row, x_sl, x_sd, v_sl, v_sd,
        DV, UNIT, NORMALIZE, OPERAND, PRECISION, CHUNK, BLOCK_V,
    )  # fmt: skip
    b_factor = tl.full((BLOCK_K,), 1.0, tl.float32)
    b_into_q = _through(
        p_x, b_den, b_factor, start, o_row, m_row, p_state, o_k, x_sl, x_sd,
        DK, DV, UNIT, NORMALIZE, OPERAND, PRECISION, CHUNK, BLOCK_V,
    )  # fmt: skip
    b_into_k = _through(
        p_v, b_den, b_factor, start, o_row, m_row, p_grad_state, o_k, v_sl, v_sd,
        DK, DV, UNIT, False, OPERAND, PRECISION, CHUNK, BLOCK_V,
    )  # fmt: skip
    b_through = _crossing(p_state, p_grad_state, o_k, DK, DV, BLOCK_K, BLOCK_V)
    if NORMALIZE:
        o_sum = (i_bh * slots + slot) * DK + o_k
        b_sum = tl.load(sums + o_sum, mask=o_k < DK, other=0.0)
        b_grad_sum = tl.load(grad_sums + o_sum, mask=o_k < DK, other=0.0)
        b_into_q += b_along[:, None] * b_sum[None, :]
        b_into_k += b_grad_sum[None, :]
        b_through += b_sum * b_grad_sum

    r, t = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    o_c = tl.arange(0, CHUNK)
    b_any = tl.max((b_g < RESTART).to(tl.int32), 1)
    for i in tl.range(0, CHUNK, num_stages=1):
        if tl.max(tl.where(o_c == i, b_any, 0)) > 0:
            b_ones = ((t > i) & (t <= r)) | ((r < i) & (t > r) & (t < i))
            b_ones = b_ones.to(tl.float32 if PARTS == 0 else tl.bfloat16)
            b_decays = tl.exp2(ones_product(b_ones, b_g, PARTS))
            later = (o_c >= i)[:, None]
            b_before = tl.exp2(tl.sum(tl.where((o_c < i)[:, None], b_g, 0.0), 0))
            b_after = tl.exp2(tl.sum(tl.where((o_c > i)[:, None], b_g, 0.0), 0))
            b_k = load_rows(p_k, start, o_row, m_row, o_k, k_sl, k_sd, DK, UNIT).to(tl.float32)
            b_earlier = tl.where(later, 0.0, b_k * b_decays)
            b_grad = tl.sum(b_earlier * b_into_k, 0) * b_after
            b_grad += b_before * b_after * b_through
            b_into = tl.dot(
                b_pairs, operand(b_earlier, OPERAND, PRECISION), input_precision=PRECISION
            )
            b_into += b_into_q * b_before[None, :]
            b_q = load_rows(p_q, start, o_row, m_row, o_k, q_sl, q_sd, DK, UNIT).to(tl.float32)
            b_grad += tl.sum(tl.where(later, b_q * scale * b_decays, 0.0) * b_into, 0)
            m_here = (o_c == i)[:, None] & (b_g < RESTART) & m_row[:, None] & (o_k < DK)[None, :]
            p_out = grad_gates + o_first * DK + o_row[:, None] * DK + o_k[None, :]
            b_here = tl.broadcast_to(b_grad[None, :], (CHUNK, BLOCK_K))
            tl.store(p_out, b_here.to(grad_gates.dtype.element_ty), mask=m_here)
