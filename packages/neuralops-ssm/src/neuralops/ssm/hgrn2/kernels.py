"""The Triton kernels.

A program owns BLOCK_D channels of one sequence, or of one of SPLITS parts of it, and walks along it
tile by tile. A tile is LANES runs of RUN tokens, all held in registers: each run is composed into
one step, an associative scan over the LANES steps gives every run its first state, and from there
the recurrence itself is run, so that its rounding is that of the plain loop.

A step is ``state -> clamp(scale * state + shift, low, high)``, the bounds only where CLIP is set.

The backward walks from the last token to the first, and so do its lanes.

Where a sequence is split, a first kernel composes each part into one step, and each program of
the second one composes the steps of the parts before its own.

Tokens are counted in scan order: token t lies in row t, or in row L - 1 - t where REVERSE is set.
Strides come divided by UNIT, so that the compiler knows what divides them without a compilation
for every length. ``b_`` is a block of values, ``p_`` a pointer, ``o_`` an offset, ``m_`` a mask;
blocks are (LANES, BLOCK_D) unless a comment says otherwise.
"""

import triton
import triton.language as tl

from neuralops.core.device import find_segment

LOG2_E = tl.constexpr(1.4426950408889634)
UNBOUNDED = tl.constexpr(3.0e38)


@triton.jit
def _compose(scale_l, shift_l, scale_r, shift_r):
    """The step ``l`` followed by the step ``r``."""
    return scale_r * scale_l, scale_r * shift_l + shift_r


@triton.jit
def _compose_bounds(low_l, high_l, scale_r, shift_r, low_r, high_r):
    one = scale_r * low_l + shift_r
    other = scale_r * high_l + shift_r
    low = tl.clamp(tl.minimum(one, other), low_r, high_r)
    high = tl.clamp(tl.maximum(one, other), low_r, high_r)
    return low, high


@triton.jit
def _scan_steps(scale_l, shift_l, enter_scale_l, enter_shift_l,
                scale_r, shift_r, enter_scale_r, enter_shift_r):  # fmt: skip
    """Combine for an associative scan that carries all steps up to here, and all before."""
    scale, shift = _compose(scale_l, shift_l, scale_r, shift_r)
    enter_scale, enter_shift = _compose(scale_l, shift_l, enter_scale_r, enter_shift_r)
    return scale, shift, enter_scale, enter_shift


@triton.jit
def _scan_clipped_steps(
    scale_l, shift_l, low_l, high_l, enter_scale_l, enter_shift_l, enter_low_l, enter_high_l,
    scale_r, shift_r, low_r, high_r, enter_scale_r, enter_shift_r, enter_low_r, enter_high_r,
):  # fmt: skip
    scale, shift = _compose(scale_l, shift_l, scale_r, shift_r)
    low, high = _compose_bounds(low_l, high_l, scale_r, shift_r, low_r, high_r)
    enter_scale, enter_shift = _compose(scale_l, shift_l, enter_scale_r, enter_shift_r)
    enter_low, enter_high = _compose_bounds(
        low_l, high_l, enter_scale_r, enter_shift_r, enter_low_r, enter_high_r
    )
    return scale, shift, low, high, enter_scale, enter_shift, enter_low, enter_high


