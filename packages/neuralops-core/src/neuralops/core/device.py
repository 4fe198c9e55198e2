"""Triton device functions that families share unchanged."""

import triton
import triton.language as tl


@triton.jit
def find_segment(cu_seqlens, n_segments, positions):
    """Return the packed sequence that holds each of ``positions``, or -1 past the last one.

    A binary search: the largest ``i`` with ``cu_seqlens[i] <= position``. Whatever the values
    of ``cu_seqlens``, the result lies in [-1, n_segments).
    """
    low = tl.zeros_like(positions)
    high = low + n_segments
    for _ in range(32):
        middle = (low + high + 1) // 2
        boundary = tl.load(cu_seqlens + middle)
        low = tl.where(boundary <= positions, middle, low)
        high = tl.where(boundary <= positions, high, tl.maximum(middle - 1, low))
    return tl.where(low < n_segments, low, -1)
