"""What the Triton kernels of both directions share.

A chunk is C tokens of one sequence. With ``S (DK, DV)`` the state that enters it, the chunk is

    e = T (v - enter * k S)             T = (I + (k k^T) * E * beta)^-1, the errors of its tokens
    o = leave * q S + A e               A = (q k^T) * D * beta
    S = whole * S + (last * k)^T e      last has beta in it

where ``D[r, s]`` is the product of the decays after token s up to token r >= s, and ``E[r, s]``,
r > s, that of those between what token s wrote and what the error of token r reads: the same in
the gated delta rule, one decay fewer in nlms, whose error reads the state before its decay.
Keys, queries and betas are the effective ones: normalised, scaled, divided by 1 + |k|^2. As
factors of rows they are in ``enter``, ``leave``, ``last``, T and A, and k and q are used as they
come.

A product of decays is a power of two of a difference of sums of logarithms. A decay of 0, or one
so small that it is 0 beside anything, is a reset: its logarithm is left out of the sums, and
tokens are apart by as many resets as lie between them. The product is 0 where there is one.

Every program of these kernels owns a chunk, or a block of BV columns of the state and walks along
a sequence, or one of SPLITS parts of it, chunk by chunk. Packed sequences each begin with a chunk
of their own: sequence i has those from ``start // C + i`` on, and some places stay empty.

Strides come divided by UNIT, so that the compiler knows what divides them without a compilation
for every length. ``b_`` is a block of values, ``p_`` a pointer, ``o_`` an offset, ``m_`` a mask.
"""

from functools import cache
from typing import Any

import triton
import triton.language as tl
from triton.runtime import driver

from neuralops.core.suitability import INTERPRETING

LOG2_E = tl.constexpr(1.4426950408889634)
RESET = tl.constexpr(-100.0)
NORM_EPS = tl.constexpr(1e-6)
ENTER, LEAVE, LAST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


def float32_dots() -> str:
    """How the matrix units multiply float32 numbers exactly enough."""
    return "ieee" if INTERPRETING else _float32_dots(driver.active)


def compiles_for_hopper() -> bool:
    """Whether kernels are interpreted, or compiled ahead of time for Hopper or newer."""
    if INTERPRETING:
        return True
    target = driver.active.get_current_target()
    return target.backend == "cuda" and int(target.arch) >= 90


@cache
def _float32_dots(active: Any) -> str:
    return "ieee" if active.get_current_target().backend == "hip" else "tf32x3"


