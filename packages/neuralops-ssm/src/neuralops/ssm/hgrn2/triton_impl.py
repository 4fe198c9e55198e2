"""The Triton form: launchers, registration and autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from neuralops.core.hardware import multiprocessors
from neuralops.core.library import backward_function, signed
from neuralops.ssm.library import LIBRARY

Tensor = torch.Tensor


@dataclass(frozen=True)
class Tiles:
    """The shape of a program's tile: ``lanes`` runs of ``run`` tokens, a multiple of 8, each."""

    block_d: int
    lanes: int
    run: int
    warps: int
    stages: int


FORWARD = Tiles(block_d=64, lanes=8, run=16, warps=4, stages=1)
BACKWARD = Tiles(block_d=64, lanes=8, run=8, warps=4, stages=1)
LEAN = Tiles(block_d=32, lanes=8, run=8, warps=4, stages=1)
"""For what needs more registers: clipped and packed scans, wide dtypes, strides of any number."""
ENOUGH_PROGRAMS = 1.5
"""With this many programs for each multiprocessor a sequence is not split."""
SPLIT_PROGRAMS = 4
"""A split makes this many programs for each multiprocessor."""


def scan(
    f: Tensor,
    iv: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    clip: float | None,
    log_decay: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`neuralops.ssm.hgrn2_scan`; differentiable once."""
    segment_ids = None if cu_seqlens is None else _segment_ids_op(cu_seqlens, f.shape[1])
    segments = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    inputs = (f, iv, initial_state, segment_ids, segments, clip, log_decay, reverse)
    tracked = f.requires_grad or iv.requires_grad
    tracked = tracked or (initial_state is not None and initial_state.requires_grad)
    run: Callable[..., tuple[Tensor, Tensor, Tensor]] = _forward_op
    if tracked and torch.is_grad_enabled():
        run = _Scan.apply
    h, final_state, _ = run(*inputs)
    return h, final_state


class _Scan(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    @signed
    def forward(
        f: Tensor,
        iv: Tensor,
        initial_state: Tensor | None,
        segment_ids: Tensor | None,
        segments: int,
        clip: float | None,
        log_decay: bool,
        reverse: bool,
    ) -> Any:
        return _forward_op(f, iv, initial_state, segment_ids, segments, clip, log_decay, reverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        f, _, initial_state, segment_ids, _, ctx.clip, ctx.log_decay, ctx.reverse = inputs
        h, _, clipped = output
        ctx.mark_non_differentiable(clipped)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(f, h, initial_state, segment_ids, clipped)

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor | None, grad_final: Tensor | None, _: None) -> Any:
        f, h, initial_state, segment_ids, clipped = ctx.saved_tensors
        if grad_h is None and grad_final is None:
            return (None,) * 8
        if grad_h is None:
            grad_h = torch.zeros((), dtype=h.dtype, device=h.device).expand_as(h)
        grad_f, grad_iv, grad_initial = _backward(
            grad_h, grad_final, f, h, initial_state, segment_ids, clipped,
            ctx.clip is not None, ctx.log_decay, ctx.reverse,
        )  # fmt: skip
        if initial_state is None:
            return grad_f, grad_iv, None, None, None, None, None, None
        grad_initial = grad_initial.to(initial_state.dtype)
        return grad_f, grad_iv, grad_initial, None, None, None, None, None


def _launch_segment_ids(cu_seqlens: Tensor, length: int) -> Tensor:
    from neuralops.ssm.hgrn2 import kernels

    segment_ids = _fake_segment_ids(cu_seqlens, length)
    if length > 0:
        block = 256
        kernels.segment_ids_kernel[(-(-length // block),)](
            cu_seqlens.contiguous(), segment_ids, cu_seqlens.shape[0] - 1, length, BLOCK=block
        )
    return segment_ids


def _launch_forward(
    f: Tensor,
    iv: Tensor,
    initial_state: Tensor | None,
    segment_ids: Tensor | None,
    segments: int,
    clip: float | None,
    log_decay: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from neuralops.ssm.hgrn2 import forward_kernels as kernels

    batch, length, channels = f.shape
    h, final_state, clipped = _fake_forward(
        f, iv, initial_state, segment_ids, segments, clip, log_decay, reverse
    )
    packed = segment_ids is not None
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    if packed or length == 0:
        _start_states(final_state, initial_state)
    if f.numel() == 0:
        return h, final_state, clipped

    unit = _unit(f, iv)
    tiles = FORWARD if clip is None and not packed and _is_light(unit, f, iv) else LEAN
    part, splits = _split(tiles, f)
    blocks = -(-channels // tiles.block_d)
    sizes = (
        0.0 if clip is None else clip, batch, length, part, splits, channels // unit,
        *_strides(f, unit), *_strides(iv, unit),
    )  # fmt: skip
    options = {
        "LOG_DECAY": log_decay, "REVERSE": reverse, "CLIP": clip is not None,
        "PACKED": packed, "HAS_INITIAL": initial_state is not None, "UNIT": unit,
        "BLOCK_D": tiles.block_d, "LANES": tiles.lanes, "RUN": tiles.run,
        "STAGES": tiles.stages, "num_warps": tiles.warps,
    }  # fmt: skip
    steps = None
    if splits > 1:
        steps = f.new_empty(
            (2 if clip is None else 4, batch, splits, channels), dtype=torch.float32
        )
        kernels.forward_parts_kernel[(blocks * batch * (splits - 1),)](
            f, iv, initial_state, segment_ids, steps, *sizes, **options
        )
    kernels.forward_kernel[(blocks * batch * splits,)](
        f, iv, initial_state, segment_ids, steps, h, final_state, clipped, *sizes,
        SPLIT=splits > 1, **options,
    )  # fmt: skip
    return h, final_state, clipped


def _launch_backward(
    grad_h: Tensor,
    grad_final: Tensor | None,
    f: Tensor,
    h: Tensor,
    initial_state: Tensor | None,
    segment_ids: Tensor | None,
    clipped: Tensor,
    clip: bool,
    log_decay: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from neuralops.ssm.hgrn2 import backward_kernels as kernels

    batch, length, channels = f.shape
    grad_f, grad_iv, grad_initial = _fake_backward(
        grad_h, grad_final, f, h, initial_state, segment_ids, clipped, clip, log_decay, reverse
    )
    packed = segment_ids is not None
    if initial_state is not None:
        initial_state = initial_state.contiguous()
        if packed or length == 0:
            _start_states(grad_initial, grad_final)
    if grad_final is not None:
        grad_final = grad_final.contiguous()
    if f.numel() == 0:
        return grad_f, grad_iv, grad_initial

    unit = _unit(f, grad_h)
    tiles = BACKWARD if not clip and not packed and _is_light(unit, f, grad_h) else LEAN
    part, splits = _split(tiles, f)
    blocks = -(-channels // tiles.block_d)
    sizes = (
        batch, length, part, splits, channels // unit, *_strides(f, unit), *_strides(grad_h, unit)
    )  # fmt: skip
    options = {
        "LOG_DECAY": log_decay, "REVERSE": reverse, "CLIP": clip, "PACKED": packed,
        "HAS_GRAD_FINAL": grad_final is not None, "UNIT": unit,
        "BLOCK_D": tiles.block_d, "LANES": tiles.lanes, "RUN": tiles.run,
        "STAGES": tiles.stages, "num_warps": tiles.warps,
    }  # fmt: skip
    steps = None
    if splits > 1:
        steps = f.new_empty((2, batch, splits, channels), dtype=torch.float32)
        kernels.backward_parts_kernel[(blocks * batch * (splits - 1),)](
            f, grad_h, clipped, grad_final, segment_ids, steps, *sizes, **options
        )
    kernels.backward_kernel[(blocks * batch * splits,)](
        f, grad_h, h, clipped, initial_state, grad_final, segment_ids, steps,
        grad_f, grad_iv, grad_initial, *sizes,
        HAS_INITIAL=initial_state is not None, SPLIT=splits > 1, **options,
    )  # fmt: skip
    return grad_f, grad_iv, grad_initial


def _start_states(states: Tensor, given: Tensor | None) -> None:
    """Fill what an empty sequence hands through."""
    if given is None:
        states.zero_()
    else:
        states.copy_(given)


def _strides(x: Tensor, unit: int) -> tuple[int, int, int]:
    batch, row, column = x.stride()
    return batch // unit, row // unit, column


def _unit(x: Tensor, y: Tensor) -> int:
    """Return 16 where it divides all strides and the channels, 1 elsewhere."""
    strides = (x.shape[2], *x.stride()[:2], *y.stride()[:2])
    return 1 if any(stride % 16 for stride in strides) else 16


def _is_light(unit: int, x: Tensor, y: Tensor) -> bool:
    """Whether a tile of the inputs takes few enough registers for the large tiles."""
    return unit > 1 and x.element_size() == y.element_size() == 2


def _split(tiles: Tiles, x: Tensor) -> tuple[int, int]:
    """Return of how many tokens each part of the sequences is, and how many parts there are."""
    batch, length, channels = x.shape
    tile = tiles.lanes * tiles.run
    programs = batch * -(-channels // tiles.block_d)
    processors = multiprocessors(x.device)
    splits = 1
    if programs < ENOUGH_PROGRAMS * processors:
        splits = -(-SPLIT_PROGRAMS * processors // programs)
    part = -(-length // (splits * tile)) * tile
    return part, -(-length // part)


def _fake_segment_ids(cu_seqlens: Tensor, length: int) -> Tensor:
    return cu_seqlens.new_empty((length,), dtype=torch.int32)


def _fake_forward(
    f: Tensor,
    iv: Tensor,
    initial_state: Tensor | None,
    segment_ids: Tensor | None,
    segments: int,
    clip: float | None,
    log_decay: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, channels = f.shape
    states = batch if segment_ids is None else segments
    bits = 0 if clip is None else (length + 7) // 8
    return (
        iv.new_empty((batch, length, channels)),
        f.new_empty((states, channels), dtype=torch.float32),
        f.new_empty((batch, bits, channels), dtype=torch.uint8),
    )


def _fake_backward(
    grad_h: Tensor,
    grad_final: Tensor | None,
    f: Tensor,
    h: Tensor,
    initial_state: Tensor | None,
    segment_ids: Tensor | None,
    clipped: Tensor,
    clip: bool,
    log_decay: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    states = 0 if initial_state is None else initial_state.shape[0]
    return (
        f.new_empty(f.shape),
        h.new_empty(h.shape),
        f.new_empty((states, f.shape[2]), dtype=torch.float32),
    )


_segment_ids_op = LIBRARY.register(
    "hgrn2_segment_ids(Tensor cu_seqlens, SymInt length) -> Tensor",
    _launch_segment_ids,
    _fake_segment_ids,
)
_forward_op = LIBRARY.register(
    "hgrn2_scan_fwd(Tensor f, Tensor iv, Tensor? initial_state, Tensor? segment_ids, "
    "SymInt segments, float? clip, bool log_decay, bool reverse) -> (Tensor, Tensor, Tensor)",
    _launch_forward,
    _fake_forward,
)
_backward = backward_function(
    "hgrn2_scan",
    LIBRARY.register(
        "hgrn2_scan_bwd(Tensor grad_h, Tensor? grad_final, Tensor f, Tensor h, "
        "Tensor? initial_state, Tensor? segment_ids, Tensor clipped, bool clip, "
        "bool log_decay, bool reverse) -> (Tensor, Tensor, Tensor)",
        _launch_backward,
        _fake_backward,
    ),
    _fake_backward,
)
