"""The Triton kernels of the forward, and what the backward shares with them.

A program owns BLOCK_V columns of the state of one head, or of one part of its sequence, and walks
along it chunk by chunk with the state in registers. Where a sequence is split, a first kernel
computes what each part adds to the state, and each program of the second one composes the parts
before its own, in their order.

Decays are kept as logarithms to base 2, summed within a chunk only, and only differences of them
are exponentiated. A gate below 2**-100 counts as a restart: tokens on its two sides have
different numbers, and what it lets through is left out.

The key sum Z is kept as 16 equal columns, so that the tensor cores compute it and its products.

Tokens are counted in scan order; a negative row stride runs from the last row to the first. Strides
come divided by UNIT, so that the compiler knows what divides them without a compilation for every
length. ``b_`` is a block of values, ``p_`` a pointer, ``o_`` an offset, ``m_`` a mask.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_LOG = tl.constexpr(-100.0)
NEVER = tl.constexpr(-1.0e4)
"""The logarithm of a constant decay of 0: finite, so that no multiple of it is NaN."""
COLUMNS = tl.constexpr(16)


@triton.jit
def phi(x, o_d, D: tl.constexpr, MAP: tl.constexpr, DOT: tl.constexpr):
    """The feature map, in the dtype of the products; 0 past the last column."""
    if MAP == "identity":
        return x.to(DOT)
    x = x.to(tl.float32)
    if MAP == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        x = tl.where(x > 0, x + 1.0, tl.exp2(x * LOG2_E))
        if (o_d.shape[0] * 0 + D) % o_d.shape[0] != 0:
            x = tl.where((o_d < D)[None, :], x, 0.0)
    return x.to(DOT)


@triton.jit
def rounded(x, DOT: tl.constexpr):
    """Round to what DOT holds, still in float32, so that a sum sees what a product sees."""
    if DOT == tl.bfloat16:  # noqa: SIM300
        bits = (x.to(tl.int32, bitcast=True) + 0x8000) & -65536
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def slope(x, MAP: tl.constexpr):
    """The derivative of the feature map."""
    x = x.to(tl.float32)
    if MAP == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    return tl.where(x > 0, 1.0, tl.exp2(x * LOG2_E))


@triton.jit
def rows(p, first, m_t, x_st, o_d, D: tl.constexpr):
    """The tile of the tokens from ``first`` on and the columns ``o_d``; 0 outside."""
    m = m_t[:, None]
    if (o_d.shape[0] * 0 + D) % o_d.shape[0] != 0:
        m = m & (o_d < D)[None, :]
    o = tl.arange(0, m_t.shape[0])[:, None] * x_st + o_d[None, :]
    return tl.load(p + first.to(tl.int64) * x_st + o, mask=m, other=0.0)


@triton.jit
def mapped(p, first, m_t, x_st, o_d, D: tl.constexpr, MAP: tl.constexpr, DOT: tl.constexpr):
    """The feature map of a tile."""
    return phi(rows(p, first, m_t, x_st, o_d, D), o_d, D, MAP, DOT)


@triton.jit
def store_rows(p, b, first, m_t, x_st, o_d, D: tl.constexpr):
    m = m_t[:, None]
    if (o_d.shape[0] * 0 + D) % o_d.shape[0] != 0:
        m = m & (o_d < D)[None, :]
    o = tl.arange(0, m_t.shape[0])[:, None] * x_st + o_d[None, :]
    tl.store(p + first.to(tl.int64) * x_st + o, b.to(p.dtype.element_ty), mask=m)


@triton.jit
def log_of_head(gate, LOG_DECAY: tl.constexpr):
    """The logarithm of a constant decay."""
    g = tl.load(gate).to(tl.float32)
    return tl.maximum(g * LOG2_E if LOG_DECAY else tl.log2(g), NEVER)


@triton.jit
def gate_logs(p_gate, t, m_t, gate_st, LOG_DECAY: tl.constexpr):
    """The logarithms of the gates of the tokens ``t``, and which of them restart the scan."""
    x = tl.load(p_gate + t * gate_st, mask=m_t, other=0.0 if LOG_DECAY else 1.0)
    x = x.to(tl.float32)
    x = x * LOG2_E if LOG_DECAY else tl.log2(x)
    restart = x < LEAST_LOG
    return tl.where(restart, 0.0, x), restart.to(tl.int32)


@triton.jit
def gate_sums(p_gate, t, m_t, gate_st, LOG_DECAY: tl.constexpr):
    """Sums of the gates' logarithms from the chunk's first token on, and numbers of restarts.

    Then both over the whole chunk.
    """
    logs, restarts = gate_logs(p_gate, t, m_t, gate_st, LOG_DECAY)
    return tl.cumsum(logs, 0), tl.cumsum(restarts, 0), tl.sum(logs, 0), tl.sum(restarts, 0)


@triton.jit
def triangle(b_c, b_id, scale, UPPER: tl.constexpr):
    """The decays from token s to token r >= s: ``(r, s)``, or ``(s, r)`` if UPPER."""
    o = tl.arange(0, b_c.shape[0])
    if UPPER:
        kept = (o[:, None] <= o[None, :]) & (b_id[:, None] == b_id[None, :])
        b_c = tl.where(kept, b_c[None, :] - b_c[:, None], 0.0)
    else:
        kept = (o[:, None] >= o[None, :]) & (b_id[:, None] == b_id[None, :])
        b_c = tl.where(kept, b_c[:, None] - b_c[None, :], 0.0)
    return tl.where(kept, tl.exp2(b_c) * scale, 0.0)


@triton.jit
def constant_triangle(log, count, scale, CHUNK: tl.constexpr, UPPER: tl.constexpr):
    """The same for a constant decay, in a chunk of ``count`` tokens.

    It is computed in every chunk: ``count`` keeps the compiler from holding it in registers.
    """
    o = tl.arange(0, CHUNK)
    b_c = tl.minimum(o, count).to(tl.float32) * log
    if UPPER:
        return tl.where(o[:, None] <= o[None, :], tl.exp2(b_c[None, :] - b_c[:, None]) * scale, 0.0)
    return tl.where(o[:, None] >= o[None, :], tl.exp2(b_c[:, None] - b_c[None, :]) * scale, 0.0)


@triton.jit
def constant_entry(log, CHUNK: tl.constexpr):
    """The decays from before the chunk to each token."""
    return tl.exp2((tl.arange(0, CHUNK) + 1).to(tl.float32) * log)


@triton.jit
def constant_exit(log, count, CHUNK: tl.constexpr):
    """The decays from each of the chunk's ``count`` tokens to after it; 0 past them."""
    left = count - 1 - tl.arange(0, CHUNK)
    return tl.where(left >= 0, tl.exp2(tl.maximum(left, 0).to(tl.float32) * log), 0.0)


