"""The PyTorch form: every chunk of the sequence at once, with a short carry across the chunks.

Within a chunk the outputs are two matrix products around a triangular matrix of decays; a loop over
the chunks, never over tokens, carries the state. Packed sequences are laid out anew, so that each
chunk belongs to one of them; the layout is computed on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neuralops.core.precision import state_dtype

Tensor = torch.Tensor

CHUNK = 64
SMALLEST_GATE = 2.0**-100
"""A gate below it restarts the scan; what it lets through is kept as a factor of its own."""


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    cu_seqlens: Tensor | None,
    feature_map: str,
    query_scale: float,
    key_scale: float,
    normalize: bool,
    eps: float,
    log_decay: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""Compute the scan; differentiable any number of times.

    With $q' = \mathtt{query\_scale}\,\phi(q)$ and $k' = \mathtt{key\_scale}\,\phi(k)$:
    $S_t = g_t S_{t-1} + k'_t v_t^\top$, $Z_t = g_t Z_{t-1} + k'_t$, and the output
    $S_t^\top q'_t$, divided by $\max(q'_t \cdot Z_t, \mathtt{eps})$ if ``normalize``.

    Args:
        q: ``(B, H, L, Dk)``.
        k: ``(B, H, L, Dk)``.
        v: ``(B, H, L, Dv)``.
        gate: ``(H,)``, a constant decay, or ``(B, H, L)``.
        initial_state: ``(B, H, Dk, Dv)``; packed, ``(n, H, Dk, Dv)``.
        initial_key_sum: ``(B, H, Dk)`` or ``(n, H, Dk)``; only if ``normalize``.
        cu_seqlens: ``(n + 1,)``, the boundaries of packed sequences.
        feature_map: ``"elu+1"``, ``"relu"`` or ``"identity"``, applied to q and k.
        query_scale: the factor of the mapped queries.
        key_scale: the factor of the mapped keys.
        normalize: whether the output is divided by the decayed sum of the weights.
        eps: the least denominator.
        log_decay: whether ``gate`` holds natural logarithms.
        reverse: whether to run from the last token to the first.

    Returns:
        The output ``(B, H, L, Dv)`` in the dtype of v, the final state, and the final key sum or
        ``None``.
    """
    dtype = state_dtype(q, k, v, gate, initial_state, initial_key_sum)
    queries = _map(q.to(dtype), feature_map, query_scale)
    keys = _map(k.to(dtype), feature_map, key_scale)
    values, gate = v.to(dtype), gate.to(dtype)
    if normalize:
        # The key sum is the state of a value that is always 1.
        values = torch.cat((values, torch.ones_like(values[..., :1])), -1)
    state = _initial(queries, values, initial_state, initial_key_sum, cu_seqlens, normalize)
    if q.shape[2] == 0:
        out = (queries[..., :1] * values).sum(-1, keepdim=True) * v
        final = state.clone()
    else:
        layout = _layout(q.shape[2], cu_seqlens, reverse, q.device)
        out, final = _chunks(queries, keys, values, gate, state, layout, log_decay)
        if normalize:
            out = out[..., :-1] / out[..., -1:].clamp(min=eps)
    if not normalize:
        return out.to(v.dtype), final, None
    return out.to(v.dtype), final[..., :-1].contiguous(), final[..., -1].contiguous()


def _map(x: Tensor, feature_map: str, scale: float) -> Tensor:
    if feature_map == "elu+1":
        x = x.clamp(max=0.0).exp() + x.relu()
    elif feature_map == "relu":
        x = x.relu()
    return x if scale == 1.0 else x * scale


def _initial(
    keys: Tensor,
    values: Tensor,
    state: Tensor | None,
    key_sum: Tensor | None,
    cu_seqlens: Tensor | None,
    normalize: bool,
) -> Tensor:
    """The first state, with the key sum as its last column if ``normalize``."""
    batch, heads = keys.shape[:2]
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (rows, heads, keys.shape[-1], values.shape[-1])
    if state is None and key_sum is None:
        return keys.new_zeros(shape)
    if not normalize:
        assert state is not None
        return state.to(keys.dtype)
    columns = shape[-1] - 1
    if state is None:
        state = keys.new_zeros((*shape[:-1], columns))
    if key_sum is None:
        key_sum = keys.new_zeros(shape[:-1])
    return torch.cat((state.to(keys.dtype), key_sum.to(keys.dtype).unsqueeze(-1)), -1)


