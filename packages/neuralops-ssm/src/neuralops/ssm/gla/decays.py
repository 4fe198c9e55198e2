"""The gates within the chunks of the PyTorch form, and the weights of pairs of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor

NEAR_ONE = 0.25
"""The least gate of a block that is taken in one product."""
LARGEST_RATIO = 2.0**20
"""How far a block's gates may go down, in one product: the largest factor that occurs."""
BASES = (64, 16)
"""The blocks that may be taken in one product."""


@dataclass(frozen=True)
class Level:
    """The two halves of every block: what their tokens are decayed by.

    Attributes:
        until: ``(..., blocks, h, Dk)``, the second half's gates up to each token, itself included.
        after: ``(..., blocks, h, Dk)``, the first half's gates after each token.
        first: ``(..., blocks, 1, Dk)``, all gates of the first half.
        second: ``(..., blocks, 1, Dk)``, all gates of the second half.
    """

    until: Tensor
    after: Tensor
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class Block:
    """The gates of blocks that are taken in one product, ``(..., size, Dk)``.

    Attributes:
        until: from the block's first token up to each one, itself included.
        after: after each token up to the block's last one.
    """

    until: Tensor
    after: Tensor


@dataclass(frozen=True)
class Decays:
    """The gates of all chunks, ``(B, H, chunks, size, Dk)``, and their products.

    Attributes:
        gate: the gates themselves, plain values.
        base: the block that is taken in one product.
        block: products within each token's block, if ``base`` is more than 1.
        levels: for h = ``base``, 2 ``base``, ... below the chunk's size.
        until: the gates from the chunk's first token up to each one, itself included.
        after: the gates after each token up to the chunk's last one.
    """

    gate: Tensor
    base: int
    block: Block | None
    levels: list[Level]
    until: Tensor
    after: Tensor


def halves(x: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """The first and the second halves, ``(..., blocks, h, D)``, of blocks of ``2h`` tokens."""
    blocks = x.unflatten(-2, (x.shape[-2] // (2 * h), 2, h))
    return blocks.select(-3, 0), blocks.select(-3, 1)


def _joined(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack((first, second), -3).flatten(-4, -2)


def gate_products(gate: Tensor, base: int) -> Decays:
    """Return the products of the gates ``(B, H, chunks, size, Dk)``, plain values."""
    size = gate.shape[-2]
    base = min(base, size)
    block = None
    if base == 1:
        until, after = gate, torch.ones_like(gate)
    else:
        products = gate.unflatten(-2, (size // base, base)).cumprod(-2)
        until = products.flatten(-3, -2)
        after = (products[..., -1:, :] / products).flatten(-3, -2)
        block = Block(until, after)
    levels = []
    h = base
    while h < size:
        (until_1, until_2), (after_1, after_2) = halves(until, h), halves(after, h)
        level = Level(until_2, after_1, until_1[..., -1:, :], until_2[..., -1:, :])
        levels.append(level)
        until = _joined(until_1, until_2 * level.first)
        after = _joined(after_1 * level.second, after_2)
        h *= 2
    return Decays(gate, base, block, levels, until, after)


def choose_base(gate: Tensor) -> int:
    """The largest block whose gates all are near enough to 1; on a GPU a single token, unseen."""
    if gate.device.type != "cpu" or gate.numel() == 0 or not bool(gate.min() >= NEAR_ONE):
        return 1
    for base in BASES:
        size = min(base, gate.shape[-2])
        products = gate.unflatten(-2, (gate.shape[-2] // size, size)).prod(-2)
        if bool(products.min() * LARGEST_RATIO >= 1):
            return size
    return 1


def diagonal(weights: Tensor, h: int) -> Tensor:
    """Blocks of ``h`` along the diagonal of ``(..., size, size)``, a view ``(..., n, h, h)``."""
    n = weights.shape[-1] // h
    blocks = weights.unflatten(-1, (n, h)).unflatten(-3, (n, h))
    found: Tensor = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    return found


def within_blocks(q: Tensor, k: Tensor, decays: Decays) -> tuple[Tensor, Tensor]:
    """Queries and keys of blocks that are taken in one product, ``(..., blocks, base, Dk)``."""
    shape = (q.shape[-2] // decays.base, decays.base)
    if decays.block is not None:
        q, k = q * decays.block.until, k / decays.block.until
    return q.unflatten(-2, shape), k.unflatten(-2, shape)


def weights_of_pairs(
    q: Tensor, k: Tensor, decays: Decays, relative: tuple[Tensor, Tensor]
) -> Tensor:
    """The weight of every pair of tokens of each chunk, ``(..., size, size)``, a lower triangle."""
    size, base = q.shape[-2], decays.base
    if base == 1:
        inner = (q * k).sum(-1)[..., None, None]
    else:
        inner = (relative[0] @ relative[1].transpose(-1, -2)).tril_()
    if base == size:
        return inner.squeeze(-3)
    weights = q.new_zeros((*q.shape[:-1], size))
    diagonal(weights, base).copy_(inner)
    h = base
    for level in decays.levels:
        queries, keys = halves(q, h)[1] * level.until, halves(k, h)[0] * level.after
        blocks = diagonal(weights, 2 * h)[..., h:, :h]
        blocks.copy_(queries @ keys.transpose(-1, -2))
        h *= 2
    return weights
