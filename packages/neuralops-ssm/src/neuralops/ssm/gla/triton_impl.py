"""The Triton form: autograd and registration; `launchers` starts the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from neuralops.core.library import backward_function, signed
from neuralops.core.suitability import triton_reasons
from neuralops.ssm.gla.launchers import (
    LARGEST_WIDTH,
    fake_backward,
    fake_forward,
    fake_table,
    launch_backward,
    launch_forward,
    launch_table,
)
from neuralops.ssm.library import LIBRARY
from neuralops.ssm.scalar_decay import triton_impl as scalar_decay

Tensor = torch.Tensor


def reasons(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    *options: Any,
) -> Sequence[str]:
    """Return every reason against these kernels."""
    found = triton_reasons(q, k, v, lambdas, initial_state, initial_key_sum)
    for name, width in (("q", q.shape[-1]), ("v", v.shape[-1])):
        if width > LARGEST_WIDTH:
            found.append(
                f"the width {width} of {name} is above the kernels' limit of {LARGEST_WIDTH}"
            )
    return found


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    log_decay: bool,
    normalize: bool,
    eps: float,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute :func:`neuralops.ssm.gla_scan`; differentiable once."""
    if lambdas.dim() == 3:
        return scalar_decay.scan(
            q, k, v, lambdas, initial_state, initial_key_sum, cu_seqlens,
            "identity", scale, 1.0, normalize, eps, log_decay, reverse,
        )  # fmt: skip
    table, sequences = None, 0
    if cu_seqlens is not None:
        sequences = cu_seqlens.shape[0] - 1
        table = _table_op(cu_seqlens, q.shape[2])
    tensors = (q, k, v, lambdas, initial_state, initial_key_sum)
    run: Callable[..., tuple[Tensor, ...]] = _forward_op
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        run = _Scan.apply
    out, final_state, final_key_sum, _ = run(
        *tensors, table, sequences, scale, log_decay, normalize, eps, reverse
    )
    return out, final_state, final_key_sum if normalize else None


class _Scan(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    @signed
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lambdas: Tensor,
        initial_state: Tensor | None,
        initial_key_sum: Tensor | None,
        table: Tensor | None,
        sequences: int,
        scale: float,
        log_decay: bool,
        normalize: bool,
        eps: float,
        reverse: bool,
    ) -> Any:
        return _forward_op(
            q, k, v, lambdas, initial_state, initial_key_sum, table, sequences,
            scale, log_decay, normalize, eps, reverse,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        out, _, key_sum, denominator = output
        ctx.sequences, *ctx.options = inputs[7:]
        normalize = inputs[10]
        kept = (out, denominator) if normalize else (None, None)
        ctx.save_for_backward(*inputs[:7], *kept)
        ctx.mark_non_differentiable(*((denominator,) if normalize else (key_sum, denominator)))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_state: Tensor | None, grad_sum: Tensor | None, _: Any
    ) -> Any:
        q, k, v, lambdas, state, key_sum, table, out, denominator = ctx.saved_tensors
        normalize = denominator is not None
        if grad is None and grad_state is None and grad_sum is None:
            return (None,) * 13
        if grad is None:
            grad = torch.zeros((), dtype=v.dtype, device=v.device).expand(v.shape)
        *found, of_state, of_sum = _backward(
            grad, grad_state, grad_sum if normalize else None, q, k, v, lambdas, state, key_sum,
            table, out, denominator, ctx.sequences, *ctx.options,
        )  # fmt: skip
        of_state = None if state is None else of_state.to(state.dtype)
        of_sum = None if key_sum is None or not normalize else of_sum.to(key_sum.dtype)
        return *found, of_state, of_sum, *[None] * 7


_table_op = LIBRARY.register(
    "gla_chunks(Tensor cu_seqlens, SymInt length) -> Tensor", launch_table, fake_table
)
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor lambdas, Tensor? initial_state, "
    "Tensor? initial_key_sum, Tensor? table"
)
_OPTIONS = "SymInt sequences, float scale, bool log_decay, bool normalize, float eps, bool reverse"
_forward_op = LIBRARY.register(
    f"gla_scan_fwd({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    launch_forward,
    fake_forward,
)
_backward = backward_function(
    "gla_scan",
    LIBRARY.register(
        "gla_scan_bwd(Tensor grad, Tensor? grad_state, Tensor? grad_sum, "
        f"{_INPUTS}, Tensor? out, Tensor? denominator, {_OPTIONS})"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        launch_backward,
        fake_backward,
    ),
    fake_backward,
)
