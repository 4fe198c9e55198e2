"""The Triton kernels of the backward.

With a the weight of token s at token r, decay included, three walks along the sequence give the
gradients, each with a state of its own, so that none has to be summed over programs:

- that of q walks forward with the state S; its weights are products of the output's gradient and v;
- that of k walks backward with the state's gradient, transposed, and the same weights;
- that of v walks backward with the state's gradient, and the forward's weights.

They are independent and run side by side in one launch. The output's gradient ``g`` is divided by
the denominator on the way (``b_r``); what the denominator itself gets is one number a token
(``b_n``), as if v had another column of ones.

The gradient of a gate's logarithm at token t is a sum over all s < t <= r. Pairs in t's chunk,
those that end in it or begin in it, and those that pass through are summed apart, without a
difference. At a restart the sum over the pairs that cross that one restart, without its factor, is
the gradient of the gate itself.
"""

import triton
import triton.language as tl

from neuralops.ssm.scalar_decay.kernels import (
    COLUMNS,
    LOG2_E,
    base,
    constant_entry,
    constant_exit,
    constant_triangle,
    gate_logs,
    gate_sums,
    log_of_head,
    mapped,
    part_total,
    phi,
    place,
    rows,
    slope,
    state_tile,
    store_rows,
    store_state,
    triangle,
)

SCALARS = [
    "query_scale", "key_scale", "eps", "sequences", "heads", "L", "part", "n_parts",
    "count", "q_sb", "q_sh", "q_sl", "k_sb", "k_sh", "k_sl", "v_sb", "v_sh", "v_sl",
    "g_sb", "g_sh", "g_sl", "gate_sb", "gate_sh", "gate_sl",
]  # fmt: skip


