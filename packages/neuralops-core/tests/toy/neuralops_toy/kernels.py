"""The Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def forward_kernel(x, gate, out, size, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x + o, mask=o < size)
    b_gate = tl.load(gate + o, mask=o < size)
    tl.store(out + o, b_x * b_gate, mask=o < size)


@triton.jit
def backward_kernel(grad, x, gate, grad_x, grad_gate, size, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_grad = tl.load(grad + o, mask=o < size)
    b_x = tl.load(x + o, mask=o < size)
    b_gate = tl.load(gate + o, mask=o < size)
    tl.store(grad_x + o, b_grad * b_gate, mask=o < size)
    tl.store(grad_gate + o, b_grad * b_x, mask=o < size)
