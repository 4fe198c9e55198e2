"""The public functions: what a user calls and reads."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, overload

import torch

from neuralops.core.dispatch import dispatch
from neuralops.core.precision import state_dtype
from neuralops.core.validation import (
    check_cu_seqlens,
    check_device,
    check_flag,
    check_number,
    check_shape,
    check_tensor,
    describe,
)
from neuralops.ssm.fms.op import OPERATOR

Tensor = torch.Tensor
State: TypeAlias = "Tensor | tuple[Tensor, Tensor]"

FEATURE_MAPS = ("elu+1", "relu", "identity")


@overload
def fms_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | float,
    *,
    feature_map: str = ...,
    normalize: bool = ...,
    scale: float | None = ...,
    eps: float = ...,
    log_decay: bool = ...,
    reverse: bool = ...,
    initial_state: State | None = ...,
    return_final_state: Literal[False] = ...,
    cu_seqlens: Tensor | None = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def fms_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | float,
    *,
    feature_map: str = ...,
    normalize: bool = ...,
    scale: float | None = ...,
    eps: float = ...,
    log_decay: bool = ...,
    reverse: bool = ...,
    initial_state: State | None = ...,
    return_final_state: Literal[True],
    cu_seqlens: Tensor | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, State]: ...


def fms_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | float,
    *,
    feature_map: str = "elu+1",
    normalize: bool = True,
    scale: float | None = None,
    eps: float = 1e-5,
    log_decay: bool = False,
    reverse: bool = False,
    initial_state: State | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, State]:
    r"""Scan a factorised matrix state with a constant decay for each head along the sequence.

    With $q'_t = \phi(q_t)$, $k'_t = \mathtt{scale}\,\phi(k_t)$ and the head's decay $d$,

    $$S_t = d\, S_{t-1} + k'_t v_t^\top, \qquad Z_t = d\, Z_{t-1} + k'_t, \qquad
    o_t = \frac{S_t^\top q'_t}{\max(q'_t \cdot Z_t, \mathtt{eps})}$$

    and without `normalize` $o_t = S_t^\top q'_t$. The clamp of the denominator has its true
    gradient.
    With `feature_map="identity", normalize=False` this is retention, or lightning attention with a
    constant decay.

    Args:
        q: the queries, `(B, H, L, Dk)`.
        k: the keys, `(B, H, L, Dk)`.
        v: the values, `(B, H, L, Dv)`. Each tensor may have its own floating dtype and any strides.
        decay: a float, a tensor of one element, or one of any shape that squeezes to `(H,)`; values
            in [0, 1], or with `log_decay=True` their natural logarithms in [-inf, 0]. A tensor is
            differentiated. Keep it in float32: bfloat16 rounds 0.998 to 1. With 0 every token
            stands alone.
        feature_map: $\phi$: `"elu+1"`, which is exp(x) below 0, `"relu"` or `"identity"`.
        normalize: whether to divide by the decayed sum of the weights.
        scale: the factor of the mapped keys; `None` is $1/\sqrt{D_k}$.
        eps: the least denominator.
        log_decay: whether `decay` is a natural logarithm.
        reverse: whether to run from the last token to the first. The state then enters at token
            L - 1 and leaves at token 0.
        initial_state: the state before the first token: with `normalize` the tuple `(S, Z)`, `S`
            `(B, H, Dk, Dv)` and `Z` `(B, H, Dk)`, else `S` alone; packed, with one row for each of
            the n sequences in the place of B. `None` is zero.
        return_final_state: whether to return the state after the last token as well.
        cu_seqlens: the boundaries of n packed sequences, `(n + 1,)`, int32 or int64, from 0 to at
            most L, for B = 1. Empty sequences are allowed; tokens past the last boundary give
            output 0 and gradient 0. It is not copied to the host.
        backend: `"triton"`, `"torch"` or `"reference"`; `None` takes the first that can serve.

    Returns:
        The output, `(B, H, L, Dv)` in the dtype of `v`, contiguous; with `return_final_state=True`
        the tuple of it and the final state, which has the form of `initial_state`, in float32
        (float64 where an input is float64). All are differentiable in every tensor.

    Raises:
        TypeError: an argument is no floating tensor, or not of the documented type.
        ValueError: a shape, device or value that does not fit, or an unknown backend.
        neuralops.core.BackendUnavailableError: the requested backend cannot serve the call.

    Time is O(B H L Dk Dv). Memory is that of the inputs and the output, and with `normalize` one
    float a token and head for the backward.

    Source: Katharopoulos et al., *Transformers are RNNs*,
    [arXiv 2006.16236](https://arxiv.org/abs/2006.16236), for the map and the normaliser; Sun et
    al., *Retentive Network*, [arXiv 2307.08621](https://arxiv.org/abs/2307.08621), for the decay.

    Example:
        >>> import torch
        >>> from neuralops.ssm import fms_scan
        >>> q = k = torch.ones(1, 1, 3, 1)
        >>> v = torch.tensor([1.0, 2.0, 6.0]).view(1, 1, 3, 1)
        >>> fms_scan(q, k, v, 1.0).flatten().tolist()
        [1.0, 1.5, 3.0]
        >>> fms_scan(q, k, v, 0.5, feature_map="identity", normalize=False).flatten().tolist()
        [1.0, 2.5, 7.25]
    """
    name = "fms_scan"
    check_tensor(name, "q", q, rank=4, layout="(B, H, L, Dk)")
    check_tensor(name, "k", k, rank=4, layout="(B, H, L, Dk)")
    check_tensor(name, "v", v, rank=4, layout="(B, H, L, Dv)")
    check_shape(name, "k", k, q.shape, "(B, H, L, Dk) like q")
    check_shape(name, "v", v, (*q.shape[:3], v.shape[3]), "(B, H, L, Dv) like q")
    check_flag(name, "normalize", normalize)
    check_flag(name, "log_decay", log_decay)
    check_flag(name, "reverse", reverse)
    check_flag(name, "return_final_state", return_final_state)
    check_number(name, "eps", eps)
    if not isinstance(feature_map, str) or feature_map not in FEATURE_MAPS:
        raise ValueError(
            f"{name}: feature_map must be one of {', '.join(FEATURE_MAPS)}, got {feature_map!r}"
        )
    if scale is not None:
        check_number(name, "scale", scale)
    batch, heads, length, width = q.shape
    check_device(name, "q", q.device, k=k, v=v, decay=decay)
    gate = _head_decay(name, q, k, v, decay, log_decay)
    if cu_seqlens is not None:
        check_cu_seqlens(name, cu_seqlens, batch=batch, length=length, device=q.device)
        batch = cu_seqlens.shape[0] - 1
    shape = (batch, heads, width, v.shape[3])
    state, key_sum = _split_state(name, initial_state, shape, normalize, cu_seqlens is not None)
    check_device(name, "q", q.device, initial_state=state)
    check_device(name, "q", q.device, initial_state=key_sum)

    key_scale = float(scale) if scale is not None else max(width, 1) ** -0.5
    results: tuple[Tensor, Tensor, Any] = dispatch(
        OPERATOR, backend, q, k, v, gate, state, key_sum, cu_seqlens,
        feature_map, 1.0, key_scale, normalize, float(eps), log_decay, reverse,
    )  # fmt: skip
    out, final_state, final_key_sum = results
    if not return_final_state:
        return out
    return out, (final_state, final_key_sum) if normalize else final_state


def _head_decay(
    name: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | float, log_decay: bool
) -> Tensor:
    """The decay as a tensor ``(H,)``."""
    heads = q.shape[1]
    if not isinstance(decay, Tensor):
        check_number(name, "decay", decay)
        if decay > 0 if log_decay else not 0 <= decay <= 1:
            bounds = "a logarithm, at most 0" if log_decay else "in [0, 1]"
            raise ValueError(f"{name}: decay must be {bounds}, got {decay}")
        return torch.full((heads,), float(decay), dtype=state_dtype(q, k, v), device=q.device)
    check_tensor(name, "decay", decay, rank=decay.dim(), layout="that squeezes to (H,)")
    if decay.numel() == 1:
        return decay.reshape(1).expand(heads)
    if max(decay.shape, default=1) != decay.numel() or decay.numel() != heads:
        raise ValueError(
            f"{name}: decay must be a float, or a tensor of one element or of a shape that "
            f"squeezes to (H,) = ({heads},), got {describe(decay)}"
        )
    return decay.reshape(heads)


def _split_state(
    name: str, given: object, shape: tuple[int, ...], normalize: bool, packed: bool
) -> tuple[Tensor | None, Tensor | None]:
    if given is None:
        return None, None
    rows = "n" if packed else "B"
    if not normalize:
        if isinstance(given, tuple):
            raise TypeError(
                f"{name}: initial_state must be a tensor ({rows}, H, Dk, Dv) where normalize is "
                "False, got a tuple; there is no key sum without the normaliser"
            )
        return _state(name, "initial_state", given, shape, f"({rows}, H, Dk, Dv)"), None
    if not isinstance(given, tuple) or len(given) != 2:
        raise TypeError(
            f"{name}: initial_state must be the tuple (S, Z) of the state ({rows}, H, Dk, Dv) and "
            f"the key sum ({rows}, H, Dk) where normalize is True, got {describe(given)}"
        )
    state = _state(name, "S of initial_state", given[0], shape, f"({rows}, H, Dk, Dv)")
    key_sum = _state(name, "Z of initial_state", given[1], shape[:-1], f"({rows}, H, Dk)")
    return state, key_sum


def _state(operator: str, name: str, value: Any, shape: tuple[int, ...], layout: str) -> Tensor:
    check_tensor(operator, name, value, rank=len(shape), layout=layout)
    check_shape(operator, name, value, shape, layout)
    state: Tensor = value
    return state


def fms_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | float,
    state: State | None,
    *,
    feature_map: str = "elu+1",
    normalize: bool = True,
    scale: float | None = None,
    eps: float = 1e-5,
    log_decay: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, State]:
    """Advance `fms_scan` by one token, for generation.

    It runs the scan's own implementation over one token, so that a prefill followed by steps gives
    the numbers of one scan.

    Args:
        q: the query of this token, `(B, H, Dk)`.
        k: the key of this token, `(B, H, Dk)`.
        v: the value of this token, `(B, H, Dv)`.
        decay: as in the scan.
        state: the state so far, as the scan returned it; `None` is zero.
        feature_map: as in the scan.
        normalize: as in the scan.
        scale: as in the scan.
        eps: as in the scan.
        log_decay: as in the scan.
        backend: as in the scan.

    Returns:
        The tuple `(out, new_state)`, the output `(B, H, Dv)` in the dtype of `v` and the new state
        in the form of `state`. `state` is left as it is.

    Raises:
        TypeError: as in the scan.
        ValueError: as in the scan.

    Time and memory are O(B H Dk Dv).

    Source: as the scan.

    Example:
        >>> import torch
        >>> from neuralops.ssm import fms_step
        >>> q = k = v = torch.ones(1, 1, 1)
        >>> out, state = fms_step(q, k, v, 0.5, None)
        >>> out, state = fms_step(q, k, 4 * v, 0.5, state)
        >>> out.item()
        3.0
    """
    name = "fms_step"
    check_tensor(name, "q", q, rank=3, layout="(B, H, Dk)")
    check_tensor(name, "k", k, rank=3, layout="(B, H, Dk)")
    check_tensor(name, "v", v, rank=3, layout="(B, H, Dv)")
    check_shape(name, "k", k, q.shape, "(B, H, Dk) like q")
    check_shape(name, "v", v, (*q.shape[:2], v.shape[2]), "(B, H, Dv) like q")
    out, new_state = fms_scan(
        q.unsqueeze(2),
        k.unsqueeze(2),
        v.unsqueeze(2),
        decay,
        feature_map=feature_map,
        normalize=normalize,
        scale=scale,
        eps=eps,
        log_decay=log_decay,
        initial_state=state,
        return_final_state=True,
        backend=backend,
    )
    return out.squeeze(2), new_state
