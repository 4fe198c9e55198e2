"""The Triton form: launchers, registration and autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from neuralops.core.hardware import multiprocessors
from neuralops.core.library import backward_function, signed
from neuralops.ssm.library import LIBRARY

Tensor = torch.Tensor
MAX_WIDTH = 256
SPLIT_WIDTH = 128
"""With wider keys a sequence is not split: the map of a part would not fit on the chip."""
ENOUGH_PROGRAMS = 0.75
"""With this many programs for each multiprocessor a sequence is not split."""
SPLIT_PROGRAMS = 2
"""A split makes this many programs for each multiprocessor."""
SHORTEST_PART = 8
"""How many chunks a part has at least."""


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut: columns of the state or values at a time, warps, pipeline stages."""

    block_v: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Plan:
    """The chunk, and the tiles of each kernel."""

    chunk: int
    chunks: Tiles
    forward: Tiles
    split: Tiles
    states: Tiles
    walk: Tiles
    within: Tiles
    between: Tiles


NARROW = Plan(
    64,
    chunks=Tiles(64, 4, 1),
    forward=Tiles(64, 4, 3),
    split=Tiles(32, 4, 2),
    states=Tiles(32, 4, 3),
    walk=Tiles(32, 4, 2),
    within=Tiles(64, 8, 1),
    between=Tiles(32, 8, 1),
)
"""For keys of up to 64, of two bytes."""
WIDE = Plan(
    64,
    chunks=Tiles(64, 4, 1),
    forward=Tiles(64, 4, 3),
    split=Tiles(32, 4, 2),
    states=Tiles(64, 4, 3),
    walk=Tiles(32, 4, 2),
    within=Tiles(64, 8, 1),
    between=Tiles(64, 8, 2),
)
"""For keys of up to 128, of two bytes."""
LEAN = Plan(
    32,
    chunks=Tiles(16, 8, 1),
    forward=Tiles(16, 8, 1),
    split=Tiles(16, 8, 1),
    states=Tiles(16, 8, 1),
    walk=Tiles(16, 8, 1),
    within=Tiles(16, 8, 1),
    between=Tiles(16, 8, 1),
)
"""For float32, for keys of up to 256, for strides that 16 does not divide, and for GPUs without
matrix units that read their operands from shared memory, which came with Hopper."""


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    alpha: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    log_decay: bool,
    normalize_qk: bool,
    nlms: bool,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`neuralops.ssm.gdn_scan`, or with ``nlms`` :func:`neuralops.ssm.nlms_scan`.

    It is differentiable once.
    """
    tracked = q.requires_grad or k.requires_grad or v.requires_grad
    tracked = tracked or beta.requires_grad or alpha.requires_grad
    tracked = tracked or (initial_state is not None and initial_state.requires_grad)
    keep = tracked and torch.is_grad_enabled()
    run: Callable[..., tuple[Tensor, ...]] = _Scan.apply if keep else _forward_op
    o, final_state, *_ = run(
        q, k, v, beta, alpha, initial_state, cu_seqlens, scale, log_decay, normalize_qk, nlms, keep
    )
    return o, final_state


class _Scan(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    @signed
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        alpha: Tensor,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float,
        log_decay: bool,
        normalize_qk: bool,
        nlms: bool,
        keep: bool,
    ) -> Any:
        return _forward_op(
            q, k, v, beta, alpha, initial_state, cu_seqlens, scale, log_decay, normalize_qk, nlms,
            keep,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, beta, alpha, initial_state, cu_seqlens, *ctx.options, _ = inputs
        kept = output[2:]
        ctx.v_dtype = v.dtype
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, beta, alpha, initial_state, cu_seqlens, *kept)

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None, *_: Any) -> Any:
        if grad_o is None and grad_final is None:
            return (None,) * 12
        q, k, beta, alpha, initial_state, cu_seqlens, errors, *kept = ctx.saved_tensors
        if grad_o is None:
            grad_o = torch.zeros((), dtype=errors.dtype, device=q.device).expand_as(errors)
        *grads, grad_initial = _backward(
            grad_o, grad_final, q, k, beta, alpha, initial_state, cu_seqlens, errors, *kept,
            *ctx.options,
        )  # fmt: skip
        grads[2] = grads[2].to(ctx.v_dtype)
        if initial_state is None:
            return *grads, *(None,) * 7
        return *grads, grad_initial.to(initial_state.dtype), *(None,) * 6


def _launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    alpha: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    log_decay: bool,
    normalize_qk: bool,
    nlms: bool,
    keep: bool,
) -> tuple[Tensor, ...]:
    from neuralops.ssm.gdn import forward_kernels, kernels

    batch, heads, length, width = v.shape
    dtype, plan = _plan(q, k, v)
    results = _fake_forward(
        q, k, v, beta, alpha, initial_state, cu_seqlens, scale, log_decay, normalize_qk, nlms, keep
    )
    o, final_state, errors, squares, factors, maps = results
    packed = cu_seqlens is not None
    if cu_seqlens is not None:
        # Rows and chunks that belong to no sequence.
        for x in results[:1] if not keep else (o, errors, squares, factors):
            x.zero_()
        cu_seqlens = cu_seqlens.contiguous()
    rows = final_state.shape[0] * heads
    if rows == 0:
        return results
    if initial_state is not None:
        initial_state = initial_state.contiguous()

    key_width, group, sequences = q.shape[3], heads // q.shape[1], final_state.shape[0]
    chunks, unit = _chunks(length, cu_seqlens, plan), _unit(q, k, v)
    of_q, of_k, of_v = _strides(q, unit), _strides(k, unit), _strides(v, unit)
    precision = kernels.float32_dots()
    shape: dict[str, Any] = {
        "DK": key_width, "BK": _block(key_width), "C": plan.chunk, "GROUP": group, "UNIT": unit,
        "PRECISION": precision,
    }  # fmt: skip
    if length > 0:
        forward_kernels.chunk_kernel[(batch * heads * chunks,)](
            q, k, beta, alpha, cu_seqlens, squares, factors,
            scale, heads, length, chunks, sequences, sequences.bit_length(),
            *of_q, *of_k, *beta.stride(), *alpha.stride(),
            LOG_DECAY=log_decay, NORMALIZE=normalize_qk, NLMS=nlms, PACKED=packed,
            # Rounded to 8 bits, T needs no more of its inversion.
            ROUGH="tf32" if dtype == torch.bfloat16 else precision,
            num_warps=plan.chunks.warps if dtype == torch.bfloat16 else LEAN.chunks.warps, **shape,
        )  # fmt: skip
    part, splits = (length, 1) if packed else _split(q, v, plan)
    tiles = plan.split if splits > 1 else plan.forward
    shape |= {"DV": width, "BV": min(tiles.block_v, _block(width)), "STAGES": tiles.stages}
    blocks = -(-width // shape["BV"])
    if keep and splits == 1:
        maps.zero_()
    sizes = (batch, heads, length, part, splits, chunks)
    if splits > 1:
        all_blocks = blocks + -(-key_width // shape["BV"])
        forward_kernels.forward_parts_kernel[(rows * (splits - 1) * all_blocks,)](
            k, v, squares, factors, maps, *sizes, *of_k, *of_v,
            num_warps=tiles.warps, **shape,
        )  # fmt: skip
    forward_kernels.forward_kernel[(rows * splits * blocks,)](
        q, k, v, squares, factors, maps, initial_state, cu_seqlens,
        o, errors, final_state, *sizes, *of_q, *of_k, *of_v,
        HAS_INITIAL=initial_state is not None, KEEP=keep, SPLIT=splits > 1, PACKED=packed,
        num_warps=tiles.warps, **shape,
    )  # fmt: skip
    return results


def _launch_backward(
    grad_o: Tensor,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    alpha: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    errors: Tensor,
    squares: Tensor,
    factors: Tensor,
    maps: Tensor,
    scale: float,
    log_decay: bool,
    normalize_qk: bool,
    nlms: bool,
) -> tuple[Tensor, ...]:
    from neuralops.ssm.gdn import backward_kernels, kernels

    grads = _fake_backward(
        grad_o, grad_final, q, k, beta, alpha, initial_state, cu_seqlens, errors, squares, factors,
        maps, scale, log_decay, normalize_qk, nlms,
    )  # fmt: skip
    grad_q, grad_k, grad_v, grad_beta, grad_alpha, grad_initial = grads
    batch, heads, length, width = errors.shape
    packed = cu_seqlens is not None
    sequences = batch
    if cu_seqlens is not None:
        sequences = cu_seqlens.shape[0] - 1
        cu_seqlens = cu_seqlens.contiguous()
        for grad in grads[:5]:
            grad.zero_()
    rows = sequences * heads
    if rows == 0:
        return grads
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    if grad_final is not None:
        grad_final = grad_final.contiguous()

    key_heads, key_width = q.shape[1], q.shape[3]
    plan = LEAN
    if squares.shape[4] != plan.chunk:
        plan = NARROW if key_width <= 64 else WIDE
        if _unit(grad_o) == 1:
            grad_o = grad_o.contiguous()
    group, chunks = heads // key_heads, _chunks(length, cu_seqlens, plan)
    unit = _unit(q, k, grad_o)
    part, splits = (length, 1) if packed else _split(q, errors, plan)
    of_q, of_k, of_g = _strides(q, unit), _strides(k, unit), _strides(grad_o, unit)
    kept = chunks if packed else (chunks + 1) // 2
    states = errors.new_empty((batch, heads, kept, key_width, width))
    grad_states = errors.new_empty((batch, heads, chunks, key_width, width))
    sizes = (batch, heads, length, part, splits, chunks)
    precision = kernels.float32_dots()

    def shape(tiles: Tiles) -> dict[str, Any]:
        return {
            "DK": key_width, "BK": _block(key_width), "DV": width,
            "BV": min(tiles.block_v, _block(width)), "C": plan.chunk, "GROUP": group,
            "UNIT": unit, "PRECISION": precision, "PACKED": packed, "STAGES": tiles.stages,
            "num_warps": tiles.warps,
        }  # fmt: skip

    options = shape(plan.states)
    if length > 0:
        backward_kernels.states_kernel[(rows * splits * -(-width // options["BV"]),)](
            k, errors, factors, maps, initial_state, cu_seqlens, states, *sizes, *of_k,
            HAS_INITIAL=initial_state is not None, SPLIT=splits > 1, **options,
        )  # fmt: skip

    options = shape(plan.walk)
    options["HAS_GRAD_FINAL"] = grad_final is not None
    options["HAS_INITIAL"] = initial_state is not None
    grid = (rows * splits * -(-width // options["BV"]),)
    grad_parts = None
    if splits > 1:
        grad_parts = factors.new_empty((batch, heads, 2, splits, key_width, width))
    walk = (
        q, k, grad_o, squares, factors, maps, grad_parts, grad_final, cu_seqlens, grad_v,
        grad_states, grad_initial, *sizes, *of_q, *of_k, *of_g,
    )  # fmt: skip
    if splits > 1:
        backward_kernels.gradient_walk_kernel[grid](*walk, PARTS=True, SPLIT=False, **options)
    backward_kernels.gradient_walk_kernel[grid](*walk, PARTS=False, SPLIT=splits > 1, **options)

    if length > 0:
        grad_gates = factors.new_empty((2, batch, heads, length))
        grid = (batch * key_heads * chunks,)
        chunk_sizes = (
            scale, key_heads, length, chunks, sequences, sequences.bit_length(), key_width, width,
            *of_q, *of_k, *of_g, *beta.stride(), *alpha.stride(),
        )  # fmt: skip
        rule = {"LOG_DECAY": log_decay, "NORMALIZE": normalize_qk, "NLMS": nlms}
        backward_kernels.within_kernel[grid](
            q, k, beta, alpha, grad_o, errors, grad_v, cu_seqlens, grad_q, grad_k, grad_gates,
            *chunk_sizes, ROUGH="tf32" if errors.element_size() == 2 else precision,
            **rule, **shape(plan.within),
        )  # fmt: skip
        backward_kernels.between_kernel[grid](
            q, k, beta, alpha, grad_o, errors, factors, grad_v, states, grad_states, cu_seqlens,
            grad_q, grad_k, grad_gates, grad_beta, grad_alpha, *chunk_sizes,
            **rule, **shape(plan.between),
        )  # fmt: skip
    return grads


def _block(width: int) -> int:
    """Return the power of two, 16 at least, that holds ``width``."""
    return max(16, 1 << (width - 1).bit_length())


def _strides(x: Tensor, unit: int) -> tuple[int, int, int, int]:
    batch, head, row, column = x.stride()
    return batch // unit, head // unit, row // unit, column


def _unit(*tensors: Tensor) -> int:
    """Return 16 where it divides all strides but the last, 1 elsewhere."""
    for x in tensors:
        batch, head, row, _ = x.stride()
        if batch % 16 or head % 16 or row % 16:
            return 1
    return 16


def _plan(q: Tensor, k: Tensor, v: Tensor) -> tuple[torch.dtype, Plan]:
    """Return the dtype of matrix products and how the kernels are cut."""
    dtype = q.dtype
    if k.dtype != dtype or v.dtype != dtype:
        dtype = torch.promote_types(torch.promote_types(dtype, k.dtype), v.dtype)
    if dtype == torch.float32 or q.shape[3] > 128 or _unit(q, k, v) == 1:
        return dtype, LEAN
    if not _reads_operands_from_shared_memory(q.device):
        return dtype, LEAN
    return dtype, NARROW if q.shape[3] <= 64 else WIDE


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def _reads_operands_from_shared_memory(device: torch.device) -> bool:
    if device.type == "cuda":
        return _is_hopper(device)
    from neuralops.ssm.gdn import kernels

    return kernels.compiles_for_hopper()


def _chunks(length: int, cu_seqlens: Tensor | None, plan: Plan) -> int:
    """Return how many chunks there are; packed, how many places for chunks."""
    if cu_seqlens is None:
        return (length + plan.chunk - 1) // plan.chunk
    return length // plan.chunk + cu_seqlens.shape[0] - 1


def _most_splits(q: Tensor, v: Tensor, plan: Plan) -> int:
    """Return in how many parts the longest sequences are split."""
    if q.shape[3] > SPLIT_WIDTH:
        return 1
    programs = v.shape[0] * v.shape[1] * -(-v.shape[3] // plan.split.block_v)
    processors = multiprocessors(q.device)
    if programs == 0 or programs >= ENOUGH_PROGRAMS * processors:
        return 1
    return int(SPLIT_PROGRAMS * processors) // programs


def _split(q: Tensor, v: Tensor, plan: Plan) -> tuple[int, int]:
    """Return of how many tokens each part of the sequences is, and how many parts there are."""
    length = v.shape[2]
    shortest = SHORTEST_PART * plan.chunk
    splits = min(_most_splits(q, v, plan), length // shortest)
    if splits <= 1:
        return length, 1
    part = -(-length // (splits * plan.chunk)) * plan.chunk
    return part, -(-length // part)


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    alpha: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    log_decay: bool,
    normalize_qk: bool,
    nlms: bool,
    keep: bool,
) -> tuple[Tensor, ...]:
    batch, heads, length, width = v.shape
    key_width = q.shape[3]
    dtype, plan = _plan(q, k, v)
    sequences, splits = batch, 1
    if cu_seqlens is None:
        splits = _most_splits(q, v, plan)
    else:
        sequences = cu_seqlens.shape[0] - 1
    chunks = _chunks(length, cu_seqlens, plan)
    parts = splits if splits > 1 else 0
    device, wide = v.device, torch.float32
    return (
        v.new_empty(v.shape),
        torch.empty((sequences, heads, key_width, width), dtype=wide, device=device),
        torch.empty((batch, heads, length if keep else 0, width), dtype=dtype, device=device),
        torch.empty((2, batch, heads, length, plan.chunk), dtype=dtype, device=device),
        torch.empty((batch * heads * (3 * length + chunks),), dtype=wide, device=device),
        torch.empty(
            (batch, heads, parts, key_width, 2 * width + key_width), dtype=wide, device=device
        ),
    )


def _fake_backward(
    grad_o: Tensor,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    alpha: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    errors: Tensor,
    squares: Tensor,
    factors: Tensor,
    maps: Tensor,
    scale: float,
    log_decay: bool,
    normalize_qk: bool,
    nlms: bool,
) -> tuple[Tensor, ...]:
    states = (0,) if initial_state is None else initial_state.shape
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        torch.empty_like(errors),
        beta.new_empty(beta.shape),
        alpha.new_empty(alpha.shape),
        factors.new_empty(states),
    )


_forward_op = LIBRARY.register(
    "gdn_scan_fwd(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor alpha, Tensor? initial_state, "
    "Tensor? cu_seqlens, float scale, bool log_decay, bool normalize_qk, bool nlms, bool keep)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch_forward,
    _fake_forward,
)
_backward = backward_function(
    "gdn_scan, nlms_scan",
    LIBRARY.register(
        "gdn_scan_bwd(Tensor grad_o, Tensor? grad_final, Tensor q, Tensor k, Tensor beta, "
        "Tensor alpha, Tensor? initial_state, Tensor? cu_seqlens, Tensor errors, "
        "Tensor squares, Tensor factors, Tensor maps, "
        "float scale, bool log_decay, bool normalize_qk, bool nlms)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        _launch_backward,
        _fake_backward,
    ),
    _fake_backward,
)
