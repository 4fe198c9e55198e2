"""Text from the model, one byte at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neuralops.ssm.demo.model import LanguageModel
from neuralops.ssm.demo.text import SEPARATOR

Tensor = torch.Tensor

TOLERANCE = 1e-5
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Sample:
    """What was generated, and how the steps compare with one forward over all of it.

    Attributes:
        text: the prompt and what follows it.
        prompt: the number of bytes of the prompt.
        error: ``rms(stepped - full) / rms(full)`` of the logits after each byte.
    """

    text: bytes
    prompt: int
    error: float

    @property
    def agrees(self) -> bool:
        """Whether the steps and the forward agree within the rounding of float32."""
        return self.error <= TOLERANCE


@torch.no_grad()
def generate(model: LanguageModel, prompt: bytes, count: int, seed: int) -> Sample:
    """Read the prompt with one forward, then draw ``count`` bytes by steps with the carried state.

    The logits of every step are kept and compared with those of one forward from the start.
    """
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(SEPARATOR + prompt)], device=model.device)
    logits, state = model(text, model.initial_state(1))
    steps = [logits]
    for _ in range(count):
        chances = (steps[-1][0, -1].float().cpu() / TEMPERATURE).softmax(0)
        byte = torch.multinomial(chances, 1, generator=generator).to(model.device)
        text = torch.cat((text, byte.unsqueeze(0)), 1)
        after, state = model.step(byte, state)
        steps.append(after.unsqueeze(1))
    full, _ = model(text, model.initial_state(1))
    stepped = torch.cat(steps, 1)
    error = (stepped - full).square().mean().sqrt() / full.square().mean().sqrt()
    return Sample(bytes(text[0, len(SEPARATOR) :].tolist()), len(prompt), float(error))
