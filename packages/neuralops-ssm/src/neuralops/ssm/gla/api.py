"""The public functions: what a user calls and reads."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from neuralops.core.dispatch import dispatch
from neuralops.core.validation import (
    check_cu_seqlens,
    check_device,
    check_flag,
    check_number,
    check_shape,
    check_tensor,
    describe,
)
from neuralops.ssm.gla.op import OPERATOR

Tensor = torch.Tensor
State = Tensor | tuple[Tensor, Tensor]


@overload
def gla_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    *,
    scale: float = ...,
    log_decay: bool = ...,
    normalize: bool = ...,
    eps: float = ...,
    reverse: bool = ...,
    initial_state: State | None = ...,
    return_final_state: Literal[False] = ...,
    cu_seqlens: Tensor | None = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def gla_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    *,
    scale: float = ...,
    log_decay: bool = ...,
    normalize: Literal[False] = ...,
    eps: float = ...,
    reverse: bool = ...,
    initial_state: Tensor | None = ...,
    return_final_state: Literal[True],
    cu_seqlens: Tensor | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def gla_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    *,
    scale: float = ...,
    log_decay: bool = ...,
    normalize: Literal[True],
    eps: float = ...,
    reverse: bool = ...,
    initial_state: tuple[Tensor, Tensor] | None = ...,
    return_final_state: Literal[True],
    cu_seqlens: Tensor | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, tuple[Tensor, Tensor]]: ...


@overload
def gla_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    *,
    scale: float = ...,
    log_decay: bool = ...,
    normalize: bool = ...,
    eps: float = ...,
    reverse: bool = ...,
    initial_state: State | None = ...,
    return_final_state: Literal[True],
    cu_seqlens: Tensor | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, State]: ...


def gla_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    *,
    scale: float = 1.0,
    log_decay: bool = False,
    normalize: bool = False,
    eps: float = 1e-4,
    reverse: bool = False,
    initial_state: State | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, State]:
    r"""Scan gated linear attention along the sequence.

    $$S_t = \mathrm{Diag}(\lambda_t)\, S_{t-1} + k_t v_t^\top, \qquad
    o_t = \mathrm{scale}\; S_t^\top q_t$$

    With `normalize` the output is divided by the weights that it sums, and the clamp has its true
    gradient:

    $$Z_t = \lambda_t \odot Z_{t-1} + k_t, \qquad
    o_t = \frac{\mathrm{scale}\; S_t^\top q_t}
    {\max(\mathrm{scale}\; q_t \cdot Z_t,\ \mathrm{eps})}$$

    Args:
        q: the queries, `(B, H, L, Dk)`. Each tensor may have its own floating dtype and any
            strides.
        k: the keys, `(B, H, L, Dk)`.
        v: the values, `(B, H, L, Dv)`.
        lambdas: the gates, `(B, H, L, Dk)`, one for each key channel, or `(B, H, L)`, one for each
            head; values in [0, 1], with `log_decay=True` their natural logarithms in [-inf, 0].
            Keep them in float32 where they come near 1: bfloat16 rounds 0.998 to 1. A gate of
            exactly 0 (log -inf) restarts its channel.
        scale: the factor of the queries. It is 1, not `Dk ** -0.5`.
        log_decay: whether `lambdas` holds natural logarithms.
        normalize: whether to divide by the decayed sum of the weights.
        eps: the least denominator.
        reverse: whether to run from the last token to the first. The state then enters at token
            L - 1 and leaves at token 0.
        initial_state: the state before the first token, `S` `(B, H, Dk, Dv)`; with `normalize` the
            tuple `(S, Z)`, `Z` `(B, H, Dk)`. Packed, the leading dimension is n, one state for each
            sequence. `None` is zero.
        return_final_state: whether to return the state after the last token as well.
        cu_seqlens: the boundaries of n packed sequences, `(n + 1,)`, int32 or int64, from 0 to at
            most L, for B = 1. Empty sequences are allowed; tokens past the last boundary give
            output 0 and gradient 0. It is not copied to the host.
        backend: `"triton"`, `"torch"` or `"reference"`; `None` takes the first that can serve.

    Returns:
        `o`, `(B, H, L, Dv)` in the dtype of `v`, contiguous; with `return_final_state=True` the
        tuple `(o, final_state)`, the state like `initial_state`, in float32 (float64 where an
        input is float64). All are differentiable in every input.

    Raises:
        TypeError: an argument is no floating tensor, or not of the documented type.
        ValueError: a shape, device or value that does not fit, or an unknown backend.
        neuralops.core.BackendUnavailableError: the requested backend cannot serve the call.

    Time is O(B H L Dk (Dv + C)) for chunks of C = 64 tokens. Memory is
    O(B H L (Dk + Dv + Dk Dv / C)); the backward keeps the inputs, and with `normalize` the output
    and the denominators.

    Source: Yang et al., *Gated Linear Attention Transformers with Hardware-Efficient Training*,
    [arXiv 2312.06635](https://arxiv.org/abs/2312.06635).

    Example:
        >>> import torch
        >>> from neuralops.ssm import gla_scan
        >>> q = k = torch.ones(1, 1, 3, 1)
        >>> v = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1)
        >>> lambdas = torch.tensor([1.0, 0.5, 0.0]).view(1, 1, 3, 1)
        >>> gla_scan(q, k, v, lambdas).flatten().tolist()
        [1.0, 2.5, 3.0]
        >>> o, (S, Z) = gla_scan(
        ...     q, k, v, lambdas, normalize=True, return_final_state=True
        ... )
        >>> o.flatten().tolist(), S.item(), Z.item()
        ([1.0, 1.6666666269302368, 3.0], 3.0, 1.0)
    """
    name = "gla_scan"
    for label, tensor in (("q", q), ("k", k)):
        check_tensor(name, label, tensor, rank=4, layout="(B, H, L, Dk)")
    check_tensor(name, "v", v, rank=4, layout="(B, H, L, Dv)")
    check_shape(name, "k", k, q.shape, "(B, H, L, Dk) like q")
    batch, heads, length, key_width = q.shape
    check_shape(name, "v", v, (batch, heads, length, v.shape[3]), "(B, H, L, Dv)")
    if isinstance(lambdas, Tensor) and lambdas.dim() == 3:
        check_tensor(name, "lambdas", lambdas, rank=3, layout="(B, H, L)")
        check_shape(name, "lambdas", lambdas, q.shape[:3], "(B, H, L) or (B, H, L, Dk)")
    else:
        check_tensor(name, "lambdas", lambdas, rank=4, layout="(B, H, L, Dk) or (B, H, L)")
        check_shape(name, "lambdas", lambdas, q.shape, "(B, H, L, Dk) like q")
    check_number(name, "scale", scale)
    check_number(name, "eps", eps)
    check_flag(name, "log_decay", log_decay)
    check_flag(name, "normalize", normalize)
    check_flag(name, "reverse", reverse)
    check_flag(name, "return_final_state", return_final_state)
    check_device(name, "q", q.device, k=k, v=v, lambdas=lambdas)
    rows, leading = batch, "B"
    if cu_seqlens is not None:
        check_cu_seqlens(name, cu_seqlens, batch=batch, length=length, device=q.device)
        rows, leading = cu_seqlens.shape[0] - 1, "n"
    state, key_sum = _state(name, "initial_state", initial_state, normalize)
    if initial_state is not None:
        shape = (rows, heads, key_width, v.shape[3])
        _check_state(name, "initial_state", state, key_sum, shape, leading, q.device, normalize)

    out, final_state, final_key_sum = dispatch(
        OPERATOR, backend, q, k, v, lambdas, state, key_sum, cu_seqlens,
        float(scale), log_decay, normalize, float(eps), reverse,
    )  # fmt: skip
    result: Tensor | tuple[Tensor, State] = out
    if return_final_state:
        result = out, (final_state, final_key_sum) if normalize else final_state
    return result


def _state(
    operator: str, name: str, state: Any, normalize: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Take a state apart into ``S`` and ``Z``."""
    if state is None:
        return None, None
    if not normalize:
        return state, None
    if not isinstance(state, tuple) or len(state) != 2:
        raise TypeError(
            f"{operator}: {name} must be the tuple (S, Z) with normalize=True, "
            f"got {describe(state)}"
        )
    return state