@triton.jit
def _clip(x, clip):
    return tl.clamp(x, -clip, clip, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _program(D, B, SPLITS, BLOCK_D: tl.constexpr, BACKWARDS: tl.constexpr):
    """This program's batch row, part and channels; later parts come last, or first."""
    pid = tl.program_id(0)
    if BACKWARDS:
        pid = tl.num_programs(0) - 1 - pid
    blocks = tl.cdiv(D, BLOCK_D)
    o_d = (pid % blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = pid // blocks
    return (row % B).to(tl.int64), row // B, o_d


@triton.jit
def _segment(segment_ids, row, valid, L, REVERSE: tl.constexpr):
    """The packed sequence of each token, and whether it is the sequence's first or last."""
    ids = tl.load(segment_ids + row, mask=valid, other=-1)
    above = tl.load(segment_ids + row - 1, mask=valid & (row > 0), other=-2)
    below = tl.load(segment_ids + row + 1, mask=valid & (row < L - 1), other=-2)
    inside = ids >= 0
    first = inside & (ids != (below if REVERSE else above))
    last = inside & (ids != (above if REVERSE else below))
    return ids, first, last


@triton.jit
def _gate(x, LOG_DECAY: tl.constexpr):
    x = x.to(tl.float32)
    if LOG_DECAY:
        x = tl.exp2(x * LOG2_E)
    return x


@triton.jit
def _forward_row(
    p_f, p_iv, initial_state, segment_ids, t, end, o_d, m_d, L, D, f_sl, f_sd, iv_sl, iv_sd,
    UNIT: tl.constexpr, LOG_DECAY: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
):  # fmt: skip
    """Gate and input of the tokens ``t (LANES,)``; past ``end`` the step that changes nothing.

    A packed sequence's first token has its first state added to its input, and the gate 0.
    """
    valid = t < end
    row = ((L - 1 - t) if REVERSE else t).to(tl.int64)
    mask = valid[:, None] & m_d[None, :]
    o_f = row[:, None] * (f_sl.to(tl.int64) * UNIT) + o_d[None, :] * f_sd
    o_iv = row[:, None] * (iv_sl.to(tl.int64) * UNIT) + o_d[None, :] * iv_sd
    b_f = _gate(tl.load(p_f + o_f, mask=mask, other=0.0 if LOG_DECAY else 1.0), LOG_DECAY)
    b_iv = tl.load(p_iv + o_iv, mask=mask, other=0.0).to(tl.float32)
    if PACKED:
        ids, first, _ = _segment(segment_ids, row, valid, L, REVERSE)
        if HAS_INITIAL:
            o_state = ids.to(tl.int64)[:, None] * D + o_d[None, :]
            m_state = first[:, None] & m_d[None, :]
            b_state = tl.load(initial_state + o_state, mask=m_state, other=0.0).to(tl.float32)
            b_iv += b_f * b_state
        outside = valid & (ids < 0)
        b_f = tl.where((first | outside)[:, None], 0.0, b_f)
        b_iv = tl.where(outside[:, None], 0.0, b_iv)
    return b_f, b_iv


@triton.jit
def _last_lane(x, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    return tl.sum(tl.where((lane == LANES - 1)[:, None], x, 0.0), axis=0)


@triton.jit(do_not_specialize=["n_segments", "L"])
def segment_ids_kernel(cu_seqlens, segment_ids, n_segments, L, BLOCK: tl.constexpr):
    """The packed sequence of each token, -1 past the last one."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = find_segment(cu_seqlens, n_segments, position)
    tl.store(segment_ids + position, ids, mask=position < L)


SCALARS = ["clip", "B", "L", "part", "splits", "D_units",
           "f_sb", "f_sl", "x_sb", "x_sl"]  # fmt: skip


@triton.jit(do_not_specialize=SCALARS)
def forward_parts_kernel(
    f, iv, initial_state, segment_ids, steps,
    clip, B, L, part, splits, D_units, f_sb, f_sl, f_sd, x_sb, x_sl, x_sd,
    LOG_DECAY: tl.constexpr, REVERSE: tl.constexpr, CLIP: tl.constexpr, PACKED: tl.constexpr,
    HAS_INITIAL: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_D: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compose each part but the last into one step: ``steps (2 or 4, B, splits, D)``.

    Here a lane walks along its own LANES-th of the part, so that lanes meet only once.
    """
    D = D_units * UNIT
    i_b, i_part, o_d = _program(D, B, splits, BLOCK_D, False)
    m_d = o_d < D
    p_f = f + i_b * (f_sb.to(tl.int64) * UNIT)
    p_iv = iv + i_b * (x_sb.to(tl.int64) * UNIT)
    lane_length = part // LANES
    lane_start = i_part * part + tl.arange(0, LANES) * lane_length
    end = tl.minimum(L, (i_part + 1) * part)
    b_scale = tl.full((LANES, BLOCK_D), 1.0, tl.float32)
    b_shift = tl.zeros((LANES, BLOCK_D), tl.float32)
    b_low = tl.full((LANES, BLOCK_D), -UNBOUNDED, tl.float32)
    b_high = tl.full((LANES, BLOCK_D), UNBOUNDED, tl.float32)
    for i in tl.range(0, lane_length, RUN, num_stages=STAGES):
        fs, ivs = (), ()
        for u in tl.static_range(RUN):
            b_f, b_iv = _forward_row(
                p_f, p_iv, initial_state, segment_ids, lane_start + i + u, end, o_d, m_d,
                L, D, f_sl, f_sd, x_sl, x_sd,
                UNIT, LOG_DECAY, REVERSE, PACKED, HAS_INITIAL,
            )  # fmt: skip
            fs, ivs = fs + (b_f,), ivs + (b_iv,)
        for u in tl.static_range(RUN):
            if CLIP:
                b_low, b_high = _compose_bounds(b_low, b_high, fs[u], ivs[u], -clip, clip)
            b_scale, b_shift = _compose(b_scale, b_shift, fs[u], ivs[u])
    one, zero = tl.zeros_like(b_scale) + 1.0, tl.zeros_like(b_shift)
    p_steps = steps + (i_b * splits + i_part) * D + o_d
    o_next = B.to(tl.int64) * splits * D
    if CLIP:
        unbounded = tl.zeros_like(b_low) + UNBOUNDED
        b_scale, b_shift, b_low, b_high, _, _, _, _ = tl.associative_scan(
            (b_scale, b_shift, b_low, b_high, one, zero, -unbounded, unbounded),
            0, _scan_clipped_steps,
        )  # fmt: skip
        tl.store(p_steps + 2 * o_next, _last_lane(b_low, LANES), mask=m_d)
        tl.store(p_steps + 3 * o_next, _last_lane(b_high, LANES), mask=m_d)
    else:
        b_scale, b_shift, _, _ = tl.associative_scan((b_scale, b_shift, one, zero), 0, _scan_steps)
    tl.store(p_steps, _last_lane(b_scale, LANES), mask=m_d)
    tl.store(p_steps + o_next, _last_lane(b_shift, LANES), mask=m_d)


@triton.jit(do_not_specialize=SCALARS)
def forward_kernel(
    f, iv, initial_state, segment_ids, steps, h, final_state, clipped,
    clip, B, L, part, splits, D_units, f_sb, f_sl, f_sd, x_sb, x_sl, x_sd,
    LOG_DECAY: tl.constexpr, REVERSE: tl.constexpr, CLIP: tl.constexpr, PACKED: tl.constexpr,
    HAS_INITIAL: tl.constexpr, SPLIT: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_D: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write ``h (B, L, D)``, the final state, and the bits ``clipped (B, cdiv(L, 8), D)``."""
    D = D_units * UNIT
    i_b, i_part, o_d = _program(D, B, splits, BLOCK_D, SPLIT)
    m_d = o_d < D
    p_f = f + i_b * (f_sb.to(tl.int64) * UNIT)
    p_iv = iv + i_b * (x_sb.to(tl.int64) * UNIT)
    p_h = h + i_b * L * D
    o_lane = tl.arange(0, LANES) * RUN

    b_state = tl.zeros((BLOCK_D,), tl.float32)
    if HAS_INITIAL and not PACKED:
        b_state = tl.load(initial_state + i_b * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    if SPLIT:
        o_next = B.to(tl.int64) * splits * D
        for i in range(i_part):
            p_steps = steps + (i_b * splits + i) * D + o_d
            b_scale = tl.load(p_steps, mask=m_d, other=0.0)
            b_shift = tl.load(p_steps + o_next, mask=m_d, other=0.0)
            b_state = b_scale * b_state + b_shift
            if CLIP:
                b_low = tl.load(p_steps + 2 * o_next, mask=m_d, other=0.0)
                b_high = tl.load(p_steps + 3 * o_next, mask=m_d, other=0.0)
                b_state = tl.clamp(b_state, b_low, b_high, propagate_nan=tl.PropagateNan.ALL)

    start = i_part * part
    end = tl.minimum(L, start + part)
    for tile in tl.range(start, end, LANES * RUN, num_stages=STAGES):
        t = tile + o_lane
        fs, ivs = (), ()
        for u in tl.static_range(RUN):
            b_f, b_iv = _forward_row(
                p_f, p_iv, initial_state, segment_ids, t + u, end, o_d, m_d,
                L, D, f_sl, f_sd, x_sl, x_sd,
                UNIT, LOG_DECAY, REVERSE, PACKED, HAS_INITIAL,
            )  # fmt: skip
            fs, ivs = fs + (b_f,), ivs + (b_iv,)

        b_scale, b_shift = fs[0], ivs[0]
        if CLIP:
            b_low, b_high = tl.zeros_like(b_shift) - clip, tl.zeros_like(b_shift) + clip
        for u in tl.static_range(1, RUN):
            if CLIP:
                b_low, b_high = _compose_bounds(b_low, b_high, fs[u], ivs[u], -clip, clip)
            b_scale, b_shift = _compose(b_scale, b_shift, fs[u], ivs[u])
        one, zero = tl.zeros_like(b_scale) + 1.0, tl.zeros_like(b_shift)
        if CLIP:
            unbounded = tl.zeros_like(b_low) + UNBOUNDED
            _, _, _, _, b_scale, b_shift, b_low, b_high = tl.associative_scan(
                (b_scale, b_shift, b_low, b_high, one, zero, -unbounded, unbounded),
                0, _scan_clipped_steps,
            )  # fmt: skip
            b_h = tl.clamp(
                b_scale * b_state[None, :] + b_shift, b_low, b_high,
                propagate_nan=tl.PropagateNan.ALL,
            )  # fmt: skip
        else:
            _, _, b_scale, b_shift = tl.associative_scan(
                (b_scale, b_shift, one, zero), 0, _scan_steps
            )
            b_h = b_scale * b_state[None, :] + b_shift

        b_bits = tl.zeros((LANES, BLOCK_D), tl.int32)
        for u in tl.static_range(RUN):
            b_h = fs[u] * b_h + ivs[u]
            valid = t + u < end
            mask = valid[:, None] & m_d[None, :]
            if CLIP:
                b_h = _clip(b_h, clip)
                b_bits = b_bits | ((tl.abs(b_h) < clip).to(tl.int32) ^ 1) << (u % 8)
                if u % 8 == 7:
                    o_bits = (i_b * ((L + 7) // 8) + (t + u) // 8)[:, None] * D + o_d[None, :]
                    m_bits = (t + (u - 7) < end)[:, None] & m_d[None, :]
                    tl.store(clipped + o_bits, b_bits.to(tl.uint8), mask=m_bits)
                    b_bits = tl.zeros((LANES, BLOCK_D), tl.int32)
            row = ((L - 1 - (t + u)) if REVERSE else (t + u)).to(tl.int64)
            tl.store(p_h + row[:, None] * D + o_d[None, :], b_h.to(h.dtype.element_ty), mask=mask)
            if PACKED:
                ids, _, last = _segment(segment_ids, row, valid, L, REVERSE)
                o_state = ids.to(tl.int64)[:, None] * D + o_d[None, :]
                tl.store(final_state + o_state, b_h, mask=last[:, None] & m_d[None, :])
        b_state = _last_lane(b_h, LANES)
    if not PACKED and i_part == splits - 1:
        tl.store(final_state + i_b * D + o_d, b_state, mask=m_d)


@triton.jit
def _backward_row(
    p_f, p_g, grad_final, segment_ids, t, end, o_d, m_d, L, D, f_sl, f_sd, g_sl, g_sd,
    UNIT: tl.constexpr, LOG_DECAY: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
    HAS_GRAD_FINAL: tl.constexpr,
):  # fmt: skip
    """Gate and output gradient of the tokens ``t (LANES,)``.

    Past ``end`` the step that changes nothing. What a packed sequence's last token gets from
    the gradient of its final state is in the output gradient.
    """
    valid = t < end
    row = ((L - 1 - t) if REVERSE else t).to(tl.int64)
    mask = valid[:, None] & m_d[None, :]
    o_f = row[:, None] * (f_sl.to(tl.int64) * UNIT) + o_d[None, :] * f_sd
    o_g = row[:, None] * (g_sl.to(tl.int64) * UNIT) + o_d[None, :] * g_sd
    b_f = _gate(tl.load(p_f + o_f, mask=mask, other=0.0 if LOG_DECAY else 1.0), LOG_DECAY)
    b_g = tl.load(p_g + o_g, mask=mask, other=0.0).to(tl.float32)
    if PACKED:
        ids, _, last = _segment(segment_ids, row, valid, L, REVERSE)
        if HAS_GRAD_FINAL:
            o_state = ids.to(tl.int64)[:, None] * D + o_d[None, :]
            m_state = last[:, None] & m_d[None, :]
            b_g += tl.load(grad_final + o_state, mask=m_state, other=0.0).to(tl.float32)
        outside = valid & (ids < 0)
        b_f = tl.where(outside[:, None], 0.0, b_f)
        b_g = tl.where(outside[:, None], 0.0, b_g)
    return b_f, b_g


@triton.jit
def _clipped_run(p_clipped, t, end, o_d, m_d, D, RUN: tl.constexpr):
    """For a run of tokens from ``t (LANES,)``: bit u is set where token t + u is clipped."""
    b_bits = tl.zeros((t.shape[0], o_d.shape[0]), tl.int32)
    for u in tl.static_range(0, RUN, 8):
        o_bits = ((t + u) // 8).to(tl.int64)[:, None] * D + o_d[None, :]
        mask = (t + u < end)[:, None] & m_d[None, :]
        b_bits |= tl.load(p_clipped + o_bits, mask=mask, other=0).to(tl.int32) << u
    return b_bits


@triton.jit
def _inside(b_bits, u: tl.constexpr):
    return 1.0 - ((b_bits >> u) & 1).to(tl.float32)


@triton.jit
def _is_first(segment_ids, t, end, L, REVERSE: tl.constexpr):
    row = ((L - 1 - t) if REVERSE else t).to(tl.int64)
    _, first, _ = _segment(segment_ids, row, t < end, L, REVERSE)
    return first[:, None]


@triton.jit(do_not_specialize=SCALARS)
def backward_parts_kernel(
    f, g, clipped, grad_final, segment_ids, steps,
    B, L, part, splits, D_units, f_sb, f_sl, f_sd, x_sb, x_sl, x_sd,
    LOG_DECAY: tl.constexpr, REVERSE: tl.constexpr, CLIP: tl.constexpr, PACKED: tl.constexpr,
    HAS_GRAD_FINAL: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_D: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compose each part but the first, from its last token to its first, into one step.

    What a step maps is ``f_{t+1} y_{t+1}``, with ``y_t`` the gradient of ``iv_t``.
    """
    D = D_units * UNIT
    i_b, i_part, o_d = _program(D, B, splits, BLOCK_D, False)
    i_part += 1
    m_d = o_d < D
    p_f = f + i_b * (f_sb.to(tl.int64) * UNIT)
    p_g = g + i_b * (x_sb.to(tl.int64) * UNIT)
    p_clipped = clipped + i_b * ((L + 7) // 8) * D
    lane_length = part // LANES
    lane_start = i_part * part + (LANES - 1 - tl.arange(0, LANES)) * lane_length
    end = tl.minimum(L, (i_part + 1) * part)
    b_scale = tl.full((LANES, BLOCK_D), 1.0, tl.float32)
    b_shift = tl.zeros((LANES, BLOCK_D), tl.float32)
    for i in tl.range(0, lane_length, RUN, num_stages=STAGES):
        t = lane_start + (lane_length - RUN - i)
        if CLIP:
            b_bits = _clipped_run(p_clipped, t, end, o_d, m_d, D, RUN)
        fs, gs = (), ()
        for u in tl.static_range(RUN):
            b_f, b_g = _backward_row(
                p_f, p_g, grad_final, segment_ids, t + u, end, o_d, m_d,
                L, D, f_sl, f_sd, x_sl, x_sd,
                UNIT, LOG_DECAY, REVERSE, PACKED, HAS_GRAD_FINAL,
            )  # fmt: skip
            if PACKED:
                b_f = tl.where(_is_first(segment_ids, t + u, end, L, REVERSE), 0.0, b_f)
            fs, gs = fs + (b_f,), gs + (b_g,)
        for u in tl.static_range(RUN - 1, -1, -1):
            b_shift = b_shift + gs[u]
            if CLIP:
                b_shift, b_scale = b_shift * _inside(b_bits, u), b_scale * _inside(b_bits, u)
            b_shift, b_scale = fs[u] * b_shift, fs[u] * b_scale
    one, zero = tl.zeros_like(b_scale) + 1.0, tl.zeros_like(b_shift)
    b_scale, b_shift, _, _ = tl.associative_scan((b_scale, b_shift, one, zero), 0, _scan_steps)
    p_steps = steps + (i_b * splits + i_part) * D + o_d
    tl.store(p_steps, _last_lane(b_scale, LANES), mask=m_d)
    tl.store(p_steps + B.to(tl.int64) * splits * D, _last_lane(b_shift, LANES), mask=m_d)


@triton.jit(do_not_specialize=SCALARS)
def backward_kernel(
    f, g, h, clipped, initial_state, grad_final, segment_ids, steps, grad_f, grad_iv, grad_initial,
    B, L, part, splits, D_units, f_sb, f_sl, f_sd, x_sb, x_sl, x_sd,
    LOG_DECAY: tl.constexpr, REVERSE: tl.constexpr, CLIP: tl.constexpr, PACKED: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_GRAD_FINAL: tl.constexpr, SPLIT: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_D: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of ``f``, ``iv (B, L, D)`` and the initial state."""
    D = D_units * UNIT
    i_b, i_part, o_d = _program(D, B, splits, BLOCK_D, False)
    m_d = o_d < D
    p_f = f + i_b * (f_sb.to(tl.int64) * UNIT)
    p_g = g + i_b * (x_sb.to(tl.int64) * UNIT)
    p_clipped = clipped + i_b * ((L + 7) // 8) * D
    o_b = i_b * L * D
    o_lane = (LANES - 1 - tl.arange(0, LANES)) * RUN

    b_initial = tl.zeros((BLOCK_D,), tl.float32)
    b_entering = tl.zeros((BLOCK_D,), tl.float32)
    if HAS_INITIAL and not PACKED:
        b_initial = tl.load(initial_state + i_b * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    if HAS_GRAD_FINAL and not PACKED:
        b_entering = tl.load(grad_final + i_b * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    if SPLIT:
        for i in range(splits - 1 - i_part):
            p_steps = steps + (i_b * splits + (splits - 1 - i)) * D + o_d
            b_scale = tl.load(p_steps, mask=m_d, other=0.0)
            b_shift = tl.load(p_steps + B.to(tl.int64) * splits * D, mask=m_d, other=0.0)
            b_entering = b_scale * b_entering + b_shift

    start = i_part * part
    end = tl.minimum(L, start + part)
    tiles = tl.cdiv(end - start, LANES * RUN)
    for i_tile in tl.range(0, tiles, num_stages=STAGES):
        t = start + (tiles - 1 - i_tile) * (LANES * RUN) + o_lane
        if CLIP:
            b_bits = _clipped_run(p_clipped, t, end, o_d, m_d, D, RUN)
        fs, gs, hs = (), (), ()
        for u in tl.static_range(RUN):
            b_f, b_g = _backward_row(
                p_f, p_g, grad_final, segment_ids, t + u, end, o_d, m_d,
                L, D, f_sl, f_sd, x_sl, x_sd,
                UNIT, LOG_DECAY, REVERSE, PACKED, HAS_GRAD_FINAL,
            )  # fmt: skip
            before = t + u - 1
            m_h = ((before >= 0) & (t + u < end))[:, None] & m_d[None, :]
            row = ((L - 1 - before) if REVERSE else before).to(tl.int64)
            b_h = tl.load(h + o_b + row[:, None] * D + o_d[None, :], mask=m_h, other=0.0)
            b_h = b_h.to(tl.float32)
            if PACKED:
                here = ((L - 1 - (t + u)) if REVERSE else (t + u)).to(tl.int64)
                ids, first, _ = _segment(segment_ids, here, t + u < end, L, REVERSE)
                b_h = tl.where(first[:, None], 0.0, b_h)
                if HAS_INITIAL:
                    o_state = ids.to(tl.int64)[:, None] * D + o_d[None, :]
                    m_state = first[:, None] & m_d[None, :]
                    b_h += tl.load(initial_state + o_state, mask=m_state, other=0.0).to(tl.float32)
            elif HAS_INITIAL:
                b_h = tl.where((t + u == 0)[:, None], b_initial[None, :], b_h)
            fs, gs, hs = fs + (b_f,), gs + (b_g,), hs + (b_h,)

        b_scale = tl.full((LANES, BLOCK_D), 1.0, tl.float32)
        b_shift = tl.zeros((LANES, BLOCK_D), tl.float32)
        for u in tl.static_range(RUN - 1, -1, -1):
            b_f = fs[u]
            if PACKED:
                b_f = tl.where(_is_first(segment_ids, t + u, end, L, REVERSE), 0.0, b_f)
            b_shift = b_shift + gs[u]
            if CLIP:
                b_shift, b_scale = b_shift * _inside(b_bits, u), b_scale * _inside(b_bits, u)
            b_shift, b_scale = b_f * b_shift, b_f * b_scale
        one, zero = tl.zeros_like(b_scale) + 1.0, tl.zeros_like(b_shift)
        _, _, b_scale, b_shift = tl.associative_scan((b_scale, b_shift, one, zero), 0, _scan_steps)
        b_enter = b_scale * b_entering[None, :] + b_shift

        for u in tl.static_range(RUN - 1, -1, -1):
            b_y = gs[u] + b_enter
            if CLIP:
                b_y = b_y * _inside(b_bits, u)
            b_enter = fs[u] * b_y
            b_grad_f = b_y * hs[u]
            if LOG_DECAY:
                b_grad_f = b_grad_f * fs[u]
            valid = t + u < end
            mask = valid[:, None] & m_d[None, :]
            row = ((L - 1 - (t + u)) if REVERSE else (t + u)).to(tl.int64)
            if PACKED:
                ids, first, _ = _segment(segment_ids, row, valid, L, REVERSE)
                if HAS_INITIAL:
                    o_state = ids.to(tl.int64)[:, None] * D + o_d[None, :]
                    m_state = first[:, None] & m_d[None, :]
                    tl.store(grad_initial + o_state, b_enter, mask=m_state)
                b_enter = tl.where(first[:, None], 0.0, b_enter)
            o_out = o_b + row[:, None] * D + o_d[None, :]
            tl.store(grad_f + o_out, b_grad_f.to(grad_f.dtype.element_ty), mask=mask)
            tl.store(grad_iv + o_out, b_y.to(grad_iv.dtype.element_ty), mask=mask)
        b_entering = _last_lane(b_enter, LANES)
    if HAS_INITIAL and not PACKED and i_part == 0:
        tl.store(grad_initial + i_b * D + o_d, b_entering, mask=m_d)
