"""The Triton kernels.

A program owns BLOCK_D channels of one sequence, or of one of SPLITS parts of it, and walks along it
tile by tile. A tile is LANES runs of RUN tokens, all held in registers: each run is composed into
one step, an associative scan over the LANES steps gives every run its first state, and from there
the recurrence itself is run, so that its rounding is that of the plain loop.

A step is ``state -> clamp(scale * state + shift, low, high)``, the bounds only where CLIP is set.

The backward walks from the last token to the first, and so do its lanes.

Where a sequence is split, a first kernel composes each part into one step, and each program of
the second one composes the steps of the parts before its own.

This module holds what `forward_kernels` and `backward_kernels` share.

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

SCALARS = ["clip", "B", "L", "part", "splits", "D_units",
           "f_sb", "f_sl", "x_sb", "x_sl"]  # fmt: skip


@triton.jit
def compose(scale_l, shift_l, scale_r, shift_r):
    """The step ``l`` followed by the step ``r``."""
    return scale_r * scale_l, scale_r * shift_l + shift_r


@triton.jit
def compose_bounds(low_l, high_l, scale_r, shift_r, low_r, high_r):
    one = scale_r * low_l + shift_r
    other = scale_r * high_l + shift_r
    low = tl.clamp(tl.minimum(one, other), low_r, high_r)
    high = tl.clamp(tl.maximum(one, other), low_r, high_r)
    return low, high


@triton.jit
def scan_steps(scale_l, shift_l, enter_scale_l, enter_shift_l,
                scale_r, shift_r, enter_scale_r, enter_shift_r):  # fmt: skip
    """Combine for an associative scan that carries all steps up to here, and all before."""
    scale, shift = compose(scale_l, shift_l, scale_r, shift_r)
    enter_scale, enter_shift = compose(scale_l, shift_l, enter_scale_r, enter_shift_r)
    return scale, shift, enter_scale, enter_shift


@triton.jit
def scan_clipped_steps(
    scale_l, shift_l, low_l, high_l, enter_scale_l, enter_shift_l, enter_low_l, enter_high_l,
    scale_r, shift_r, low_r, high_r, enter_scale_r, enter_shift_r, enter_low_r, enter_high_r,
):  # fmt: skip
    scale, shift = compose(scale_l, shift_l, scale_r, shift_r)
    low, high = compose_bounds(low_l, high_l, scale_r, shift_r, low_r, high_r)
    enter_scale, enter_shift = compose(scale_l, shift_l, enter_scale_r, enter_shift_r)
    enter_low, enter_high = compose_bounds(
        low_l, high_l, enter_scale_r, enter_shift_r, enter_low_r, enter_high_r
    )
    return scale, shift, low, high, enter_scale, enter_shift, enter_low, enter_high


@triton.jit
def program(D, B, SPLITS, BLOCK_D: tl.constexpr, BACKWARDS: tl.constexpr):
    """This program's batch row, part and channels; later parts come last, or first."""
    pid = tl.program_id(0)
    if BACKWARDS:
        pid = tl.num_programs(0) - 1 - pid
    blocks = tl.cdiv(D, BLOCK_D)
    o_d = (pid % blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = pid // blocks
    return (row % B).to(tl.int64), row // B, o_d


@triton.jit
def segment(segment_ids, row, valid, L, REVERSE: tl.constexpr):
    """The packed sequence of each token, and whether it is the sequence's first or last."""
    ids = tl.load(segment_ids + row, mask=valid, other=-1)
    above = tl.load(segment_ids + row - 1, mask=valid & (row > 0), other=-2)
    below = tl.load(segment_ids + row + 1, mask=valid & (row < L - 1), other=-2)
    inside = ids >= 0
    first = inside & (ids != (below if REVERSE else above))
    last = inside & (ids != (above if REVERSE else below))
    return ids, first, last


@triton.jit
def gate(x, LOG_DECAY: tl.constexpr):
    x = x.to(tl.float32)
    if LOG_DECAY:
        x = tl.exp2(x * LOG2_E)
    return x


@triton.jit
def last_lane(x, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    return tl.sum(tl.where((lane == LANES - 1)[:, None], x, 0.0), axis=0)


@triton.jit
def all_zero(x, mask):
    return tl.max(tl.where(mask & (x != 0.0), 1, 0), axis=0) == 0


@triton.jit(do_not_specialize=["n_segments", "L"])
def segment_ids_kernel(cu_seqlens, segment_ids, n_segments, L, BLOCK: tl.constexpr):
    """The packed sequence of each token, -1 past the last one."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = find_segment(cu_seqlens, n_segments, position)
    tl.store(segment_ids + position, ids, mask=position < L)