@triton.jit(do_not_specialize=SCALARS)
def denominator_kernel(
    g, out, denominator, inverse, grad_denominator,
    eps, heads, L, count, g_sb, g_sh, g_sl,
    V: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Write 1 / max(denominator, eps) and the gradient of the denominator, ``(B, H, L)``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m = row < count
    i_head, t = row // L, row % L
    p_g = g + ((i_head // heads) * g_sb + (i_head % heads) * g_sh + t * g_sl) * UNIT
    o_v = tl.arange(0, BLOCK_V)
    m_v = m[:, None] & (o_v < V)[None, :]
    b_g = tl.load(p_g[:, None] + o_v[None, :], mask=m_v, other=0.0).to(tl.float32)
    b_o = tl.load(out + row[:, None] * V + o_v[None, :], mask=m_v, other=0.0).to(tl.float32)
    b_d = tl.load(denominator + row, mask=m, other=1.0)
    b_r = 1.0 / tl.maximum(b_d, eps, propagate_nan=tl.PropagateNan.ALL)
    b_n = tl.where(b_d >= eps, -tl.sum(b_g * b_o, 1) * b_r, 0.0)
    tl.store(inverse + row, b_r, mask=m)
    tl.store(grad_denominator + row, b_n, mask=m)


@triton.jit(do_not_specialize=SCALARS)
def backward_parts_kernel(
    q, g, gate, cu_seqlens, inverse, grad_denominator, states, key_sums, totals,
    query_scale, sequences, heads, L, part, n_parts,
    q_sb, q_sh, q_sl, g_sb, g_sh, g_sl, gate_sb, gate_sh, gate_sl,
    K: tl.constexpr, V: tl.constexpr, MAP: tl.constexpr, NORMALIZE: tl.constexpr,
    LOG_DECAY: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, UNIT: tl.constexpr,
    REVERSE: tl.constexpr, ROW: tl.constexpr, ROW_G: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What each part but the first adds to the gradient of the state before it."""
    blocks: tl.constexpr = tl.cdiv(V, BLOCK_V)
    pid = tl.program_id(0)
    i_b, i_h, _, i_parts, first, i_part, _, shift, low, high = place(
        cu_seqlens, pid // blocks, sequences, heads, L, part, n_parts, REVERSE, PACKED
    )
    start = tl.maximum(low, (i_part - shift) * part)
    end = tl.minimum(high, (i_part - shift + 1) * part)
    o_c, o_k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    o_v = (pid % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    p_q, q_st = base(q, i_b, i_h, q_sb, q_sh, q_sl, L, K, REVERSE, ROW, UNIT)
    p_g, g_st = base(g, i_b, i_h, g_sb, g_sh, g_sl, L, V, REVERSE, ROW_G, UNIT)
    p_gate, gate_st = base(gate, i_b, i_h, gate_sb, gate_sh, gate_sl, L, 1, REVERSE, 0, 1)
    i_row = (i_b * heads + i_h) * L + ((L - 1) if REVERSE else 0)
    row_st = -1 if REVERSE else 1
    if not GATED:
        log = log_of_head(p_gate, LOG_DECAY)
        b_entry = constant_entry(log, CHUNK) * query_scale

    b_s = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    b_z = tl.zeros((BLOCK_K, COLUMNS), tl.float32)
    logs = tl.sum(tl.zeros((CHUNK,), tl.float32), 0)
    if (start < end) & (i_part > first):
        chunks = tl.cdiv(end - start, CHUNK)
        for j in tl.range(0, chunks, num_stages=STAGES):
            chunk = start + (chunks - 1 - j) * CHUNK
            t = chunk + o_c
            m_t = t < end
            b_q = mapped(p_q, chunk, m_t, q_st, o_k, K, MAP, DOT)
            b_g = rows(p_g, chunk, m_t, g_st, o_v, V)
            if GATED:
                b_c, b_id, c_end, id_end = gate_sums(p_gate, t, m_t, gate_st, LOG_DECAY)
                b_entry = tl.where(b_id == 0, tl.exp2(b_c), 0.0) * query_scale
                total = tl.where(id_end == 0, tl.exp2(c_end), 0.0)
                logs = logs + tl.where(id_end == 0, c_end, -float("inf"))
            else:
                count = tl.minimum(end - chunk, CHUNK)
                total = tl.exp2(count.to(tl.float32) * log)
            b_weight = b_entry
            if NORMALIZE:
                o_row = i_row + t * row_st
                b_weight = b_entry * tl.load(inverse + o_row, mask=m_t, other=0.0)
                b_n = b_entry * tl.load(grad_denominator + o_row, mask=m_t, other=0.0)
                b_e = (tl.zeros((CHUNK, COLUMNS), tl.float32) + b_n[:, None]).to(DOT)
                b_z = tl.dot(tl.trans(b_q), b_e, b_z * total, input_precision=PRECISION)
            b_w = (b_g.to(tl.float32) * b_weight[:, None]).to(DOT)
            b_s = tl.dot(tl.trans(b_q), b_w, b_s * total, input_precision=PRECISION)
        i_place = i_parts + i_part
        store_state(states + i_place * (K * V), b_s, o_k, o_v, V, 1, K, V)
        if pid % blocks == 0:
            if NORMALIZE:
                b_z1 = tl.sum(b_z, 1) * (1.0 / COLUMNS)
                tl.store(key_sums + i_place * K + o_k, b_z1, mask=o_k < K)
            if GATED:
                tl.store(totals + i_place, tl.exp2(logs))


@triton.jit
def _crossing(b_c, b_id, scale):
    """The decays from token s to token r across exactly one restart, without its factor."""
    one = b_id[:, None] == b_id[None, :] + 1
    return tl.where(one, tl.exp2(tl.where(one, b_c[:, None] - b_c[None, :], 0.0)) * scale, 0.0)


@triton.jit
def _sum_around(b_p):
    """For each t the sum over s < t <= r of ``b_p (r, s)``."""
    o = tl.arange(0, b_p.shape[0])
    b_f = tl.cumsum(b_p, 0, reverse=True)
    return tl.sum(tl.where(o[:, None] > o[None, :], b_f, 0.0), 1)


@triton.jit
def _sum_before(b_x):
    """For each t the sum over s < t of ``b_x``."""
    o = tl.arange(0, b_x.shape[0])
    return tl.sum(tl.where(o[:, None] > o[None, :], b_x[None, :], 0.0), 1)


@triton.jit
def _chunk_place(start, i_part, j, i_head, n_chunks, CHUNK: tl.constexpr):
    """A number of its own for each chunk of each part."""
    return i_head * n_chunks + start // CHUNK + i_part + j


@triton.jit
def _walk_q(
    p_q, p_k, p_v, p_g, p_gate, q_st, k_st, v_st, g_st, gate_st, cu_seqlens,
    initial_state, initial_key_sum, states, key_sums, totals, p_r, p_n,
    p_out, p_gate_out, chunk_states, chunk_key_sums,
    query_scale, key_scale, L, part, n_parts, row_st,
    i_head, i_state, i_parts, first, i_part, last, shift, low, high, start, end, block,
    K: tl.constexpr, V: tl.constexpr, MAP: tl.constexpr, NORMALIZE: tl.constexpr,
    LOG_DECAY: tl.constexpr, GATED: tl.constexpr, SPLIT: tl.constexpr, OF_GATE: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_KEY_SUM: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_V: tl.constexpr, TILE_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    o_c, o_v = tl.arange(0, CHUNK), tl.arange(0, BLOCK_V)
    o_k = block * TILE_K + tl.arange(0, TILE_K)
    log = 0.0
    if not GATED:
        log = log_of_head(p_gate, LOG_DECAY)
        b_entry = constant_entry(log, CHUNK) * query_scale
    b_s = tl.zeros((BLOCK_V, TILE_K), tl.float32)
    b_z = tl.zeros((TILE_K,), tl.float32)
    if HAS_STATE:
        b_s = state_tile(initial_state + i_state * (K * V), o_v, o_k, 1, V, V, K)
    if HAS_KEY_SUM:
        b_z += tl.load(initial_key_sum + i_state * K + o_k, mask=o_k < K, other=0.0)
    if SPLIT:
        for i in range(first, i_part):
            total = part_total(totals, log, i_parts, i, part, shift, low, high, GATED)
            p_states = states + (i_parts + i) * (K * V)
            b_s = b_s * total + state_tile(p_states, o_v, o_k, 1, V, V, K)
            if NORMALIZE:
                p_sums = key_sums + (i_parts + i) * K + o_k
                b_z = b_z * total + tl.load(p_sums, mask=o_k < K, other=0.0)

    chunks = tl.cdiv(end - start, CHUNK)
    for j in tl.range(0, chunks, num_stages=STAGES):
        chunk = start + j * CHUNK
        t = chunk + o_c
        m_t = t < end
        b_g = rows(p_g, chunk, m_t, g_st, o_v, V).to(DOT)
        b_v = rows(p_v, chunk, m_t, v_st, o_v, V).to(DOT)
        b_k32 = mapped(p_k, chunk, m_t, k_st, o_k, K, MAP, tl.float32)
        b_k = b_k32.to(DOT)
        b_q = rows(p_q, chunk, m_t, q_st, o_k, K)
        if GATED:
            b_c, b_id, c_end, id_end = gate_sums(p_gate, t, m_t, gate_st, LOG_DECAY)
            b_pairs = triangle(b_c, b_id, query_scale * key_scale, False)
            b_entry = tl.where(b_id == 0, tl.exp2(b_c), 0.0) * query_scale
            b_exit = tl.where(m_t & (b_id == id_end), tl.exp2(c_end - b_c), 0.0) * key_scale
            total = tl.where(id_end == 0, tl.exp2(c_end), 0.0)
        else:
            count = tl.minimum(end - chunk, CHUNK)
            b_exit = constant_exit(log, count, CHUNK) * key_scale
            total = tl.exp2(count.to(tl.float32) * log)

        b_p = tl.dot(b_g, tl.trans(b_v), input_precision=PRECISION)
        b_d = tl.dot(b_g, b_s.to(DOT), input_precision=PRECISION)
        if NORMALIZE:
            b_r = tl.load(p_r + t * row_st, mask=m_t, other=0.0)
            b_n = tl.load(p_n + t * row_st, mask=m_t, other=0.0)
            b_p = b_p * b_r[:, None] + b_n[:, None]
            b_d = b_d * b_r[:, None] + b_n[:, None] * b_z[None, :]
        if OF_GATE:
            b_mapped = phi(b_q, o_k, K, MAP, DOT)
            b_a = tl.dot(b_mapped, tl.trans(b_k), input_precision=PRECISION) * b_p
            b_inter = tl.sum(b_mapped.to(tl.float32) * b_d, 1)
            b_log = _sum_around(b_a * b_pairs) + tl.cumsum(b_inter * b_entry, 0, reverse=True)
            if id_end > 0:
                _, restart = gate_logs(p_gate, t, m_t, gate_st, LOG_DECAY)
                b_own = _sum_around(b_a * _crossing(b_c, b_id, query_scale * key_scale))
                b_cross = tl.where(b_id == 1, tl.exp2(b_c), 0.0) * query_scale
                b_own += tl.cumsum(b_inter * b_cross, 0, reverse=True)
                b_log = tl.where(restart != 0, b_own, b_log)
            tl.store(p_gate_out + t * row_st, b_log, mask=m_t)
            n_chunks = tl.cdiv(L, CHUNK) + n_parts
            i_chunk = _chunk_place(start, i_part, j, i_head, n_chunks, CHUNK)
            p_chunk = chunk_states + i_chunk * (K * V)
            store_state(p_chunk, b_s.to(chunk_states.dtype.element_ty), o_v, o_k, K, 1, V, K)
            if NORMALIZE:
                tl.store(chunk_key_sums + i_chunk * K + o_k, b_z, mask=o_k < K)
        if not GATED:
            b_pairs = constant_triangle(log, count, query_scale * key_scale, CHUNK, False)
        b_d = tl.dot(
            (b_p * b_pairs).to(DOT), b_k, b_d * b_entry[:, None], input_precision=PRECISION
        )
        if MAP != "identity":
            b_d = b_d * slope(b_q, MAP)
        store_rows(p_out, b_d, chunk, m_t, row_st * K, o_k, K)
        b_w = b_k32 * b_exit[:, None]
        b_s = tl.dot(tl.trans(b_v), b_w.to(DOT), b_s * total, input_precision=PRECISION)
        if NORMALIZE:
            b_z = b_z * total + tl.sum(b_w, 0)


@triton.jit
def _walk_k(
    p_q, p_k, p_v, p_g, p_gate, q_st, k_st, v_st, g_st, gate_st, cu_seqlens,
    grad_state, grad_key_sum, states, key_sums, totals, p_r, p_n,
    p_out, p_gate_out, chunk_states, chunk_key_sums, grad_initial_key_sum,
    query_scale, key_scale, L, part, n_parts, row_st,
    i_head, i_state, i_parts, first, i_part, last, shift, low, high, start, end, block,
    K: tl.constexpr, V: tl.constexpr, MAP: tl.constexpr, NORMALIZE: tl.constexpr,
    LOG_DECAY: tl.constexpr, GATED: tl.constexpr, SPLIT: tl.constexpr, OF_GATE: tl.constexpr,
    HAS_GRAD_STATE: tl.constexpr, HAS_GRAD_KEY_SUM: tl.constexpr, HAS_KEY_SUM: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_V: tl.constexpr, TILE_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    o_c, o_v = tl.arange(0, CHUNK), tl.arange(0, BLOCK_V)
    o_k = block * TILE_K + tl.arange(0, TILE_K)
    log = 0.0
    if not GATED:
        log = log_of_head(p_gate, LOG_DECAY)
        b_entry = constant_entry(log, CHUNK) * query_scale
    b_s = tl.zeros((BLOCK_V, TILE_K), tl.float32)
    b_z = tl.zeros((TILE_K,), tl.float32)
    if HAS_GRAD_STATE:
        b_s = state_tile(grad_state + i_state * (K * V), o_v, o_k, 1, V, V, K)
    if HAS_GRAD_KEY_SUM:
        b_z += tl.load(grad_key_sum + i_state * K + o_k, mask=o_k < K, other=0.0)
    if SPLIT:
        for j in range(0, last - i_part):
            i = last - j
            total = part_total(totals, log, i_parts, i, part, shift, low, high, GATED)
            p_states = states + (i_parts + i) * (K * V)
            b_s = b_s * total + state_tile(p_states, o_v, o_k, 1, V, V, K)
            if NORMALIZE:
                p_sums = key_sums + (i_parts + i) * K + o_k
                b_z = b_z * total + tl.load(p_sums, mask=o_k < K, other=0.0)

    chunks = tl.cdiv(end - start, CHUNK)
    for j in tl.range(0, chunks, num_stages=STAGES):
        i = chunks - 1 - j
        chunk = start + i * CHUNK
        t = chunk + o_c
        m_t = t < end
        b_g = rows(p_g, chunk, m_t, g_st, o_v, V).to(DOT)
        b_v = rows(p_v, chunk, m_t, v_st, o_v, V).to(DOT)
        b_q32 = mapped(p_q, chunk, m_t, q_st, o_k, K, MAP, tl.float32)
        b_q = b_q32.to(DOT)
        b_k = rows(p_k, chunk, m_t, k_st, o_k, K)
        if GATED:
            b_c, b_id, c_end, id_end = gate_sums(p_gate, t, m_t, gate_st, LOG_DECAY)
            b_pairs = triangle(b_c, b_id, query_scale * key_scale, True)
            b_entry = tl.where(b_id == 0, tl.exp2(b_c), 0.0) * query_scale
            b_exit = tl.where(m_t & (b_id == id_end), tl.exp2(c_end - b_c), 0.0) * key_scale
            total = tl.where(id_end == 0, tl.exp2(c_end), 0.0)
        else:
            count = tl.minimum(end - chunk, CHUNK)
            b_exit = constant_exit(log, count, CHUNK) * key_scale
            total = tl.exp2(count.to(tl.float32) * log)

        b_p = tl.dot(b_v, tl.trans(b_g), input_precision=PRECISION)
        b_d = tl.dot(b_v, b_s.to(DOT), input_precision=PRECISION)
        b_weight = b_entry
        if NORMALIZE:
            b_r = tl.load(p_r + t * row_st, mask=m_t, other=0.0)
            b_n = tl.load(p_n + t * row_st, mask=m_t, other=0.0)
            b_p = b_p * b_r[None, :] + b_n[None, :]
            b_d = b_d + b_z[None, :]
            b_weight = b_entry * b_r
        if OF_GATE:
            n_chunks = tl.cdiv(L, CHUNK) + n_parts
            i_chunk = _chunk_place(start, i_part, i, i_head, n_chunks, CHUNK)
            b_in = state_tile(chunk_states + i_chunk * (K * V), o_v, o_k, K, 1, V, K)
            through = tl.sum(b_in * b_s)
            if NORMALIZE:
                p_sums = chunk_key_sums + i_chunk * K + o_k
                through += tl.sum(tl.load(p_sums, mask=o_k < K, other=0.0) * b_z)
            b_inter = tl.sum(phi(b_k, o_k, K, MAP, DOT).to(tl.float32) * b_d, 1)
            b_log = _sum_before(b_inter * b_exit) + total * through
            if id_end > 0:
                _, restart = gate_logs(p_gate, t, m_t, gate_st, LOG_DECAY)
                b_cross = tl.where(m_t & (b_id == id_end - 1), tl.exp2(c_end - b_c), 0.0)
                b_own = _sum_before(b_inter * b_cross * key_scale)
                b_own += tl.where(id_end == 1, tl.exp2(c_end), 0.0) * through
                b_log = tl.where(restart != 0, b_own, b_log)
            tl.store(p_gate_out + t * row_st, b_log, mask=m_t)
        if not GATED:
            b_pairs = constant_triangle(log, count, query_scale * key_scale, CHUNK, True)
        b_d = tl.dot((b_p * b_pairs).to(DOT), b_q, b_d * b_exit[:, None], input_precision=PRECISION)
        if MAP != "identity":
            b_d = b_d * slope(b_k, MAP)
        store_rows(p_out, b_d, chunk, m_t, row_st * K, o_k, K)
        if NORMALIZE:
            b_z = b_z * total + tl.sum(b_q32 * (b_entry * b_n)[:, None], 0)
        b_w = (b_q32 * b_weight[:, None]).to(DOT)
        b_s = tl.dot(tl.trans(b_g), b_w, b_s * total, input_precision=PRECISION)
    if HAS_KEY_SUM and i_part == first:
        tl.store(grad_initial_key_sum + i_state * K + o_k, b_z, mask=o_k < K)


@triton.jit
def _walk_v(
    p_q, p_k, p_g, p_gate, q_st, k_st, g_st, gate_st,
    grad_state, states, totals, p_r, p_out, grad_initial_state,
    query_scale, key_scale, part, row_st,
    i_state, i_parts, first, i_part, last, shift, low, high, start, end, block,
    K: tl.constexpr, V: tl.constexpr, MAP: tl.constexpr, NORMALIZE: tl.constexpr,
    LOG_DECAY: tl.constexpr, GATED: tl.constexpr, SPLIT: tl.constexpr,
    HAS_GRAD_STATE: tl.constexpr, HAS_STATE: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, TILE_V: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    o_c, o_s = tl.arange(0, CHUNK), tl.arange(0, SLICE)
    o_v = block * TILE_V + tl.arange(0, TILE_V)
    log = 0.0
    if not GATED:
        log = log_of_head(p_gate, LOG_DECAY)
        b_entry = constant_entry(log, CHUNK) * query_scale
    b_s = ()
    for n in tl.static_range(SLICES):
        o_k = n * SLICE + o_s
        b_sn = tl.zeros((TILE_V, SLICE), tl.float32)
        if HAS_GRAD_STATE:
            b_sn = state_tile(grad_state + i_state * (K * V), o_v, o_k, 1, V, V, K)
        if SPLIT:
            for j in range(0, last - i_part):
                i = last - j
                total = part_total(totals, log, i_parts, i, part, shift, low, high, GATED)
                p_states = states + (i_parts + i) * (K * V)
                b_sn = b_sn * total + state_tile(p_states, o_v, o_k, 1, V, V, K)
        b_s = b_s + (b_sn,)

    chunks = tl.cdiv(end - start, CHUNK)
    for j in tl.range(0, chunks, num_stages=STAGES):
        chunk = start + (chunks - 1 - j) * CHUNK
        t = chunk + o_c
        m_t = t < end
        b_g = rows(p_g, chunk, m_t, g_st, o_v, V)
        if GATED:
            b_c, b_id, c_end, id_end = gate_sums(p_gate, t, m_t, gate_st, LOG_DECAY)
            b_pairs = triangle(b_c, b_id, query_scale * key_scale, True)
            b_entry = tl.where(b_id == 0, tl.exp2(b_c), 0.0) * query_scale
            b_exit = tl.where(m_t & (b_id == id_end), tl.exp2(c_end - b_c), 0.0) * key_scale
            total = tl.where(id_end == 0, tl.exp2(c_end), 0.0)
        else:
            count = tl.minimum(end - chunk, CHUNK)
            b_exit = constant_exit(log, count, CHUNK) * key_scale
            total = tl.exp2(count.to(tl.float32) * log)
        b_weight = b_entry
        if NORMALIZE:
            b_r = tl.load(p_r + t * row_st, mask=m_t, other=0.0)
            b_weight = b_entry * b_r
        b_w = (b_g.to(tl.float32) * b_weight[:, None]).to(DOT)

        b_a = tl.zeros((CHUNK, CHUNK), tl.float32)
        b_d = tl.zeros((CHUNK, TILE_V), tl.float32)
        next_s = ()
        for n in tl.static_range(SLICES):
            o_k = n * SLICE + o_s
            b_k = mapped(p_k, chunk, m_t, k_st, o_k, K, MAP, DOT)
            b_q = mapped(p_q, chunk, m_t, q_st, o_k, K, MAP, DOT)
            b_a = tl.dot(b_k, tl.trans(b_q), b_a, input_precision=PRECISION)
            b_d = tl.dot(b_k, tl.trans(b_s[n].to(DOT)), b_d, input_precision=PRECISION)
            next_s = next_s + (
                tl.dot(tl.trans(b_w), b_q, b_s[n] * total, input_precision=PRECISION),
            )
        b_s = next_s
        if not GATED:
            b_pairs = constant_triangle(log, count, query_scale * key_scale, CHUNK, True)
        b_a = b_a * b_pairs
        if NORMALIZE:
            b_a = b_a * b_r[None, :]
        b_d = tl.dot(b_a.to(DOT), b_g.to(DOT), b_d * b_exit[:, None], input_precision=PRECISION)
        store_rows(p_out, b_d, chunk, m_t, row_st * V, o_v, V)
    if HAS_STATE and i_part == first:
        for n in tl.static_range(SLICES):
            o_k = n * SLICE + o_s
            p_state = grad_initial_state + i_state * (K * V)
            store_state(p_state, b_s[n], o_v, o_k, 1, V, V, K)


@triton.jit(do_not_specialize=SCALARS)
def backward_kernel(
    q, k, v, g, gate, cu_seqlens, initial_state, initial_key_sum, grad_state, grad_key_sum,
    states, key_sums, totals, grad_states, grad_key_sums, grad_totals, inverse, grad_denominator,
    grad_q, grad_k, grad_v, grad_gates, grad_initial_state, grad_initial_key_sum,
    chunk_states, chunk_key_sums,
    query_scale, key_scale, sequences, heads, L, part, n_parts, count,
    q_sb, q_sh, q_sl, k_sb, k_sh, k_sl, v_sb, v_sh, v_sl, g_sb, g_sh, g_sl,
    gate_sb, gate_sh, gate_sl,
    K: tl.constexpr, V: tl.constexpr, MAP: tl.constexpr, NORMALIZE: tl.constexpr,
    LOG_DECAY: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr,
    OF_GATE: tl.constexpr, OF_Q: tl.constexpr, OF_KV: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_KEY_SUM: tl.constexpr,
    HAS_GRAD_STATE: tl.constexpr, HAS_GRAD_KEY_SUM: tl.constexpr, UNIT: tl.constexpr,
    REVERSE: tl.constexpr, ROW: tl.constexpr, ROW_G: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, BLOCK_V: tl.constexpr,
    TILE_K: tl.constexpr, TILE_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of q, k, v and the initial states, and parts of those of the gates.

    ``grad_gates (2 cdiv(K, TILE_K), B, H, L)`` are to be summed; ``count`` is B H L. They need
    the states that enter the chunks, so that OF_Q writes them for OF_KV in a launch before it.
    """
    k_blocks: tl.constexpr = (K + TILE_K - 1) // TILE_K
    v_blocks: tl.constexpr = (V + TILE_V - 1) // TILE_V
    q_roles: tl.constexpr = k_blocks * OF_Q
    k_roles: tl.constexpr = k_blocks * OF_KV
    roles: tl.constexpr = q_roles + k_roles + v_blocks * OF_KV
    pid = tl.program_id(0)
    role = pid % roles
    i_b, i_h, i_state, i_parts, first, i_part, last, shift, low, high = place(
        cu_seqlens, pid // roles, sequences, heads, L, part, n_parts, REVERSE, PACKED
    )
    start = tl.maximum(low, (i_part - shift) * part)
    end = tl.minimum(high, (i_part - shift + 1) * part)
    p_q, q_st = base(q, i_b, i_h, q_sb, q_sh, q_sl, L, K, REVERSE, ROW, UNIT)
    p_k, k_st = base(k, i_b, i_h, k_sb, k_sh, k_sl, L, K, REVERSE, ROW, UNIT)
    p_v, v_st = base(v, i_b, i_h, v_sb, v_sh, v_sl, L, V, REVERSE, ROW, UNIT)
    p_g, g_st = base(g, i_b, i_h, g_sb, g_sh, g_sl, L, V, REVERSE, ROW_G, UNIT)
    p_gate, gate_st = base(gate, i_b, i_h, gate_sb, gate_sh, gate_sl, L, 1, REVERSE, 0, 1)
    row_st = -1 if REVERSE else 1
    i_head = i_b * heads + i_h
    i_row = i_head * L + ((L - 1) if REVERSE else 0)
    p_r, p_n = inverse, grad_denominator
    if NORMALIZE:
        p_r, p_n = inverse + i_row, grad_denominator + i_row
    if OF_Q:  # noqa: SIM102 - decided when it is compiled
        if (start < end) & (role < q_roles):
            p_gates = grad_gates
            if OF_GATE:
                p_gates = grad_gates + role * count.to(tl.int64) + i_row
            _walk_q(
                p_q, p_k, p_v, p_g, p_gate, q_st, k_st, v_st, g_st, gate_st, cu_seqlens,
                initial_state, initial_key_sum, states, key_sums, totals, p_r, p_n,
                grad_q + i_row * K, p_gates, chunk_states, chunk_key_sums,
                query_scale, key_scale, L, part, n_parts, row_st,
                i_head, i_state, i_parts, first, i_part, last, shift, low, high, start, end, role,
                K, V, MAP, NORMALIZE, LOG_DECAY, GATED, SPLIT, OF_GATE, HAS_STATE, HAS_KEY_SUM,
                DOT, PRECISION, CHUNK, BLOCK_V, TILE_K, STAGES,
            )  # fmt: skip
    if OF_KV:
        if (start < end) & (role >= q_roles) & (role < q_roles + k_roles):
            p_gates = grad_gates
            if OF_GATE:
                p_gates = grad_gates + (k_blocks + role - q_roles) * count.to(tl.int64) + i_row
            _walk_k(
                p_q, p_k, p_v, p_g, p_gate, q_st, k_st, v_st, g_st, gate_st, cu_seqlens,
                grad_state, grad_key_sum, grad_states, grad_key_sums, grad_totals, p_r, p_n,
                grad_k + i_row * K, p_gates, chunk_states, chunk_key_sums, grad_initial_key_sum,
                query_scale, key_scale, L, part, n_parts, row_st,
                i_head, i_state, i_parts, first, i_part, last, shift, low, high, start, end,
                role - q_roles,
                K, V, MAP, NORMALIZE, LOG_DECAY, GATED, SPLIT, OF_GATE,
                HAS_GRAD_STATE, HAS_GRAD_KEY_SUM, HAS_KEY_SUM,
                DOT, PRECISION, CHUNK, BLOCK_V, TILE_K, STAGES,
            )  # fmt: skip
        if (start < end) & (role >= q_roles + k_roles):
            _walk_v(
                p_q, p_k, p_g, p_gate, q_st, k_st, g_st, gate_st,
                grad_state, grad_states, grad_totals, p_r, grad_v + i_row * V, grad_initial_state,
                query_scale, key_scale, part, row_st,
                i_state, i_parts, first, i_part, last, shift, low, high, start, end,
                role - q_roles - k_roles,
                K, V, MAP, NORMALIZE, LOG_DECAY, GATED, SPLIT, HAS_GRAD_STATE, HAS_STATE,
                DOT, PRECISION, CHUNK, SLICE, SLICES, TILE_V, STAGES,
            )  # fmt: skip


@triton.jit(do_not_specialize=SCALARS)
def gate_kernel(
    grad_gates, gate, grad_gate, heads, L, count, gate_sb, gate_sh, gate_sl,
    SLOTS: tl.constexpr, LOG_DECAY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the parts of the gates' gradients, from logarithms to what ``gate`` holds."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = row < count
    i_head, t = row // L, row % L
    p_gate = gate + (i_head // heads) * gate_sb + (i_head % heads) * gate_sh
    b_x = tl.load(p_gate + t * gate_sl, mask=m, other=1.0).to(tl.float32)
    b_sum = tl.zeros((BLOCK,), tl.float32)
    for i in range(SLOTS):
        b_sum += tl.load(grad_gates + i * count.to(tl.int64) + row, mask=m, other=0.0)
    _, restart = gate_logs(p_gate, t, m, gate_sl, LOG_DECAY)
    if LOG_DECAY:
        b_sum = tl.where(restart != 0, b_sum * tl.exp2(b_x * LOG2_E), b_sum)
    else:
        b_sum = tl.where(restart != 0, b_sum, b_sum / tl.where(restart != 0, 1.0, b_x))
    tl.store(grad_gate + row, b_sum.to(grad_gate.dtype.element_ty), mask=m)
