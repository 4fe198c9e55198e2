"""The forward kernels; `kernels` tells how they walk."""

import triton
import triton.language as tl

from neuralops.ssm.hgrn2.kernels import (
    SCALARS,
    UNBOUNDED,
    all_zero,
    compose,
    compose_bounds,
    gate,
    last_lane,
    program,
    scan_clipped_steps,
    scan_steps,
    segment,
)


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
    b_f = gate(tl.load(p_f + o_f, mask=mask, other=0.0 if LOG_DECAY else 1.0), LOG_DECAY)
    b_iv = tl.load(p_iv + o_iv, mask=mask, other=0.0).to(tl.float32)
    if PACKED:
        ids, first, _ = segment(segment_ids, row, valid, L, REVERSE)
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
def _clip(x, clip):
    return tl.clamp(x, -clip, clip, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=SCALARS)
def forward_parts_kernel(
    f, iv, initial_state, segment_ids, steps,
    clip, B, L, part, splits, D_units, f_sb, f_sl, f_sd, x_sb, x_sl, x_sd,
    LOG_DECAY: tl.constexpr, REVERSE: tl.constexpr, CLIP: tl.constexpr, PACKED: tl.constexpr,
    HAS_INITIAL: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_D: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compose each part but the last into one step: ``steps (2 or 4, B, splits, D)``.

    It walks from the part's last tile to its first and stops where the gates since have multiplied
    to 0 in every channel: what came before no longer reaches the part's end.
    """
    D = D_units * UNIT
    i_b, i_part, o_d = program(D, B, splits, BLOCK_D, False)
    m_d = o_d < D
    p_f = f + i_b * (f_sb.to(tl.int64) * UNIT)
    p_iv = iv + i_b * (x_sb.to(tl.int64) * UNIT)
    o_lane = tl.arange(0, LANES) * RUN
    start = i_part * part
    end = tl.minimum(L, start + part)
    b_scale = tl.full((BLOCK_D,), 1.0, tl.float32)
    b_shift = tl.zeros((BLOCK_D,), tl.float32)
    b_low = tl.full((BLOCK_D,), -UNBOUNDED, tl.float32)
    b_high = tl.full((BLOCK_D,), UNBOUNDED, tl.float32)
    tile = start + part - LANES * RUN
    while tile >= start:
        fs, ivs = (), ()
        for u in tl.static_range(RUN):
            b_f, b_iv = _forward_row(
                p_f, p_iv, initial_state, segment_ids, tile + o_lane + u, end, o_d, m_d,
                L, D, f_sl, f_sd, x_sl, x_sd,
                UNIT, LOG_DECAY, REVERSE, PACKED, HAS_INITIAL,
            )  # fmt: skip
            fs, ivs = fs + (b_f,), ivs + (b_iv,)
        t_scale, t_shift = fs[0], ivs[0]
        if CLIP:
            t_low, t_high = tl.zeros_like(t_shift) - clip, tl.zeros_like(t_shift) + clip
        for u in tl.static_range(1, RUN):
            if CLIP:
                t_low, t_high = compose_bounds(t_low, t_high, fs[u], ivs[u], -clip, clip)
            t_scale, t_shift = compose(t_scale, t_shift, fs[u], ivs[u])
        one, zero = tl.zeros_like(t_scale) + 1.0, tl.zeros_like(t_shift)
        if CLIP:
            unbounded = tl.zeros_like(t_low) + UNBOUNDED
            t_scale, t_shift, t_low, t_high, _, _, _, _ = tl.associative_scan(
                (t_scale, t_shift, t_low, t_high, one, zero, -unbounded, unbounded),
                0, scan_clipped_steps,
            )  # fmt: skip
            b_low, b_high = compose_bounds(
                last_lane(t_low, LANES), last_lane(t_high, LANES), b_scale, b_shift, b_low, b_high
            )
        else:
            t_scale, t_shift, _, _ = tl.associative_scan(
                (t_scale, t_shift, one, zero), 0, scan_steps
            )
        b_scale, b_shift = compose(
            last_lane(t_scale, LANES), last_lane(t_shift, LANES), b_scale, b_shift
        )
        tile = tl.where(all_zero(b_scale, m_d), -1, tile - LANES * RUN)
    p_steps = steps + (i_b * splits + i_part) * D + o_d
    o_next = B.to(tl.int64) * splits * D
    tl.store(p_steps, b_scale, mask=m_d)
    tl.store(p_steps + o_next, b_shift, mask=m_d)
    if CLIP:
        tl.store(p_steps + 2 * o_next, b_low, mask=m_d)
        tl.store(p_steps + 3 * o_next, b_high, mask=m_d)


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
    i_b, i_part, o_d = program(D, B, splits, BLOCK_D, SPLIT)
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
                b_low, b_high = compose_bounds(b_low, b_high, fs[u], ivs[u], -clip, clip)
            b_scale, b_shift = compose(b_scale, b_shift, fs[u], ivs[u])
        one, zero = tl.zeros_like(b_scale) + 1.0, tl.zeros_like(b_shift)
        if CLIP:
            unbounded = tl.zeros_like(b_low) + UNBOUNDED
            _, _, _, _, b_scale, b_shift, b_low, b_high = tl.associative_scan(
                (b_scale, b_shift, b_low, b_high, one, zero, -unbounded, unbounded),
                0, scan_clipped_steps,
            )  # fmt: skip
            b_h = tl.clamp(
                b_scale * b_state[None, :] + b_shift, b_low, b_high,
                propagate_nan=tl.PropagateNan.ALL,
            )  # fmt: skip
        else:
            _, _, b_scale, b_shift = tl.associative_scan(
                (b_scale, b_shift, one, zero), 0, scan_steps
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
                ids, _, last = segment(segment_ids, row, valid, L, REVERSE)
                o_state = ids.to(tl.int64)[:, None] * D + o_d[None, :]
                tl.store(final_state + o_state, b_h, mask=last[:, None] & m_d[None, :])
        b_state = last_lane(b_h, LANES)
    if not PACKED and i_part == splits - 1:
        tl.store(final_state + i_b * D + o_d, b_state, mask=m_d)