@dataclass(frozen=True)
class _Layout:
    """How the tokens lie in chunks of ``size`` tokens, ``chunks`` of them, all in scan order.

    Attributes:
        lengths: ``(chunks,)``, how many tokens each chunk holds.
        rows: ``(chunks * size,)``, the row of each token, where they are not simply in order.
        tokens: ``(L,)``, the inverse of ``rows``.
        past: ``(L,)``, the rows in no sequence.
        segments: ``(chunks,)``, the packed sequence of each chunk.
        first: ``(chunks,)``, whether it is the sequence's first chunk.
        last: ``(n,)``, each sequence's last chunk.
        empty: ``(n,)``, whether the sequence has none.
    """

    size: int
    chunks: int
    reverse: bool
    lengths: Tensor
    rows: Tensor | None = None
    tokens: Tensor | None = None
    past: Tensor | None = None
    segments: Tensor | None = None
    first: Tensor | None = None
    last: Tensor | None = None
    empty: Tensor | None = None


def _layout(
    length: int, cu_seqlens: Tensor | None, reverse: bool, device: torch.device
) -> _Layout:
    size = min(CHUNK, length)
    if cu_seqlens is None:
        chunks = -(-length // size)
        starts = torch.arange(0, length, size, device=device)
        return _Layout(size, chunks, reverse, (length - starts).clamp(max=size))

    bounds = cu_seqlens.long().clamp(0, length)
    starts, lengths = bounds[:-1], bounds.diff().clamp(min=0)
    segments = starts.shape[0]
    chunks = length // size + segments
    counts = (lengths + (size - 1)) // size
    ends = counts.cumsum(0)
    index = torch.arange(chunks, device=device)
    if segments == 0:
        starts, lengths, ends, counts = (index.new_zeros(1) for _ in range(4))
    segment = torch.searchsorted(ends, index, right=True)
    used = segment < ends.shape[0]
    segment = segment.clamp(max=ends.shape[0] - 1)
    before = (index - (ends - counts)[segment]) * size
    inside = torch.where(used, (lengths[segment] - before).clamp(0, size), 0)

    position = torch.arange(size, device=device)
    local = before.unsqueeze(1) + position
    if reverse:
        local = lengths[segment].unsqueeze(1) - 1 - local
    rows = (starts[segment].unsqueeze(1) + local).clamp(0, length - 1)

    token = torch.arange(length, device=device)
    owner = torch.searchsorted(bounds[1:].contiguous(), token, right=True)
    past = owner >= segments
    owner = owner.clamp(max=max(segments - 1, 0))
    local = token - starts[owner]
    if reverse:
        local = lengths[owner] - 1 - local
    place = ((ends - counts)[owner] * size + local).clamp(0, max(chunks * size - 1, 0))
    return _Layout(
        size, chunks, reverse, inside, rows.flatten(), place, past,
        segment, (before == 0) & used, (ends - 1).clamp(min=0)[:segments],
        (lengths == 0)[:segments],
    )  # fmt: skip


def _in_chunks(x: Tensor, layout: _Layout, fill: float = 0.0) -> Tensor:
    """Lay out ``x (B, H, L, ...)`` as ``(B, H, chunks, size, ...)``."""
    length = x.shape[2]
    if layout.rows is not None:
        x = x.index_select(2, layout.rows).unflatten(2, (layout.chunks, layout.size))
        position = torch.arange(layout.size, device=x.device)
        outside = position >= layout.lengths.unsqueeze(1)
        return x.masked_fill(outside.view(outside.shape + (1,) * (x.dim() - 4)), fill)
    if layout.reverse:
        x = x.flip(2)
    missing = layout.chunks * layout.size - length
    if missing:
        tail = x.new_full((*x.shape[:2], missing, *x.shape[3:]), fill)
        x = torch.cat((x, tail), 2)
    return x.unflatten(2, (layout.chunks, layout.size))


def _in_rows(x: Tensor, layout: _Layout, length: int) -> Tensor:
    """Lay out ``x (B, H, chunks, size, D)`` as ``(B, H, L, D)``."""
    x = x.flatten(2, 3)
    if layout.tokens is not None and layout.past is not None:
        if x.shape[2] == 0:
            return x.new_zeros((*x.shape[:2], length, x.shape[3]))
        return x.index_select(2, layout.tokens).masked_fill(layout.past.unsqueeze(1), 0.0)
    x = x[:, :, :length]
    return x.flip(2) if layout.reverse else x


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: Tensor, layout: _Layout, log_decay: bool
) -> tuple[Tensor, Tensor]:
    length = q.shape[2]
    q, k, v = (_in_chunks(x, layout) for x in (q, k, v))
    if gate.dim() == 1:
        pairs, entry, exit_, total = _constant_decays(gate, layout, log_decay)
    else:
        gate = _in_chunks(gate, layout, 0.0 if log_decay else 1.0)
        pairs, entry, exit_, total = _token_decays(gate, log_decay)

    local = (k * exit_.unsqueeze(-1)).transpose(-1, -2) @ v
    entering, final = _carry(local, total[..., None, None], state, layout)
    out = (q @ k.transpose(-1, -2) * pairs) @ v + (q * entry.unsqueeze(-1)) @ entering
    return _in_rows(out, layout, length), final


