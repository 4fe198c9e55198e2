"""How the PyTorch form cuts sequences into chunks, and the decays within and through a chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor

CHUNK = 64
SMALLEST_GATE = 2.0**-100
"""A gate below it restarts the scan; what it lets through is kept as a factor of its own."""


@dataclass(frozen=True)
class Packed:
    """Which chunks belong to which of n packed sequences.

    Attributes:
        owner: ``(chunks,)``, the sequence of each chunk.
        is_first: ``(chunks,)``, whether it is its sequence's first chunk.
        is_last: ``(chunks,)``, whether it is its sequence's last chunk.
        first: ``(n,)``, each sequence's first chunk.
        last: ``(n,)``, each sequence's last chunk.
        empty: ``(n,)``, whether the sequence has none.
    """

    owner: Tensor
    is_first: Tensor
    is_last: Tensor
    first: Tensor
    last: Tensor
    empty: Tensor


@dataclass(frozen=True)
class Layout:
    """How the tokens lie in chunks of ``size`` tokens, ``chunks`` of them, all in scan order.

    Attributes:
        lengths: ``(chunks,)``, how many tokens each chunk holds.
        rows: ``(chunks * size,)``, the row of each token, where they are not simply in order.
        tokens: ``(L,)``, the inverse of ``rows``.
        past: ``(L,)``, the rows in no sequence.
        packed: where the sequences lie, if they are packed.
    """

    size: int
    chunks: int
    reverse: bool
    lengths: Tensor
    rows: Tensor | None = None
    tokens: Tensor | None = None
    past: Tensor | None = None
    packed: Packed | None = None


def lay_out(length: int, cu_seqlens: Tensor | None, reverse: bool, device: torch.device) -> Layout:
    """Return the layout of ``length`` tokens, more than 0."""
    size = min(CHUNK, length)
    if cu_seqlens is None:
        chunks = -(-length // size)
        starts = torch.arange(0, length, size, device=device)
        return Layout(size, chunks, reverse, (length - starts).clamp(max=size))

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
    packed = Packed(
        segment,
        used & (before == 0),
        used & (before + size >= lengths[segment]),
        (ends - counts)[:segments].clamp(max=max(chunks - 1, 0)),
        (ends - 1)[:segments].clamp(min=0),
        (lengths == 0)[:segments],
    )
    return Layout(size, chunks, reverse, inside, rows.flatten(), place, past, packed)


def in_chunks(x: Tensor, layout: Layout, fill: float = 0.0) -> Tensor:
    """Lay out ``x (B, H, L, ...)`` as ``(B, H, chunks, size, ...)``."""
    length = x.shape[2]
    if layout.rows is not None:
        x = x.index_select(2, layout.rows).unflatten(2, (layout.chunks, layout.size))
        position = torch.arange(layout.size, device=x.device)
        outside = position >= layout.lengths.unsqueeze(1)
        return x.masked_fill(outside.view(*outside.shape, *[1] * (x.dim() - 4)), fill)
    if layout.reverse:
        x = x.flip(2)
    missing = layout.chunks * layout.size - length
    if missing:
        tail = x.new_full((*x.shape[:2], missing, *x.shape[3:]), fill)
        x = torch.cat((x, tail), 2)
    chunked: Tensor = x.unflatten(2, (layout.chunks, layout.size))
    return chunked


def in_rows(x: Tensor, layout: Layout, length: int) -> Tensor:
    """Lay out ``x (B, H, chunks, size, D)`` as ``(B, H, L, D)``."""
    x = x.flatten(2, 3)
    if layout.tokens is not None and layout.past is not None:
        if x.shape[2] == 0:
            return x.new_zeros((*x.shape[:2], length, x.shape[3]))
        return x.index_select(2, layout.tokens).masked_fill(layout.past.unsqueeze(1), 0.0)
    x = x[:, :, :length]
    return x.flip(2) if layout.reverse else x


@dataclass(frozen=True)
class Decays:
    """What is left of a token's weight further on.

    Attributes:
        pairs: ``(..., chunks, size, size)``, from token s to token r of each chunk: a lower
            triangle.
        entry: ``(..., chunks, size)``, from before the chunk to each token.
        exit: ``(..., chunks, size)``, from each token to after the chunk.
        total: ``(..., chunks)``, through the chunk.
    """

    pairs: Tensor
    entry: Tensor
    exit: Tensor
    total: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All of them."""
        return self.pairs, self.entry, self.exit, self.total


def constant_decays(gate: Tensor, layout: Layout, log_decay: bool) -> Decays:
    """Return the decays for ``gate (H,)``: its powers."""
    base = gate.view(-1, 1, 1)
    pairs, entry, exit_, total = _exponents(layout, gate.device)
    later = torch.ones_like(pairs, dtype=torch.bool).triu(1)
    return Decays(
        _power(base.unsqueeze(-1), pairs, log_decay).masked_fill(later, 0.0),
        _power(base, entry, log_decay),
        _power(base, exit_, log_decay),
        _power(base.view(-1, 1), total, log_decay),
    )


