"""The language model around the mixer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from neuralops.core import Explanation
from neuralops.ssm.demo.mixers import MIXERS, State

Tensor = torch.Tensor

BYTES = 256


class GatedMLP(nn.Module):
    """Mixes the channels of each token."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.enter = nn.Linear(width, 2 * hidden, bias=False)
        self.leave = nn.Linear(hidden, width, bias=False)
        nn.init.normal_(self.leave.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x (..., width)`` to the same shape."""
        value, gate = self.enter(x).chunk(2, -1)
        leave: Tensor = self.leave(value * functional.silu(gate))
        return leave


class Block(nn.Module):
    """A mixer and an MLP, each normalised before and added to what came in."""

    def __init__(self, mixer: str, width: int, hidden: int, depth: float) -> None:
        super().__init__()
        self.mixer = MIXERS[mixer](width, depth)
        self.mlp = GatedMLP(width, hidden)
        self.mixer_norm = nn.RMSNorm(width)
        self.mlp_norm = nn.RMSNorm(width)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Map a whole sequence ``x (B, L, width)``."""
        mixed, state = self.mixer(self.mixer_norm(x), state)
        return self._mlp(x + mixed), state

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Advance by one token ``x (B, width)``."""
        mixed, state = self.mixer.step(self.mixer_norm(x), state)
        return self._mlp(x + mixed), state

    def _mlp(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class LanguageModel(nn.Module):
    """Predicts the next byte from all bytes before it.

    Args:
        mixer: a name in :data:`neuralops.ssm.demo.mixers.MIXERS`.
        width: the channels of a token between the blocks.
        hidden: the channels inside each block's MLP.
        layers: the number of blocks.
    """

    def __init__(self, mixer: str, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(
            Block(mixer, width, hidden, layer / layers) for layer in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.head.weight.device

    def initial_state(self, batch: int) -> list[State]:
        """Return each block's state before the first byte."""
        return [block.mixer.initial_state(batch) for block in self._blocks()]

    def forward(self, text: Tensor, state: list[State]) -> tuple[Tensor, list[State]]:
        """Return the logits ``(B, L, 256)`` that follow each byte of ``text (B, L)``, int64."""
        x = self.embedding(text)
        after = []
        for block, entering in zip(self._blocks(), state, strict=True):
            x, leaving = block(x, entering)
            after.append(leaving)
        return self.head(self.norm(x)), after

    def step(self, byte: Tensor, state: list[State]) -> tuple[Tensor, list[State]]:
        """Return the logits ``(B, 256)`` that follow one more byte ``(B,)``, int64."""
        x = self.embedding(byte)
        after = []
        for block, entering in zip(self._blocks(), state, strict=True):
            x, leaving = block.step(x, entering)
            after.append(leaving)
        return self.head(self.norm(x)), after

    def explain(self, batch: int, length: int) -> Explanation:
        """Tell on which backend the mixer's operator runs for texts of this shape."""
        x = self.head.weight.new_zeros(batch, length, self.head.in_features)
        return self._blocks()[0].mixer.explain(x)

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]