def _carry(
    local: Tensor, total: Tensor, state: Tensor, layout: _Layout
) -> tuple[Tensor, Tensor]:
    """Return the states that enter the chunks, and those that leave the sequences."""
    chunks = layout.chunks
    steps, decays = local.unbind(2), total.expand(*local.shape[:3], 1, 1).unbind(2)
    if layout.segments is None:
        entering = []
        for step, decay in zip(steps, decays):
            entering.append(state)
            state = torch.addcmul(step, decay, state)
        return torch.stack(entering, 2), state

    assert layout.first is not None and layout.last is not None and layout.empty is not None
    if state.shape[0] == 0 or chunks == 0:
        return torch.zeros_like(local), state.clone()
    own = state.index_select(0, layout.segments).transpose(0, 1).unsqueeze(0)
    firsts = own.unbind(2)
    current = torch.zeros_like(firsts[0])
    entering, leaving = [], []
    for i in range(chunks):
        current = torch.where(layout.first[i], firsts[i], current)
        entering.append(current)
        current = torch.addcmul(steps[i], decays[i], current)
        leaving.append(current)
    final = torch.stack(leaving, 2).index_select(2, layout.last)[0].transpose(0, 1)
    final = torch.where(layout.empty.view(-1, 1, 1, 1), state, final)
    return torch.stack(entering, 2), final


Decays = tuple[Tensor, Tensor, Tensor, Tensor]
"""The decays from token s to token r of each chunk (lower triangle, 0 above it), from before the
chunk to each token, from each token to after the chunk, and through the chunk:
``(..., chunks, size, size)``, twice ``(..., chunks, size)`` and ``(..., chunks)``."""


def _constant_decays(gate: Tensor, layout: _Layout, log_decay: bool) -> Decays:
    position = torch.arange(layout.size, device=gate.device)
    distance = position.unsqueeze(1) - position
    lengths = layout.lengths
    to_end = (lengths.unsqueeze(1) - 1 - position).clamp(min=0)
    pairs = _power(gate.view(-1, 1, 1), distance.clamp(min=0), log_decay)
    pairs = pairs.masked_fill(distance < 0, 0.0).unsqueeze(1)
    entry = _power(gate.view(-1, 1, 1), position + 1, log_decay)
    exit_ = _power(gate.view(-1, 1, 1), to_end, log_decay)
    return pairs, entry, exit_, _power(gate.view(-1, 1), lengths, log_decay)


def _power(gate: Tensor, exponent: Tensor, log_decay: bool) -> Tensor:
    if not log_decay:
        return gate.pow(exponent.to(gate.dtype))
    return (gate * exponent).masked_fill(exponent == 0, 0.0).exp()


def _token_decays(gate: Tensor, log_decay: bool) -> Decays:
    """Decays by differences of cumulative logarithms between two restarts.

    A gate that restarts counts as 1 there. Between tokens on its two sides the decay is that gate
    times the others, and across two such gates the product of both: 0, or next to it, but the
    gradients of the gate come from there.
    """
    value = gate.exp() if log_decay else gate
    restart = value < SMALLEST_GATE
    if log_decay:
        logs = gate.masked_fill(restart, 0.0)
    else:
        logs = value.masked_fill(restart, 1.0).log()
    sums, ids = logs.cumsum(-1), restart.cumsum(-1)
    size = gate.shape[-1]
    position = torch.arange(size, device=gate.device)

    # Column 0 stands for the place before the chunk.
    before_sums = torch.nn.functional.pad(sums, (1, 0))
    before_ids = torch.nn.functional.pad(ids, (1, 0))
    crossed = ids.unsqueeze(-1) - before_ids.unsqueeze(-2)
    after = position.unsqueeze(1) < position - 0
    after = torch.nn.functional.pad(after, (1, 0))
    exponent = sums.unsqueeze(-1) - before_sums.unsqueeze(-2)
    decays = exponent.masked_fill(after | (crossed > 2), -torch.inf).exp()
    through = gate.requires_grad and torch.is_grad_enabled()
    if through:
        last = torch.where(restart, position, -1).cummax(-1).values
        one = value.gather(-1, last.clamp(min=0))
        previous = last.gather(-1, (last - 1).clamp(min=0))
        two = one * value.gather(-1, previous.clamp(min=0))
        factor = torch.where(crossed == 1, one.unsqueeze(-1), two.unsqueeze(-1))
        decays = torch.where(crossed == 0, decays, decays * factor)
    else:
        decays = decays.masked_fill(crossed > 0, 0.0)
    pairs, entry = decays[..., 1:], decays[..., 0]
    return pairs, entry, pairs[..., -1, :], entry[..., -1]
