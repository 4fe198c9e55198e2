"""The public functions: what a user calls and reads."""

from __future__ import annotations

from typing import Literal, overload

import torch

from neuralops.core.dispatch import dispatch
from neuralops.core.operator import Operator
from neuralops.core.validation import (
    check_cu_seqlens,
    check_device,
    check_flag,
    check_number,
    check_shape,
    check_tensor,
)
from neuralops.ssm.gdn.op import NLMS, OPERATOR

Tensor = torch.Tensor


@overload
def gdn_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    alpha: Tensor,
    *,
    scale: float = ...,
    log_decay: bool = ...,
    normalize_qk: bool = ...,
    initial_state: Tensor | None = ...,
    return_final_state: Literal[False] = ...,
    cu_seqlens: Tensor | None = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def gdn_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    alpha: Tensor,
    *,
    scale: float = ...,
    log_decay: bool = ...,
    normalize_qk: bool = ...,
    initial_state: Tensor | None = ...,
    return_final_state: Literal[True],
    cu_seqlens: Tensor | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def gdn_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    alpha: Tensor,
    *,
    scale: float = 1.0,
    log_decay: bool = False,
    normalize_qk: bool = False,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Scan the gated delta rule of Gated DeltaNet along the sequence.

    $$S'_t = \alpha_t S_{t-1}, \qquad S_t = S'_t + \beta_t\, k_t (v_t - S_t'^\top k_t)^\top,
    \qquad o_t = scale\; S_t^\top q_t$$

    Warning: the reference package's `gdn_scan_triton(q, k, v, beta, alpha)` has the same argument
    names for another recurrence, with their roles swapped. It is `nlms_scan(q, k, v, decay=beta,
    step=alpha)`.

    Args:
        q: the queries, `(B, H, L, Dk)`.
        k: the keys, `(B, H, L, Dk)`. The state stays bounded where $\beta_t |k_t|^2 \le 2$.
        v: the values, `(B, Hv, L, Dv)`. `Hv` is a multiple of `H`: value head h reads key head
            `h // (Hv / H)`. Each tensor may have its own floating dtype and any strides.
        beta: how much of the error is written, `(B, Hv, L)`. Any value; in (1, 2] the state's
            transition has negative eigenvalues.
        alpha: how much of the state is kept, `(B, Hv, L)`, with values in [0, 1]; with
            `log_decay=True` their natural logarithms in [-inf, 0]. Keep it in float32 where it
            comes near 1. An alpha of exactly 0 (log -inf) restarts the recurrence.
        scale: what the outputs are multiplied by.
        log_decay: whether `alpha` holds natural logarithms.
        normalize_qk: whether each query and key x is replaced by `x * rsqrt(sum(x * x) + 1e-6)`.
        initial_state: the state before the first token, `(B, Hv, Dk, Dv)`; packed,
            `(n, Hv, Dk, Dv)`, one for each sequence. `None` is zero.
        return_final_state: whether to return the state after the last token as well.
        cu_seqlens: the boundaries of n packed sequences, `(n + 1,)`, int32 or int64, from 0 to at
            most L, for B = 1. Empty sequences are allowed; tokens past the last boundary give
            output 0 and gradient 0. It is not copied to the host.
        backend: `"triton"`, `"torch"` or `"reference"`; `None` takes the first that can serve.

    Returns:
        `o`, `(B, Hv, L, Dv)` in the dtype of `v`, contiguous; with `return_final_state=True` the
        tuple `(o, final_state)`, the state in float32 (float64 where an input is float64). Both
        are differentiable in every tensor.

    Raises:
        TypeError: an argument is no floating tensor, or not of the documented type.
        ValueError: a shape, device or value that does not fit, or an unknown backend.
        neuralops.core.BackendUnavailableError: the requested backend cannot serve the call.

    Time is O(B Hv L Dk Dv) in matrix products over chunks of tokens. Memory is O(B Hv L (Dk + Dv)):
    the backward keeps the inputs, what was written at each token, and the chunks' triangular
    inverses.

    Source: Yang, Kautz and Hatamizadeh, *Gated Delta Networks: Improving Mamba2 with Delta Rule*,
    [arXiv 2412.06464](https://arxiv.org/abs/2412.06464).

    Example:
        >>> import torch
        >>> from neuralops.ssm import gdn_scan
        >>> k = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]).view(1, 1, 3, 2)
        >>> v = torch.tensor([5.0, 7.0, 3.0]).view(1, 1, 3, 1)
        >>> ones = torch.ones(1, 1, 3)
        >>> gdn_scan(k, k, v, ones, ones).flatten().tolist()
        [5.0, 7.0, 3.0]
        >>> q = torch.tensor([1.0, 1.0]).expand(1, 1, 3, 2)
        >>> gdn_scan(q, k, v, ones, ones).flatten().tolist()
        [5.0, 7.0, 10.0]
    """
    check_flag("gdn_scan", "normalize_qk", normalize_qk)
    o, final_state = _scan(
        OPERATOR, q, k, v, ("beta", beta), ("alpha", alpha), scale, log_decay, normalize_qk,
        initial_state, return_final_state, cu_seqlens, backend,
    )  # fmt: skip
    return (o, final_state) if return_final_state else o


@overload
def nlms_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    step: Tensor,
    *,
    scale: float = ...,
    log_decay: bool = ...,
    initial_state: Tensor | None = ...,
    return_final_state: Literal[False] = ...,
    cu_seqlens: Tensor | None = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def nlms_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    step: Tensor,
    *,
    scale: float = ...,
    log_decay: bool = ...,
    initial_state: Tensor | None = ...,
    return_final_state: Literal[True],
    cu_seqlens: Tensor | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def nlms_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    step: Tensor,
    *,
    scale: float = 1.0,
    log_decay: bool = False,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Scan normalised least mean squares with a leaking state along the sequence.

    $$S_t = decay_t\, S_{t-1} + \frac{step_t}{1 + |k_t|^2}\, k_t (v_t - S_{t-1}^\top k_t)^\top,
    \qquad o_t = scale\; S_t^\top q_t$$

    It is `gdn_scan`'s sibling, with a step normalised by the key and an error that reads the state
    *before* its decay. So a decay of exactly 0 is no restart: the error still reads the old state.

    Warning: the decay comes before the step. The reference package's `gdn_scan_triton(q, k, v,
    beta, alpha)` is `nlms_scan(q, k, v, decay=beta, step=alpha)`, while in `gdn_scan` beta is the
    write strength and alpha the decay.

    Args:
        q: the queries, `(B, H, L, Dk)`.
        k: the keys, `(B, H, L, Dk)`, of any length.
        v: the values, `(B, Hv, L, Dv)`, in heads as in `gdn_scan`. Each tensor may have its own
            floating dtype and any strides.
        decay: how much of the state is kept, `(B, Hv, L)`, with values in [0, 1]; with
            `log_decay=True` their natural logarithms in [-inf, 0].
        step: the step size, `(B, Hv, L)`. Any value; the state stays bounded for values in [0, 2].
        scale: what the outputs are multiplied by.
        log_decay: whether `decay` holds natural logarithms.
        initial_state: as in `gdn_scan`.
        return_final_state: as in `gdn_scan`.
        cu_seqlens: as in `gdn_scan`.
        backend: as in `gdn_scan`.

    Returns:
        As `gdn_scan`.

    Raises:
        TypeError: an argument is no floating tensor, or not of the documented type.
        ValueError: a shape, device or value that does not fit, or an unknown backend.
        neuralops.core.BackendUnavailableError: the requested backend cannot serve the call.

    Time and memory are those of `gdn_scan`, whose kernels it runs on.

    Source: Widrow and Hoff's rule with a normalised step, as in Haykin, *Adaptive Filter Theory*.

    Example:
        >>> import torch
        >>> from neuralops.ssm import nlms_scan
        >>> k, v = torch.ones(1, 1, 2, 1), torch.tensor([4.0, 4.0]).view(1, 1, 2, 1)
        >>> ones = torch.ones(1, 1, 2)
        >>> nlms_scan(k, k, v, decay=ones, step=ones).flatten().tolist()
        [2.0, 3.0]
    """
    o, final_state = _scan(
        NLMS, q, k, v, ("step", step), ("decay", decay), scale, log_decay, False,
        initial_state, return_final_state, cu_seqlens, backend,
    )  # fmt: skip
    return (o, final_state) if return_final_state else o


