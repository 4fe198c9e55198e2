"""The public functions: what a user calls and reads."""

from __future__ import annotations

from typing import Literal, overload

import torch

from neuralops.core.dispatch import dispatch
from neuralops.core.validation import (
    check_cu_seqlens,
    check_device,
    check_flag,
    check_number,
    check_shape,
    check_tensor,
)
from neuralops.ssm.hgrn2.op import OPERATOR

Tensor = torch.Tensor


@overload
def hgrn2_scan(
    f: Tensor,
    iv: Tensor,
    res_clip: float | None = ...,
    *,
    log_decay: bool = ...,
    reverse: bool = ...,
    initial_state: Tensor | None = ...,
    return_final_state: Literal[False] = ...,
    cu_seqlens: Tensor | None = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def hgrn2_scan(
    f: Tensor,
    iv: Tensor,
    res_clip: float | None = ...,
    *,
    log_decay: bool = ...,
    reverse: bool = ...,
    initial_state: Tensor | None = ...,
    return_final_state: Literal[True],
    cu_seqlens: Tensor | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def hgrn2_scan(
    f: Tensor,
    iv: Tensor,
    res_clip: float | None = None,
    *,
    log_decay: bool = False,
    reverse: bool = False,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Scan the gated elementwise recurrence of HGRN and HGRN2 along the sequence.

    $$h_t = f_t\, h_{t-1} + iv_t$$

    With `res_clip` $= c > 0$ the clip is part of the recurrence,
    $h_t = \min(\max(f_t h_{t-1} + iv_t, -c), c)$, and its gradient is 0 where $|h_t| \ge c$.

    The caller forms `iv = (1 - f) * i`. This is the elementwise recurrence; the HGRN2 layer with
    its expanded state is gated linear attention with the key $1 - f$.

    Args:
        f: the forget gate, `(B, L, D)`, with values in [0, 1]; with `log_decay=True` their natural
            logarithms in [-inf, 0]. Keep it in float32 where gates come near 1: bfloat16 rounds
            0.998 to 1. A gate of exactly 0 (log -inf) restarts the recurrence.
        iv: the gated input, `(B, L, D)`. Each tensor may have its own floating dtype and any
            strides.
        res_clip: the bound of the state's absolute value; `None`, 0 or less turns it off.
            `initial_state` itself is not clipped.
        log_decay: whether `f` holds natural logarithms.
        reverse: whether to run from the last token to the first. The state then enters at token
            L - 1 and leaves at token 0.
        initial_state: the state before the first token, `(B, D)`; packed, `(n, D)`, one for each
            sequence. `None` is zero.
        return_final_state: whether to return the state after the last token as well.
        cu_seqlens: the boundaries of n packed sequences, `(n + 1,)`, int32 or int64, from 0 to at
            most L, for B = 1. Empty sequences are allowed; tokens past the last boundary give
            output 0 and gradient 0. It is not copied to the host.
        backend: `"triton"`, `"torch"` or `"reference"`; `None` takes the first that can serve.

    Returns:
        `h`, `(B, L, D)` in the dtype of `iv`, contiguous; with `return_final_state=True` the tuple
        `(h, final_state)`, the state `(B, D)` or `(n, D)` in float32 (float64 where an input is
        float64). Both are differentiable in `f`, `iv` and `initial_state`.

    Raises:
        TypeError: an argument is no floating tensor, or not of the documented type.
        ValueError: a shape, device or value that does not fit, or an unknown backend.
        neuralops.core.BackendUnavailableError: the requested backend cannot serve the call.

    Time is O(B L D). Memory is O(B L D): the backward keeps `f` and `h`, and one bit an element
    where the state is clipped.

    Source: Qin et al., *HGRN2: Gated Linear RNNs with State Expansion*,
    [arXiv 2404.07904](https://arxiv.org/abs/2404.07904), after *Hierarchically Gated Recurrent
    Neural Network*, [arXiv 2311.04823](https://arxiv.org/abs/2311.04823).

    Example:
        >>> import torch
        >>> from neuralops.ssm import hgrn2_scan
        >>> f = torch.tensor([[[0.5], [0.5], [0.0]]])
        >>> iv = torch.ones(1, 3, 1)
        >>> hgrn2_scan(f, iv).flatten().tolist()
        [1.0, 1.5, 1.0]
        >>> h, state = hgrn2_scan(f[:, :2], iv[:, :2], return_final_state=True)
        >>> hgrn2_scan(f[:, 2:], iv[:, 2:], initial_state=state).item()
        1.0
    """
    name = "hgrn2_scan"
    check_tensor(name, "f", f, rank=3, layout="(B, L, D)")
    check_tensor(name, "iv", iv, rank=3, layout="(B, L, D)")
    check_shape(name, "iv", iv, f.shape, "(B, L, D) like f")
    check_flag(name, "log_decay", log_decay)
    check_flag(name, "reverse", reverse)
    check_flag(name, "return_final_state", return_final_state)
    if res_clip is not None:
        check_number(name, "res_clip", res_clip)
    batch, length, channels = f.shape
    check_device(name, "f", f.device, iv=iv, initial_state=initial_state)
    if cu_seqlens is not None:
        check_cu_seqlens(name, cu_seqlens, batch=batch, length=length, device=f.device)
        batch = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        layout = "(B, D)" if cu_seqlens is None else "(n, D), one state for each packed sequence,"
        check_tensor(name, "initial_state", initial_state, rank=2, layout=layout)
        check_shape(name, "initial_state", initial_state, (batch, channels), layout)

    clip = float(res_clip) if res_clip is not None and res_clip > 0 else None
    h, final_state = dispatch(
        OPERATOR, backend, f, iv, initial_state, cu_seqlens, clip, log_decay, reverse
    )
    return (h, final_state) if return_final_state else h


def hgrn2_step(
    f: Tensor,
    iv: Tensor,
    state: Tensor | None,
    res_clip: float | None = None,
    *,
    log_decay: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Advance `hgrn2_scan` by one token, for generation.

    It runs the scan's own implementation over one token, so that a prefill followed by steps gives
    the numbers of one scan.

    Args:
        f: the forget gate of this token, `(B, D)`.
        iv: the gated input of this token, `(B, D)`.
        state: the state so far, `(B, D)`, as the scan returned it; `None` is zero.
        res_clip: as in the scan.
        log_decay: as in the scan.
        backend: as in the scan.

    Returns:
        The tuple `(h, new_state)`, the output `(B, D)` in the dtype of `iv` and the new state
        `(B, D)` in float32 (float64 where an input is float64). `state` is left as it is.

    Raises:
        TypeError: as in the scan.
        ValueError: as in the scan.

    Time and memory are O(B D).

    Source: as the scan.

    Example:
        >>> import torch
        >>> from neuralops.ssm import hgrn2_step
        >>> h, state = hgrn2_step(torch.tensor([[0.5]]), torch.ones(1, 1), torch.ones(1, 1))
        >>> state.item()
        1.5
    """
    name = "hgrn2_step"
    check_tensor(name, "f", f, rank=2, layout="(B, D)")
    check_tensor(name, "iv", iv, rank=2, layout="(B, D)")
    check_shape(name, "iv", iv, f.shape, "(B, D) like f")
    check_device(name, "f", f.device, iv=iv, state=state)
    if state is not None:
        check_tensor(name, "state", state, rank=2, layout="(B, D)")
        check_shape(name, "state", state, f.shape, "(B, D) like f")
    h, new_state = hgrn2_scan(
        f.unsqueeze(1),
        iv.unsqueeze(1),
        res_clip,
        log_decay=log_decay,
        initial_state=state,
        return_final_state=True,
        backend=backend,
    )
    return h.squeeze(1), new_state
