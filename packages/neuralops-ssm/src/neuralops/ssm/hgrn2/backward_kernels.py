"""The backward kernels; `kernels` tells how they walk."""

import triton
import triton.language as tl

from neuralops.ssm.hgrn2.kernels import (
    SCALARS,
    all_zero,
    compose,
    gate,
    last_lane,
    program,
    scan_steps,
    segment,
)


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
    b_f = gate(tl.load(p_f + o_f, mask=mask, other=0.0 if LOG_DECAY else 1.0), LOG_DECAY)
    b_g = tl.load(p_g + o_g, mask=mask, other=0.0).to(tl.float32)
    if PACKED:
        ids, _, last = segment(segment_ids, row, valid, L, REVERSE)
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
    _, first, _ = segment(segment_ids, row, t < end, L, REVERSE)
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

    What a step maps is ``f_{t+1} y_{t+1}``, with ``y_t`` the gradient of ``iv_t``. It walks from
    the part's first tile to its last and stops as the forward does.
    """
    D = D_units * UNIT
    i_b, i_part, o_d = program(D, B, splits, BLOCK_D, False)
    i_part += 1
    m_d = o_d < D
    p_f = f + i_b * (f_sb.to(tl.int64) * UNIT)
    p_g = g + i_b * (x_sb.to(tl.int64) * UNIT)
    p_clipped = clipped + i_b * ((L + 7) // 8) * D
    o_lane = (LANES - 1 - tl.arange(0, LANES)) * RUN
    tile = i_part * part
    end = tl.minimum(L, tile + part)
    b_scale = tl.full((BLOCK_D,), 1.0, tl.float32)
    b_shift = tl.zeros((BLOCK_D,), tl.float32)
    while tile < end:
        t = tile + o_lane
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
        t_scale = tl.full((LANES, BLOCK_D), 1.0, tl.float32)
        t_shift = tl.zeros((LANES, BLOCK_D), tl.float32)
        for u in tl.static_range(RUN - 1, -1, -1):
            t_shift = t_shift + gs[u]
            if CLIP:
                t_shift, t_scale = t_shift * _inside(b_bits, u), t_scale * _inside(b_bits, u)
            t_shift, t_scale = fs[u] * t_shift, fs[u] * t_scale
        one, zero = tl.zeros_like(t_scale) + 1.0, tl.zeros_like(t_shift)
        t_scale, t_shift, _, _ = tl.associative_scan((t_scale, t_shift, one, zero), 0, scan_steps)
        b_scale, b_shift = compose(
            last_lane(t_scale, LANES), last_lane(t_shift, LANES), b_scale, b_shift
        )
        tile = tl.where(all_zero(b_scale, m_d), end, tile + LANES * RUN)
    p_steps = steps + (i_b * splits + i_part) * D + o_d
    tl.store(p_steps, b_scale, mask=m_d)
    tl.store(p_steps + B.to(tl.int64) * splits * D, b_shift, mask=m_d)


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
    i_b, i_part, o_d = program(D, B, splits, BLOCK_D, False)
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
                ids, first, _ = segment(segment_ids, here, t + u < end, L, REVERSE)
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
        _, _, b_scale, b_shift = tl.associative_scan((b_scale, b_shift, one, zero), 0, scan_steps)
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
                ids, first, _ = segment(segment_ids, row, valid, L, REVERSE)
                if HAS_INITIAL:
                    o_state = ids.to(tl.int64)[:, None] * D + o_d[None, :]
                    m_state = first[:, None] & m_d[None, :]
                    tl.store(grad_initial + o_state, b_enter, mask=m_state)
                b_enter = tl.where(first[:, None], 0.0, b_enter)
            o_out = o_b + row[:, None] * D + o_d[None, :]
            tl.store(grad_f + o_out, b_grad_f.to(grad_f.dtype.element_ty), mask=mask)
            tl.store(grad_iv + o_out, b_y.to(grad_iv.dtype.element_ty), mask=mask)
        b_entering = last_lane(b_enter, LANES)
    if HAS_INITIAL and not PACKED and i_part == 0:
        tl.store(grad_initial + i_b * D + o_d, b_entering, mask=m_d)