def _exponents(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Over how many tokens each of the decays reaches."""
    position = torch.arange(layout.size, device=device)
    distance = (position.unsqueeze(1) - position).clamp(min=0)
    to_end = (layout.lengths.unsqueeze(1) - 1 - position).clamp(min=0)
    return distance, position + 1, to_end, layout.lengths


def _power(gate: Tensor, exponent: Tensor, log_decay: bool) -> Tensor:
    if not log_decay:
        # The power 0 is apart: its derivatives at 0 are not NaN.
        power = gate.pow(exponent.clamp(min=1).to(gate.dtype))
        return power.masked_fill(exponent == 0, 1.0)
    return (gate * exponent).masked_fill(exponent == 0, 0.0).exp()


def grad_of_constant(gate: Tensor, layout: Layout, log_decay: bool, of: Decays) -> Tensor:
    """Return the gradient of ``gate (H,)`` for that of its decays, summed to their shapes."""
    exponents = _exponents(layout, gate.device)
    grad = torch.zeros_like(gate)
    for exponent, of_decay in zip(exponents, of.tensors()):
        base = gate.view(-1, *[1] * (of_decay.dim() - 1))
        if log_decay:
            slope = exponent * _power(base, exponent, True)
        else:
            slope = exponent * _power(base, (exponent - 1).clamp(min=0), False)
        grad += (of_decay * slope).flatten(1).sum(1)
    return grad


def grad_of_tokens(gate: Tensor, log_decay: bool, of: Decays) -> Tensor:
    """Return the gradient of ``gate (B, H, chunks, size)`` for that of its decays.

    That of a logarithm at t is the sum over s < t <= r of the pairs (s, r). Where the gate
    restarts, it is taken over the pairs that cross this one restart, without its factor, and is
    the gradient of the gate itself.
    """
    value, restart, exponent, crossed = _between(gate, log_decay)
    weight = torch.cat((of.entry.unsqueeze(-1), of.pairs), -1)
    weight[..., -1, 1:] += of.exit
    weight[..., -1, 0] += of.total
    weight *= exponent.exp()
    position = torch.arange(gate.shape[-1] + 1, device=gate.device)
    before = position <= position[:-1].unsqueeze(1)

    def around(pairs: Tensor) -> Tensor:
        sums = pairs.flip(-2).cumsum(-2).flip(-2)
        return sums.masked_fill_(~before, 0.0).sum(-1)

    grad = around(weight.masked_fill(crossed != 0, 0.0))
    own = around(weight.masked_fill_(crossed != 1, 0.0))
    if log_decay:
        return torch.where(restart, own * value, grad)
    return torch.where(restart, own, grad / value.masked_fill(restart, 1.0))


def _between(gate: Tensor, log_decay: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What lies between the tokens of ``gate (B, H, chunks, size)``.

    Returns:
        The gates; where they restart; and ``(..., size, size + 1)`` from the place before the
        chunk, column 0, and each token s to each token r: the sum of the logarithms, -inf for a
        later s, and the number of restarts, which count as 1 in the sum.
    """
    value = gate.exp() if log_decay else gate
    restart = value < SMALLEST_GATE
    logs = gate.masked_fill(restart, 0.0) if log_decay else value.masked_fill(restart, 1.0).log()
    sums, ids = logs.cumsum(-1), restart.cumsum(-1)
    position = torch.arange(gate.shape[-1], device=gate.device)
    pad = torch.nn.functional.pad
    crossed = ids.unsqueeze(-1) - pad(ids, (1, 0)).unsqueeze(-2)
    later = pad(position.unsqueeze(1) < position, (1, 0))
    exponent = sums.unsqueeze(-1) - pad(sums, (1, 0)).unsqueeze(-2)
    return value, restart, exponent.masked_fill(later, -torch.inf), crossed


def token_decays(gate: Tensor, log_decay: bool) -> Decays:
    """Return the decays for ``gate (B, H, chunks, size)``.

    They come from differences of cumulative logarithms between two restarts. A gate that restarts
    counts as 1 there. Between tokens on its two sides the decay is that gate times the others, and
    across two such gates the product of both: 0, or next to it, but the gradient of the gate comes
    from there.
    """
    value, restart, exponent, crossed = _between(gate, log_decay)
    decays = exponent.exp()
    if gate.requires_grad and torch.is_grad_enabled():
        position = torch.arange(gate.shape[-1], device=gate.device)
        last = torch.where(restart, position, -1).cummax(-1).values
        one = value.gather(-1, last.clamp(min=0))
        before = last.gather(-1, (last - 1).clamp(min=0))
        two = one * value.gather(-1, before.clamp(min=0))
        factor = torch.where(crossed == 1, one.unsqueeze(-1), two.unsqueeze(-1))
        decays = torch.where(crossed == 0, decays, decays * factor).masked_fill(crossed > 2, 0.0)
    else:
        decays = decays.masked_fill(crossed > 0, 0.0)
    pairs, entry = decays[..., 1:], decays[..., 0]
    return Decays(pairs, entry, pairs[..., -1, :], entry[..., -1])
