"""Training, its checkpoint, and the measure of what was learnt."""

from __future__ import annotations

import math
import os
import pickle
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from neuralops.ssm.demo import DemoError
from neuralops.ssm.demo.model import LanguageModel
from neuralops.ssm.demo.text import SEPARATOR, Windows

Tensor = torch.Tensor

WIDTH, HIDDEN, LAYERS = 128, 256, 2
MATRIX_RATE = 1.25
WARM_UP = 20
COOL_DOWN = 0.5
IGNORED = -100


@dataclass(frozen=True)
class Settings:
    """What a checkpoint must share with the run that resumes it."""

    mixer: str
    batch: int
    length: int
    learning_rate: float
    seed: int
    text: str


class Trainer:
    """A model, its optimisers and how far they have come.

    The matrices inside the blocks take Muon's steps, everything else AdamW's.

    Args:
        settings: what is trained, and how.
        text: the bytes to learn, ``(N,)``.
        steps: where the training ends; the learning rate falls to zero towards it.
        device: where the model runs.

    Attributes:
        step: the number of steps done.
        losses: the loss of each of them, in nats a byte.
        heldout: pairs of a step and the bits per byte of the held-out text after it.
    """

    def __init__(self, settings: Settings, text: Tensor, steps: int, device: torch.device) -> None:
        self.settings = settings
        self.windows = Windows(text, settings.length, settings.batch, settings.seed)
        self.steps = steps
        self.device = device
        torch.manual_seed(settings.seed)
        self.model = LanguageModel(settings.mixer, WIDTH, HIDDEN, LAYERS).to(device)
        inside = [p for p in self.model.blocks.parameters() if p.ndim == 2]
        chosen = {id(p) for p in inside}
        others = [p for p in self.model.parameters() if id(p) not in chosen]
        rate = settings.learning_rate
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(inside, lr=MATRIX_RATE * rate, weight_decay=0.0),
            torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        ]
        self._rates = [MATRIX_RATE * rate, rate]
        self.step = 0
        self.losses: list[float] = []
        self.heldout: list[tuple[int, float]] = []

    @property
    def tokens_per_step(self) -> int:
        """The number of bytes that one step predicts."""
        return self.settings.batch * self.settings.length

    def advance(self) -> float:
        """Do one step and return its loss in nats a byte.

        Raises:
            DemoError: the loss is not finite.
        """
        share = min((self.step + 1) / WARM_UP, (self.steps - self.step) / (COOL_DOWN * self.steps))
        for optimiser, rate in zip(self.optimisers, self._rates, strict=True):
            optimiser.param_groups[0]["lr"] = min(1.0, share) * rate
        window = self.windows.at(self.step).to(self.device).long()
        logits, _ = self.model(window[:, :-1], self.model.initial_state(window.shape[0]))
        loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        self.model.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        self.step += 1
        value = float(loss.detach())
        if not math.isfinite(value):
            raise DemoError(
                f"the loss became {value} at step {self.step}; try a lower --learning-rate than "
                f"{self.settings.learning_rate:g}"
            )
        self.losses.append(value)
        return value

    def save(self, path: Path) -> None:
        """Write the checkpoint; one that was there before stays whole until this one is.

        Raises:
            DemoError: the file cannot be written.
        """
        checkpoint = {
            "settings": asdict(self.settings),
            "step": self.step,
            "losses": self.losses,
            "heldout": self.heldout,
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }
        partial = path.with_name(path.name + ".partial")
        try:
            torch.save(checkpoint, partial)
            os.replace(partial, path)
        except (OSError, RuntimeError) as error:
            raise DemoError(f"cannot write the checkpoint {path}: {error}") from error

    def load(self, path: Path) -> None:
        """Continue from a checkpoint.

        Raises:
            DemoError: the file is no checkpoint, or one of a run with other settings.
        """
        checkpoint = _read(path)
        theirs, ours = checkpoint["settings"], asdict(self.settings)
        different = [
            f"{_option(name)} was {theirs.get(name)} and is now {ours.get(name)}"
            for name in sorted(theirs.keys() | ours.keys())
            if theirs.get(name) != ours.get(name)
        ]
        if checkpoint["step"] > self.steps:
            different.append(f"it is at step {checkpoint['step']}, past --steps {self.steps}")
        if different:
            raise DemoError(
                f"the checkpoint {path} does not match: {'; '.join(different)}. Repeat its "
                "settings, choose another --out, or start anew with --fresh"
            )
        try:
            self.model.load_state_dict(checkpoint["model"])
            for optimiser, state in zip(self.optimisers, checkpoint["optimisers"], strict=True):
                optimiser.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError) as error:
            raise DemoError(
                f"the checkpoint {path} is of another version of this model; start anew with "
                "--fresh or choose another --out"
            ) from error
        self.step = checkpoint["step"]
        self.losses = checkpoint["losses"]
        self.heldout = checkpoint["heldout"]


def _read(path: Path) -> dict[str, Any]:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise DemoError(
            f"cannot read the checkpoint {path} ({type(error).__name__}); start anew with --fresh "
            "or choose another --out"
        ) from error
    keys = {"settings", "step", "losses", "heldout", "model", "optimisers"}
    if not isinstance(checkpoint, dict) or checkpoint.keys() != keys:
        raise DemoError(
            f"{path} is no checkpoint of this demo; start anew with --fresh or choose another --out"
        )
    return checkpoint


def _option(setting: str) -> str:
    if setting == "text":
        return "the text (another Python has another library)"
    return f"--{setting.replace('_', '-')}"


@torch.no_grad()
def bits_per_byte(model: LanguageModel, text: Tensor, rows: int = 16, length: int = 512) -> float:
    """Return the mean number of bits that a byte of ``text (N,)`` costs the model.

    The text is read in ``rows`` places at once, each with a state that is carried to its end.
    """
    count = text.numel()
    before = torch.tensor(list(SEPARATOR), dtype=torch.uint8)
    inputs = torch.cat((before, text[:-1])).long()
    padding = -count % rows
    inputs = functional.pad(inputs, (0, padding)).view(rows, -1)
    targets = functional.pad(text.long(), (0, padding), value=IGNORED).view(rows, -1)
    state = model.initial_state(rows)
    nats = 0.0
    for start in range(0, inputs.shape[1], length):
        part = slice(start, start + length)
        logits, state = model(inputs[:, part].to(model.device), state)
        target = targets[:, part].flatten().to(model.device)
        loss = functional.cross_entropy(
            logits.flatten(0, 1), target, ignore_index=IGNORED, reduction="sum"
        )
        nats += float(loss)
    return nats / count / math.log(2)
