"""The forward's outputs; `kernels` tells how a chunk is computed."""

import triton
import triton.language as tl

from neuralops.ssm.gla.kernels import (
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


@triton.jit
def add_weights(
    b_weights, b_q, b_k, b_g, base, ones,
    LOG: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Add what these channels give the weights ``(CHUNK, CHUNK)`` of all pairs of tokens."""
    r, t = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    if base == 0:
        b_weights += tl.where(r == t, tl.sum(b_q * b_k, 1)[:, None], 0.0)
    else:
        b_sums = ones_product(load_ones(ones, IN_PART, CHUNK), b_g, PARTS)
        b_queries = operand(b_q * power(b_sums, LOG), OPERAND, PRECISION)
        b_keys = operand(b_k * power(-b_sums, LOG), OPERAND, PRECISION)
        b_pairs = tl.dot(b_queries, tl.trans(b_keys), input_precision=PRECISION)
        b_weights += tl.where((r >> PART == t >> PART) & (t <= r), b_pairs, 0.0)
    for i in tl.range(base, LEVELS, num_stages=1):
        b_decays = power(ones_product(load_ones(ones, LEVEL + i, CHUNK), b_g, PARTS), LOG)
        second = (r >> i) % 2 == 1
        b_queries = operand(tl.where(second, b_q * b_decays, 0.0), OPERAND, PRECISION)
        b_keys = operand(tl.where(second, 0.0, b_k * b_decays), OPERAND, PRECISION)
        b_pairs = tl.dot(b_queries, tl.trans(b_keys), input_precision=PRECISION)
        b_weights += tl.where(r >> (i + 1) == t >> (i + 1), b_pairs, 0.0)
    return b_weights


@triton.jit(do_not_specialize=SCALARS)
def outputs_kernel(
    q, k, v, gates, states, sums, table, ones, out, denominator,
    scale, eps, H, L, slots,
    q_sb, q_sh, q_sl, q_sd, k_sb, k_sh, k_sl, k_sd, v_sb, v_sh, v_sl, v_sd,
    g_sb, g_sh, g_sl, g_sd,
    DK: tl.constexpr, DV: tl.constexpr, LOG: tl.constexpr, REVERSE: tl.constexpr,
    NORMALIZE: tl.constexpr, PACKED: tl.constexpr, LIMIT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write the outputs of one chunk in BLOCK_V columns, and the denominators ``(B, H, L)``."""
    blocks_v: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    i_v = pid % blocks_v
    slot = pid // blocks_v % slots
    i_bh = (pid // blocks_v // slots).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    start, end, _, _, _ = chunk(table, i_b, slot, slots, L, CHUNK, PACKED)
    if start >= end:
        return
    o_row = rows(CHUNK, REVERSE)
    m_row = start + o_row < end
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    p_q = head(q, i_b, i_h, q_sb, q_sh, UNIT)
    p_k = head(k, i_b, i_h, k_sb, k_sh, UNIT)
    p_v = head(v, i_b, i_h, v_sb, v_sh, UNIT)
    p_g = head(gates, i_b, i_h, g_sb, g_sh, UNIT)
    p_state = states + (i_bh * slots + slot) * DK * DV

    r, t = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    b_out = tl.zeros((CHUNK, BLOCK_V), tl.float32)
    b_weights = tl.zeros((CHUNK, CHUNK), tl.float32)
    b_den = tl.zeros((CHUNK,), tl.float32)
    for i_k in tl.range(0, DK, BLOCK_K, num_stages=1):
        o_k = i_k + tl.arange(0, BLOCK_K)
        b_g = load_gates(p_g, start, o_row, m_row, o_k, g_sl, g_sd, DK, UNIT, LOG)
        b_q = load_rows(p_q, start, o_row, m_row, o_k, q_sl, q_sd, DK, UNIT)
        b_q = b_q.to(tl.float32) * scale
        b_k = load_rows(p_k, start, o_row, m_row, o_k, k_sl, k_sd, DK, UNIT).to(tl.float32)
        m_state = (o_k < DK)[:, None] & (o_v < DV)[None, :]
        b_state = tl.load(p_state + o_k[:, None] * DV + o_v[None, :], mask=m_state, other=0.0)
        b_state = b_state.to(tl.float32)
        if NORMALIZE:
            p_sum = sums + (i_bh * slots + slot) * DK + o_k
            b_sum = tl.load(p_sum, mask=o_k < DK, other=0.0)
        b_total, b_middle = gate_sums(b_g, CHUNK)
        base = choose_base(b_g, b_total, ones, LOG, PARTS, LIMIT, CHUNK)
        if base == WHOLE:
            # Both the state and the keys meet queries relative to the middle token.
            b_sums = ones_product(load_ones(ones, IN_WHOLE, CHUNK), b_g, PARTS)
            b_decayed = b_q * power(b_sums, LOG)
            b_keys = operand(b_k * power(-b_sums, LOG), OPERAND, PRECISION)
            b_queries = operand(b_decayed, OPERAND, PRECISION)
            b_state *= power(b_middle, LOG)[:, None]
            b_weights = tl.dot(b_queries, tl.trans(b_keys), b_weights, input_precision=PRECISION)
            if NORMALIZE:
                b_sum = b_sum * power(b_middle, LOG)
        else:
            b_decayed = b_q * power(ones_product(load_ones(ones, UNTIL, CHUNK), b_g, PARTS), LOG)
            b_queries = operand(b_decayed, OPERAND, PRECISION)
            b_weights = add_weights(
                b_weights, b_q, b_k, b_g, base, ones, LOG, OPERAND, PRECISION, PARTS, CHUNK
            )
        b_out = tl.dot(
            b_queries, operand(b_state, OPERAND, PRECISION), b_out, input_precision=PRECISION
        )
        if NORMALIZE:
            b_den += tl.sum(b_decayed * b_sum[None, :], 1)
    b_weights = tl.where(t <= r, b_weights, 0.0)
    b_v = load_rows(p_v, start, o_row, m_row, o_v, v_sl, v_sd, DV, UNIT).to(OPERAND)
    b_out = tl.dot(operand(b_weights, OPERAND, PRECISION), b_v, b_out, input_precision=PRECISION)
    if NORMALIZE:
        b_den += tl.sum(b_weights, 1)
        b_out = b_out / tl.maximum(b_den, eps)[:, None]
        if i_v == 0:
            tl.store(denominator + i_bh * L + start + o_row, b_den, mask=m_row)
    store_rows(out + (i_bh * L + start) * DV, b_out, o_row, m_row, o_v, DV)
