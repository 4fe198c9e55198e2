"""Models that count: what a net has to beat."""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor

BYTES = 256


def _codes(text: Tensor, order: int) -> Tensor:
    """Number each byte together with the ``order`` bytes before it, along the last dimension."""
    text = text.long()
    code = text[..., order:]
    for back in range(1, order + 1):
        code = code + text[..., order - back : text.shape[-1] - back] * BYTES**back
    return code


class ByteModel:
    """An interpolated Markov model of bytes.

    After Witten and Bell, a context ``c`` that was followed ``n(c)`` times by ``t(c)`` different
    bytes trusts its own counts with the weight ``n(c) / (n(c) + t(c))`` and leaves the rest to the
    next shorter context; the shortest leaves it to the uniform distribution.

    Source: Witten and Bell, *The zero-frequency problem: estimating the probabilities of novel
    events in adaptive text compression*, 1991, method C.

    Args:
        text: the bytes to count, ``(N,)``, or ``(rows, N)`` where a context never crosses rows.
        order: the number of preceding bytes that the longest context holds.
    """

    def __init__(self, text: Tensor, order: int) -> None:
        self.order = order
        self.counts = [
            torch.bincount(_codes(text, k).flatten(), minlength=BYTES ** (k + 1)).view(-1, BYTES)
            for k in range(order + 1)
        ]
        self.totals = [counts.sum(1) for counts in self.counts]
        self.followers = [(counts > 0).sum(1) for counts in self.counts]

    def probabilities(self, text: Tensor) -> Tensor:
        """Return the probability of each byte of ``text (N,)``, in float64.

        The first bytes have shorter contexts.
        """
        probability = torch.full(text.shape, 1 / BYTES, dtype=torch.float64)
        for k, counts in enumerate(self.counts):
            if text.numel() <= k:
                break
            code = _codes(text, k)
            context = code // BYTES
            total = self.totals[k][context]
            different = self.followers[k][context]
            count = counts.flatten()[code]
            known = total > 0
            mixed = (count + different * probability[k:]) / (total + different).clamp(min=1)
            probability[k:] = torch.where(known, mixed, probability[k:])
        return probability

    def bits_per_byte(self, text: Tensor) -> float:
        """Return the mean number of bits that a byte of ``text (N,)`` costs."""
        return float(-self.probabilities(text).log().mean() / math.log(2))