def gdn_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    alpha: Tensor,
    state: Tensor | None,
    *,
    scale: float = 1.0,
    log_decay: bool = False,
    normalize_qk: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Advance `gdn_scan` by one token, for generation.

    It runs the scan's own implementation over one token, so that a prefill followed by steps gives
    the numbers of one scan.

    Args:
        q: the queries of this token, `(B, H, Dk)`.
        k: the keys of this token, `(B, H, Dk)`.
        v: the values of this token, `(B, Hv, Dv)`.
        beta: the write strengths of this token, `(B, Hv)`.
        alpha: the decays of this token, `(B, Hv)`.
        state: the state so far, `(B, Hv, Dk, Dv)`, as the scan returned it; `None` is zero.
        scale: as in the scan.
        log_decay: as in the scan.
        normalize_qk: as in the scan.
        backend: as in the scan.

    Returns:
        The tuple `(o, new_state)`, the output `(B, Hv, Dv)` in the dtype of `v` and the new state
        `(B, Hv, Dk, Dv)` in float32 (float64 where an input is float64). `state` is left as it is.

    Raises:
        TypeError: as in the scan.
        ValueError: as in the scan.

    Time and memory are O(B Hv Dk Dv).

    Source: as the scan.

    Example:
        >>> import torch
        >>> from neuralops.ssm import gdn_step
        >>> k, v, one = torch.ones(1, 1, 1), torch.full((1, 1, 1), 6.0), torch.ones(1, 1)
        >>> o, state = gdn_step(k, k, v, 0.5 * one, one, torch.full((1, 1, 1, 1), 4.0))
        >>> state.item()
        5.0
    """
    check_flag("gdn_step", "normalize_qk", normalize_qk)
    return _step(
        "gdn_step", OPERATOR, q, k, v, ("beta", beta), ("alpha", alpha), state, scale, log_decay,
        normalize_qk, backend,
    )  # fmt: skip


def nlms_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    step: Tensor,
    state: Tensor | None,
    *,
    scale: float = 1.0,
    log_decay: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Advance `nlms_scan` by one token, for generation.

    Args:
        q: the queries of this token, `(B, H, Dk)`.
        k: the keys of this token, `(B, H, Dk)`.
        v: the values of this token, `(B, Hv, Dv)`.
        decay: the decays of this token, `(B, Hv)`.
        step: the step sizes of this token, `(B, Hv)`.
        state: the state so far, `(B, Hv, Dk, Dv)`, as the scan returned it; `None` is zero.
        scale: as in the scan.
        log_decay: as in the scan.
        backend: as in the scan.

    Returns:
        The tuple `(o, new_state)` as `gdn_step` returns it. `state` is left as it is.

    Raises:
        TypeError: as in the scan.
        ValueError: as in the scan.

    Time and memory are O(B Hv Dk Dv).

    Source: as the scan.

    Example:
        >>> import torch
        >>> from neuralops.ssm import nlms_step
        >>> k, v, one = torch.ones(1, 1, 1), torch.full((1, 1, 1), 6.0), torch.ones(1, 1)
        >>> o, state = nlms_step(k, k, v, decay=one, step=one, state=torch.full((1, 1, 1, 1), 4.0))
        >>> state.item()
        5.0
    """
    return _step(
        "nlms_step", NLMS, q, k, v, ("step", step), ("decay", decay), state, scale, log_decay,
        False, backend,
    )  # fmt: skip