@triton.jit
def state_tile(p, o_k, o_v, s_k, s_v, K: tl.constexpr, V: tl.constexpr):
    """A tile of a state whose rows lie ``s_k`` apart and whose columns ``s_v``; 0 outside."""
    p_tile = p + o_k[:, None] * s_k + o_v[None, :] * s_v
    if ((o_k.shape[0] * 0 + K) % o_k.shape[0] == 0) & ((o_v.shape[0] * 0 + V) % o_v.shape[0] == 0):
        return tl.load(p_tile).to(tl.float32)
    return tl.load(p_tile, mask=(o_k < K)[:, None] & (o_v < V)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_state(p, b, o_k, o_v, s_k, s_v, K: tl.constexpr, V: tl.constexpr):
    p_tile = p + o_k[:, None] * s_k + o_v[None, :] * s_v
    if ((o_k.shape[0] * 0 + K) % o_k.shape[0] == 0) & ((o_v.shape[0] * 0 + V) % o_v.shape[0] == 0):
        tl.store(p_tile, b)
    else:
        tl.store(p_tile, b, mask=(o_k < K)[:, None] & (o_v < V)[None, :])


@triton.jit
def bound(cu_seqlens, i, sequences, L, REVERSE: tl.constexpr):
    """The first token of the i-th packed sequence in scan order."""
    row = tl.load(cu_seqlens + ((sequences - i) if REVERSE else i)).to(tl.int32)
    row = tl.minimum(tl.maximum(row, 0), L)
    return L - row if REVERSE else row


@triton.jit
def place(
    cu_seqlens, index, sequences, heads, L, part, n_parts,
    REVERSE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Where the program ``index`` works.

    A packed sequence is cut where a new one starts and at multiples of ``part``: the piece of the
    i-th sequence in the j-th of these is the part i + j, and no two share a number.

    Returns:
        The batch row and the head; the places of its state and of its parts; the numbers of the
        sequence's first part, of this one and of the last one, and what they are ahead of ``j``;
        the sequence's first token and its end.
    """
    if PACKED:
        i_part, i_h = index // heads, (index % heads).to(tl.int64)
        low, high = i_part * 0, i_part * 0 + sequences - 1
        while low < high:
            middle = (low + high + 1) // 2
            here = bound(cu_seqlens, middle, sequences, L, REVERSE) // part + middle <= i_part
            low, high = tl.where(here, middle, low), tl.where(here, high, middle - 1)
        shift = low
        start = bound(cu_seqlens, shift, sequences, L, REVERSE)
        end = bound(cu_seqlens, shift + 1, sequences, L, REVERSE)
        first, last = start // part + shift, (end - 1) // part + shift
        i_b = i_h * 0
        i_segment = sequences - 1 - shift if REVERSE else shift
        i_state = i_segment.to(tl.int64) * heads + i_h
        i_parts = i_h * n_parts
    else:
        i_part, i_state = index // (sequences * heads), (index % (sequences * heads)).to(tl.int64)
        i_b, i_h = i_state // heads, i_state % heads
        i_parts = i_state * n_parts
        shift, start, end = i_part * 0, i_part * 0, i_part * 0 + L
        first, last = i_part * 0, i_part * 0 + n_parts - 1
    return i_b, i_h, i_state, i_parts, first, i_part, last, shift, start, end


@triton.jit
def base(
    p, i_b, i_h, x_sb, x_sh, x_sl, L, D: tl.constexpr,
    REVERSE: tl.constexpr, ROW: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Where token 0 of a head lies, and the stride from one token to the next, below 2**24.

    It is ROW times D where ROW is not 0: then the addresses of a tile are one and constants.
    """
    p += (i_b * x_sb.to(tl.int64) + i_h * x_sh.to(tl.int64)) * UNIT
    row = x_sl.to(tl.int32) * 0 + ROW * D if ROW > 0 else x_sl.to(tl.int32) * UNIT
    if REVERSE:
        return p + (L - 1) * row.to(tl.int64), -row
    return p, row


SCALARS = [
    "key_scale", "query_scale", "eps", "sequences", "heads", "L", "part", "n_parts",
    "q_sb", "q_sh", "q_sl", "k_sb", "k_sh", "k_sl", "v_sb", "v_sh", "v_sl",
    "gate_sb", "gate_sh", "gate_sl",
]  # fmt: skip


@triton.jit(do_not_specialize=SCALARS)
def forward_parts_kernel(
    k, v, gate, cu_seqlens, states, key_sums, totals,
    key_scale, sequences, heads, L, part, n_parts,
    k_sb, k_sh, k_sl, v_sb, v_sh, v_sl, gate_sb, gate_sh, gate_sl,
    K: tl.constexpr, V: tl.constexpr, MAP: tl.constexpr, NORMALIZE: tl.constexpr,
    LOG_DECAY: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, UNIT: tl.constexpr,
    REVERSE: tl.constexpr, ROW: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What each part adds to the state: ``states (..., n_parts, K, V)``, ``key_sums``, ``totals``.

    ``totals`` is what the part lets through, where the gates are not constant.
    """
    blocks: tl.constexpr = tl.cdiv(V, BLOCK_V)
    pid = tl.program_id(0)
    i_b, i_h, _, i_parts, _, i_part, last, shift, low, high = place(
        cu_seqlens, pid // blocks, sequences, heads, L, part, n_parts, REVERSE, PACKED
    )
    start = tl.maximum(low, (i_part - shift) * part)
    end = tl.minimum(high, (i_part - shift + 1) * part)
    o_c, o_k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    o_v = (pid % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    p_k, k_st = base(k, i_b, i_h, k_sb, k_sh, k_sl, L, K, REVERSE, ROW, UNIT)
    p_v, v_st = base(v, i_b, i_h, v_sb, v_sh, v_sl, L, V, REVERSE, ROW, UNIT)
    p_gate, gate_st = base(gate, i_b, i_h, gate_sb, gate_sh, gate_sl, L, 1, REVERSE, 0, 1)
    if not GATED:
        log = log_of_head(p_gate, LOG_DECAY)

    b_s = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    b_z = tl.zeros((BLOCK_K, COLUMNS), tl.float32)
    logs = tl.sum(tl.zeros((CHUNK,), tl.float32), 0)
    if (start < end) & (i_part < last):
        for j in tl.range(0, tl.cdiv(end - start, CHUNK), num_stages=STAGES):
            chunk = start + j * CHUNK
            t = chunk + o_c
            m_t = t < end
            b_k = mapped(p_k, chunk, m_t, k_st, o_k, K, MAP, DOT)
            b_v = rows(p_v, chunk, m_t, v_st, o_v, V)
            if GATED:
                b_c, b_id, c_end, id_end = gate_sums(p_gate, t, m_t, gate_st, LOG_DECAY)
                b_exit = tl.where(m_t & (b_id == id_end), tl.exp2(c_end - b_c), 0.0)
                total = tl.where(id_end == 0, tl.exp2(c_end), 0.0)
                logs = logs + tl.where(id_end == 0, c_end, -float("inf"))
            else:
                count = tl.minimum(end - chunk, CHUNK)
                b_exit = constant_exit(log, count, CHUNK)
                total = tl.exp2(count.to(tl.float32) * log)
            b_exit = b_exit * key_scale
            b_w = (b_v.to(tl.float32) * b_exit[:, None]).to(DOT)
            b_s = tl.dot(tl.trans(b_k), b_w, b_s * total, input_precision=PRECISION)
            if NORMALIZE:
                b_e = (tl.zeros((CHUNK, COLUMNS), tl.float32) + b_exit[:, None]).to(DOT)
                b_z = tl.dot(tl.trans(b_k), b_e, b_z * total, input_precision=PRECISION)
        i_place = i_parts + i_part
        store_state(states + i_place * (K * V), b_s, o_k, o_v, V, 1, K, V)
        if pid % blocks == 0:
            if NORMALIZE:
                b_z1 = tl.sum(b_z, 1) * (1.0 / COLUMNS)
                tl.store(key_sums + i_place * K + o_k, b_z1, mask=o_k < K)
            if GATED:
                tl.store(totals + i_place, tl.exp2(logs))


@triton.jit
def part_total(totals, log, i_parts, i, part, shift, low, high, GATED: tl.constexpr):
    """What the part ``i`` of a sequence lets through."""
    if GATED:
        return tl.load(totals + i_parts + i)
    count = tl.minimum(high, (i - shift + 1) * part) - tl.maximum(low, (i - shift) * part)
    return tl.exp2(count.to(tl.float32) * log)


@triton.jit(do_not_specialize=SCALARS)
def forward_kernel(
    q, k, v, gate, initial_state, initial_key_sum, cu_seqlens, states, key_sums, totals,
    out, denominator, final_state, final_key_sum,
    query_scale, key_scale, eps, sequences, heads, L, part, n_parts,
    q_sb, q_sh, q_sl, k_sb, k_sh, k_sl, v_sb, v_sh, v_sl, gate_sb, gate_sh, gate_sl,
    K: tl.constexpr, V: tl.constexpr, MAP: tl.constexpr, NORMALIZE: tl.constexpr,
    LOG_DECAY: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_KEY_SUM: tl.constexpr, UNIT: tl.constexpr,
    REVERSE: tl.constexpr, ROW: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Write ``out (B, H, L, V)``, ``denominator (B, H, L)`` and the final states."""
    blocks: tl.constexpr = tl.cdiv(V, BLOCK_V)
    pid = tl.program_id(0)
    i_b, i_h, i_state, i_parts, first, i_part, last, shift, low, high = place(
        cu_seqlens, pid // blocks, sequences, heads, L, part, n_parts, REVERSE, PACKED
    )
    start = tl.maximum(low, (i_part - shift) * part)
    end = tl.minimum(high, (i_part - shift + 1) * part)
    o_c, o_s = tl.arange(0, CHUNK), tl.arange(0, SLICE)
    o_v = (pid % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    p_q, q_st = base(q, i_b, i_h, q_sb, q_sh, q_sl, L, K, REVERSE, ROW, UNIT)
    p_k, k_st = base(k, i_b, i_h, k_sb, k_sh, k_sl, L, K, REVERSE, ROW, UNIT)
    p_v, v_st = base(v, i_b, i_h, v_sb, v_sh, v_sl, L, V, REVERSE, ROW, UNIT)
    p_gate, gate_st = base(gate, i_b, i_h, gate_sb, gate_sh, gate_sl, L, 1, REVERSE, 0, 1)
    i_row = (i_b * heads + i_h) * L + ((L - 1) if REVERSE else 0)
    p_out, p_den = out + i_row * V, denominator + i_row
    row_st = -1 if REVERSE else 1
    log = 0.0
    if not GATED:
        log = log_of_head(p_gate, LOG_DECAY)
        b_entry = constant_entry(log, CHUNK) * query_scale

    if start < end:
        b_s, b_z = (), ()
        for i in tl.static_range(SLICES):
            b_si = tl.zeros((BLOCK_V, SLICE), tl.float32)
            b_zi = tl.zeros((SLICE,), tl.float32)
            o_k = i * SLICE + o_s
            if HAS_STATE:
                b_si = state_tile(initial_state + i_state * (K * V), o_v, o_k, 1, V, V, K)
            if HAS_KEY_SUM:
                p_sum = initial_key_sum + i_state * K + o_k
                b_zi += tl.load(p_sum, mask=o_k < K, other=0.0).to(tl.float32)
            if SPLIT:
                for j in range(first, i_part):
                    total = part_total(totals, log, i_parts, j, part, shift, low, high, GATED)
                    p_states = states + (i_parts + j) * (K * V)
                    b_si = b_si * total + state_tile(p_states, o_v, o_k, 1, V, V, K)
                    if NORMALIZE:
                        p_sum = key_sums + (i_parts + j) * K + o_k
                        b_zi = b_zi * total + tl.load(p_sum, mask=o_k < K, other=0.0)
            b_s, b_z = b_s + (b_si,), b_z + (b_zi,)

        for j in tl.range(0, tl.cdiv(end - start, CHUNK), num_stages=STAGES):
            chunk = start + j * CHUNK
            t = chunk + o_c
            m_t = t < end
            b_v = rows(p_v, chunk, m_t, v_st, o_v, V)
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
            b_w = (b_v.to(tl.float32) * b_exit[:, None]).to(DOT)

            b_a = tl.zeros((CHUNK, CHUNK), tl.float32)
            b_o = tl.zeros((CHUNK, BLOCK_V), tl.float32)
            if NORMALIZE:
                b_d = tl.zeros((CHUNK, COLUMNS), tl.float32)
            next_s, next_z = (), ()
            for i in tl.static_range(SLICES):
                o_k = i * SLICE + o_s
                b_q = mapped(p_q, chunk, m_t, q_st, o_k, K, MAP, DOT)
                b_k32 = mapped(p_k, chunk, m_t, k_st, o_k, K, MAP, tl.float32)
                b_k = b_k32.to(DOT)
                if NORMALIZE:
                    b_zs = (tl.zeros((COLUMNS, SLICE), tl.float32) + b_z[i][None, :]).to(DOT)
                    b_d = tl.dot(b_q, tl.trans(b_zs), b_d, input_precision=PRECISION)
                    b_sum = tl.sum(b_k32 * b_exit[:, None], 0)
                    next_z = next_z + (b_z[i] * total + b_sum,)
                b_a = tl.dot(b_q, tl.trans(b_k), b_a, input_precision=PRECISION)
                b_o = tl.dot(b_q, tl.trans(b_s[i].to(DOT)), b_o, input_precision=PRECISION)
                next_s = next_s + (
                    tl.dot(tl.trans(b_w), b_k, b_s[i] * total, input_precision=PRECISION),
                )
            b_s = next_s
            if not GATED:
                b_pairs = constant_triangle(log, count, query_scale * key_scale, CHUNK, False)
            b_a = rounded(b_a * b_pairs, DOT)
            b_o = tl.dot(
                b_a.to(DOT), b_v.to(DOT), b_o * b_entry[:, None], input_precision=PRECISION
            )
            if NORMALIZE:
                b_z = next_z
                b_den = tl.sum(b_d, 1) * (b_entry * (1.0 / COLUMNS)) + tl.sum(b_a, 1)
                b_inverse = 1.0 / tl.maximum(b_den, eps, propagate_nan=tl.PropagateNan.ALL)
                b_o = b_o * b_inverse[:, None]
                if pid % blocks == 0:
                    tl.store(p_den + t * row_st, b_den, mask=m_t)
            store_rows(p_out, b_o, chunk, m_t, row_st * V, o_v, V)

        if i_part == last:
            for i in tl.static_range(SLICES):
                o_k = i * SLICE + o_s
                store_state(final_state + i_state * (K * V), b_s[i], o_v, o_k, 1, V, V, K)
                if NORMALIZE and pid % blocks == 0:
                    tl.store(final_key_sum + i_state * K + o_k, b_z[i], mask=o_k < K)