def _check_state(
    operator: str,
    name: str,
    state: Any,
    key_sum: Any,
    shape: tuple[int, int, int, int],
    leading: str,
    device: torch.device,
    normalize: bool,
) -> None:
    parts = [(name, state, 4, f"({leading}, H, Dk, Dv)")]
    if normalize:
        parts.append((f"Z of {name}", key_sum, 3, f"({leading}, H, Dk)"))
    for label, tensor, rank, layout in parts:
        check_tensor(operator, label, tensor, rank=rank, layout=layout)
        check_shape(operator, label, tensor, shape[:rank], layout)
        check_device(operator, "q", device, **{label: tensor})


@overload
def gla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    state: Tensor | None,
    *,
    scale: float = ...,
    log_decay: bool = ...,
    normalize: Literal[False] = ...,
    eps: float = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def gla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    state: tuple[Tensor, Tensor] | None,
    *,
    scale: float = ...,
    log_decay: bool = ...,
    normalize: Literal[True],
    eps: float = ...,
    backend: str | None = ...,
) -> tuple[Tensor, tuple[Tensor, Tensor]]: ...


def gla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambdas: Tensor,
    state: State | None,
    *,
    scale: float = 1.0,
    log_decay: bool = False,
    normalize: bool = False,
    eps: float = 1e-4,
    backend: str | None = None,
) -> tuple[Tensor, State]:
    """Advance `gla_scan` by one token, for generation.

    It runs the scan's own implementation over one token, so that a prefill followed by steps gives
    the numbers of one scan.

    Args:
        q: the query of this token, `(B, H, Dk)`.
        k: its key, `(B, H, Dk)`.
        v: its value, `(B, H, Dv)`.
        lambdas: its gates, `(B, H, Dk)` or `(B, H)`.
        state: the state so far, `S` `(B, H, Dk, Dv)` or with `normalize` the tuple `(S, Z)`, as the
            scan returned it; `None` is zero.
        scale: as in the scan.
        log_decay: as in the scan.
        normalize: as in the scan.
        eps: as in the scan.
        backend: as in the scan.

    Returns:
        The tuple `(o, new_state)`, the output `(B, H, Dv)` in the dtype of `v` and the new state in
        float32 (float64 where an input is float64). `state` is left as it is.

    Raises:
        TypeError: as in the scan.
        ValueError: as in the scan.

    Time and memory are O(B H Dk Dv).

    Source: as the scan.

    Example:
        >>> import torch
        >>> from neuralops.ssm import gla_step
        >>> one = torch.ones(1, 1, 1)
        >>> o, S = gla_step(one, one, 3 * one, 0.5 * one, torch.full((1, 1, 1, 1), 4.0))
        >>> o.item(), S.item()
        (5.0, 5.0)
    """
    name = "gla_step"
    for label, tensor in (("q", q), ("k", k)):
        check_tensor(name, label, tensor, rank=3, layout="(B, H, Dk)")
    check_tensor(name, "v", v, rank=3, layout="(B, H, Dv)")
    check_shape(name, "k", k, q.shape, "(B, H, Dk) like q")
    batch, heads, key_width = q.shape
    check_shape(name, "v", v, (batch, heads, v.shape[2]), "(B, H, Dv)")
    scalar = isinstance(lambdas, Tensor) and lambdas.dim() == 2
    if scalar:
        check_tensor(name, "lambdas", lambdas, rank=2, layout="(B, H)")
        check_shape(name, "lambdas", lambdas, q.shape[:2], "(B, H) or (B, H, Dk)")
    else:
        check_tensor(name, "lambdas", lambdas, rank=3, layout="(B, H, Dk) or (B, H)")
        check_shape(name, "lambdas", lambdas, q.shape, "(B, H, Dk) like q")
    check_flag(name, "normalize", normalize)
    check_device(name, "q", q.device, k=k, v=v, lambdas=lambdas)
    matrix, key_sum = _state(name, "state", state, normalize)
    if state is not None:
        shape = (batch, heads, key_width, v.shape[2])
        _check_state(name, "state", matrix, key_sum, shape, "B", q.device, normalize)
    out, new_state = gla_scan(
        q.unsqueeze(2),
        k.unsqueeze(2),
        v.unsqueeze(2),
        lambdas.unsqueeze(2),
        scale=scale,
        log_decay=log_decay,
        normalize=normalize,
        eps=eps,
        initial_state=state,
        return_final_state=True,
        backend=backend,
    )
    return out.squeeze(2), new_state