def _scan(
    operator: Operator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    strength: tuple[str, Tensor],
    decay: tuple[str, Tensor],
    scale: float,
    log_decay: bool,
    normalize_qk: bool,
    initial_state: Tensor | None,
    return_final_state: bool,
    cu_seqlens: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """Check the arguments of a scan and run it."""
    name = operator.name
    check_tensor(name, "q", q, rank=4, layout="(B, H, L, Dk)")
    check_tensor(name, "k", k, rank=4, layout="(B, H, L, Dk)")
    check_shape(name, "k", k, q.shape, "(B, H, L, Dk) like q")
    check_tensor(name, "v", v, rank=4, layout="(B, Hv, L, Dv)")
    batch, heads, length, key_width = q.shape
    _check_value_heads(name, v, heads)
    check_shape(name, "v", v, (batch, v.shape[1], length, v.shape[3]), "(B, Hv, L, Dv)")
    for argument, value in (strength, decay):
        check_tensor(name, argument, value, rank=3, layout="(B, Hv, L)")
        check_shape(name, argument, value, v.shape[:3], "(B, Hv, L)")
    check_number(name, "scale", scale)
    check_flag(name, "log_decay", log_decay)
    check_flag(name, "return_final_state", return_final_state)
    others = {strength[0]: strength[1], decay[0]: decay[1], "initial_state": initial_state}
    check_device(name, "q", q.device, k=k, v=v, **others)
    if cu_seqlens is not None:
        check_cu_seqlens(name, cu_seqlens, batch=batch, length=length, device=q.device)
        batch = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        layout = "(B, Hv, Dk, Dv)"
        if cu_seqlens is not None:
            layout = "(n, Hv, Dk, Dv), one state for each packed sequence,"
        check_tensor(name, "initial_state", initial_state, rank=4, layout=layout)
        expected = (batch, v.shape[1], key_width, v.shape[3])
        check_shape(name, "initial_state", initial_state, expected, layout)
    result: tuple[Tensor, Tensor] = dispatch(
        operator, backend, q, k, v, strength[1], decay[1], initial_state, cu_seqlens, float(scale),
        log_decay, normalize_qk, operator is NLMS,
    )  # fmt: skip
    return result


def _check_value_heads(name: str, v: Tensor, heads: int) -> None:
    if v.shape[1] != heads and (heads == 0 or v.shape[1] % heads):
        raise ValueError(
            f"{name}: v must have a multiple of the {heads} heads of q and k, got {v.shape[1]}"
        )


def _step(
    name: str,
    operator: Operator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    strength: tuple[str, Tensor],
    decay: tuple[str, Tensor],
    state: Tensor | None,
    scale: float,
    log_decay: bool,
    normalize_qk: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """Check the arguments of a step and run the scan over one token."""
    check_tensor(name, "q", q, rank=3, layout="(B, H, Dk)")
    check_tensor(name, "k", k, rank=3, layout="(B, H, Dk)")
    check_shape(name, "k", k, q.shape, "(B, H, Dk) like q")
    check_tensor(name, "v", v, rank=3, layout="(B, Hv, Dv)")
    _check_value_heads(name, v, q.shape[1])
    check_shape(name, "v", v, (q.shape[0], v.shape[1], v.shape[2]), "(B, Hv, Dv)")
    for argument, value in (strength, decay):
        check_tensor(name, argument, value, rank=2, layout="(B, Hv)")
        check_shape(name, argument, value, v.shape[:2], "(B, Hv)")
    check_device(name, "q", q.device, k=k, v=v, state=state, **dict((strength, decay)))
    if state is not None:
        check_tensor(name, "state", state, rank=4, layout="(B, Hv, Dk, Dv)")
        expected = (*v.shape[:2], q.shape[2], v.shape[2])
        check_shape(name, "state", state, expected, "(B, Hv, Dk, Dv)")
    strength = strength[0], strength[1].unsqueeze(2)
    decay = decay[0], decay[1].unsqueeze(2)
    o, new_state = _scan(
        operator, q.unsqueeze(2), k.unsqueeze(2), v.unsqueeze(2), strength, decay, scale, log_decay,
        normalize_qk, state, True, None, backend,
    )  # fmt: skip
    return o.squeeze(2), new_state