@triton.jit
def dot(a, b, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(a.to(DTYPE), b.to(DTYPE), input_precision=PRECISION)


@triton.jit
def sequence_of_chunk(cu_seqlens, place, n, steps, L, C: tl.constexpr):
    """First row of the chunk at ``place``, and the row after the last one of its sequence."""
    low, high = 0, n - 1
    for _ in range(steps):
        middle = (low + high + 1) // 2
        own = tl.load(cu_seqlens + middle).to(tl.int32) // C + middle <= place
        low = tl.where(own, middle, low)
        high = tl.where(own, high, tl.maximum(middle - 1, low))
    start, end = sequence_rows(cu_seqlens, low, L)
    first = start + (place - start // C - low) * C
    return first, tl.where(first < start, first, end)


@triton.jit
def sequence_rows(cu_seqlens, i, L):
    """First row of the packed sequence ``i``, and the row after its last one, both in [0, L]."""
    start = tl.load(cu_seqlens + i).to(tl.int32)
    end = tl.load(cu_seqlens + i + 1).to(tl.int32)
    start = tl.minimum(tl.maximum(start, 0), L)
    return start, tl.minimum(tl.maximum(end, start), L)


@triton.jit
def load_rows(p, row, valid, o_d, D: tl.constexpr, stride_l, stride_d, UNIT: tl.constexpr):
    """``(rows, columns)`` of a matrix of D columns, 0 outside."""
    o = row.to(tl.int64)[:, None] * (stride_l.to(tl.int64) * UNIT) + o_d[None, :] * stride_d
    return tl.load(p + o, mask=valid[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def load_square(p, row, valid, C: tl.constexpr):
    """A chunk's ``(C, C)`` of a contiguous tensor of rows of C."""
    o = row.to(tl.int64)[:, None] * C + tl.arange(0, C)[None, :]
    return tl.load(p + o, mask=valid[:, None], other=0.0)


@triton.jit
def load_state(p, o_k, o_v, DK: tl.constexpr, DV: tl.constexpr):
    """Columns ``o_v`` of a contiguous ``(DK, DV)``."""
    mask = (o_k < DK)[:, None] & (o_v < DV)[None, :]
    return tl.load(p + o_k[:, None] * DV + o_v[None, :], mask=mask, other=0.0)


@triton.jit
def store_state(p, b_state, o_k, o_v, DK: tl.constexpr, DV: tl.constexpr):
    mask = (o_k < DK)[:, None] & (o_v < DV)[None, :]
    tl.store(p + o_k[:, None] * DV + o_v[None, :], b_state.to(p.dtype.element_ty), mask=mask)


@triton.jit
def load_decays(p, row, valid, stride_l, LOG_DECAY: tl.constexpr, UNDECAYED: tl.constexpr):
    """A chunk's decays and resets ``(C,)``, and their sums up to each token, for D and for E.

    Sums are of the whole and the fractional parts of binary logarithms, apart, so that the
    difference of two large ones has all its digits, and of resets. Then those of the chunk.
    """
    b_a = tl.load(p + row.to(tl.int64) * stride_l, mask=valid, other=0.0 if LOG_DECAY else 1.0).to(
        tl.float32
    )
    if LOG_DECAY:
        b_log = b_a * LOG2_E
        reset = b_log < RESET
    else:
        zero = b_a == 0
        b_log = tl.log2(tl.where(zero, 1.0, b_a))
        reset = zero | (b_log < RESET)
    b_log = tl.where(reset, 0.0, b_log)
    b_reset = reset.to(tl.int32)
    b_whole = tl.floor(b_log)
    b_part = b_log - b_whole
    sums = tl.cumsum(b_whole, 0), tl.cumsum(b_part, 0), tl.cumsum(b_reset, 0)
    total = tl.sum(b_whole, 0), tl.sum(b_part, 0), tl.sum(b_reset, 0)
    if UNDECAYED:
        return b_a, b_reset, sums, (sums[0] - b_whole, sums[1] - b_part, sums[2] - b_reset), total
    return b_a, b_reset, sums, sums, total


@triton.jit
def products(sums_r, sums_s, resets):
    """``(C, C)``: the product of the decays after s up to r, 0 unless it has so many resets."""
    together = sums_r[2][:, None] - sums_s[2][None, :] == resets
    b_log = sums_r[0][:, None] - sums_s[0][None, :] + (sums_r[1][:, None] - sums_s[1][None, :])
    return tl.where(together, tl.exp2(b_log), 0.0)


@triton.jit
def from_start(sums, resets):
    """``(C,)``: the product of the decays up to r."""
    return tl.where(sums[2] == resets, tl.exp2(sums[0] + sums[1]), 0.0)


@triton.jit
def to_end(sums, total, resets):
    """``(C,)``: the product of the decays after r."""
    b_log = total[0] - sums[0] + (total[1] - sums[1])
    return tl.where(total[2] - sums[2] == resets, tl.exp2(b_log), 0.0)


@triton.jit
def sum_of_squares(b_x):
    b_x = b_x.to(tl.float32)
    return tl.sum(b_x * b_x, 1)


@triton.jit
def _block_dot(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _halves(x):
    """``(2 n, r, c)`` -> its even and its odd matrices, ``(n, r, c)`` each."""
    x = tl.reshape(x, (x.shape[0] // 2, 2, x.shape[1], x.shape[2]))
    return tl.split(tl.permute(x, (0, 2, 3, 1)))


@triton.jit
def _assemble(one, across, two):
    """``[[one, 0], [across, two]]`` of matrices ``(n, m, m)``."""
    n: tl.constexpr = one.shape[0]
    m: tl.constexpr = one.shape[1]
    top = tl.permute(tl.join(one, tl.zeros_like(one)), (0, 1, 3, 2))
    low = tl.permute(tl.join(across, two), (0, 1, 3, 2))
    whole = tl.join(tl.reshape(top, (n, m, 2 * m)), tl.reshape(low, (n, m, 2 * m)))
    return tl.reshape(tl.permute(whole, (0, 3, 1, 2)), (n, 2 * m, 2 * m))


@triton.jit
def _blocks(b_lower, C: tl.constexpr, M: tl.constexpr, BELOW: tl.constexpr):
    """The ``(C / M, M, M)`` blocks on the diagonal, or BELOW it those of the odd block rows."""
    n: tl.constexpr = C // M
    x = tl.reshape(b_lower, (n, M, n, M))
    i = tl.arange(0, n)[:, None, None, None]
    j = tl.arange(0, n)[None, None, :, None]
    chosen = ((i == j + 1) & (i % 2 == 1)) if BELOW else (i == j)
    return tl.sum(tl.where(chosen, x, 0.0), 2)


@triton.jit
def inverse(b_lower, C: tl.constexpr, PRECISION: tl.constexpr):
    """``(I + lower)^-1`` of a strictly lower triangular ``(C, C)``, C 32 or 64, in float32.

    Two neighbouring blocks whose inverses T1 and T2 are known give that of twice the size:
    ``[[T1, 0], [-T2 lower21 T1, T2]]``. Blocks of up to 16 are masks on 16 x 16 tiles.
    """
    b_tile = _blocks(b_lower, C, 16, False)
    r = tl.arange(0, 16)[None, :, None]
    s = tl.arange(0, 16)[None, None, :]
    b_inverse = tl.where(r == s, 1.0, tl.where((r // 2 == s // 2) & (r > s), -b_tile, 0.0))
    for i in tl.static_range(1, 4):
        across = (r >> (i + 1) == s >> (i + 1)) & (r >> i > s >> i)
        b_across = _block_dot(tl.where(across, b_tile, 0.0), b_inverse, PRECISION)
        b_inverse -= _block_dot(b_inverse, b_across, PRECISION)
    one, two = _halves(b_inverse)
    _, b_below = _halves(_blocks(b_lower, C, 16, True))
    b_across = _block_dot(two, _block_dot(b_below, one, PRECISION), PRECISION)
    b_inverse = _assemble(one, -b_across, two)
    if C == 64:
        one, two = _halves(b_inverse)
        _, b_below = _halves(_blocks(b_lower, C, 32, True))
        one, two = tl.reshape(one, (32, 32)), tl.reshape(two, (32, 32))
        b_below = tl.reshape(b_below, (32, 32))
        b_across = tl.dot(b_below, one, input_precision=PRECISION)
        b_across = -tl.dot(two, b_across, input_precision=PRECISION)
        one, two = tl.reshape(one, (1, 32, 32)), tl.reshape(two, (1, 32, 32))
        b_inverse = _assemble(one, tl.reshape(b_across, (1, 32, 32)), two)
    return tl.reshape(b_inverse, (C, C))
