"""The text: the Python standard library's own source, split by file."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from neuralops.ssm.demo import DemoError

Tensor = torch.Tensor

SKIPPED = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "site-packages",
        "test",
        "tests",
        "idle_test",
        # Generated tables, and one large text that is not Python.
        "encodings",
        "pydoc_data",
    }
)
SEPARATOR = b"\0"
TRAIN_BYTES = 12_000_000
HELDOUT_BYTES = 400_000
HELDOUT_SHARE = 1 / 16


@dataclass(frozen=True)
class Text:
    """Both parts as bytes in ``uint8``; each file is followed by a zero byte.

    Attributes:
        train: what the models are fitted on.
        heldout: what they are judged on, from other files.
        train_files: the paths of the first part below the library's folder, as they follow.
        heldout_files: those of the second part.
    """

    train: Tensor
    heldout: Tensor
    train_files: tuple[str, ...]
    heldout_files: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """A digest of both parts: another Python version has another text."""
        digest = hashlib.sha256(self.train.numpy().tobytes())
        digest.update(self.heldout.numpy().tobytes())
        return digest.hexdigest()[:16]


def position(path: str) -> float:
    """Return the place in [0, 1) of a file, from its path alone: the order and the split."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def find_files(root: Path) -> list[str]:
    """Return the paths of the Python files below ``root``, in the order of :func:`position`."""
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted((p.as_posix() for p in found if SKIPPED.isdisjoint(p.parts)), key=position)


def read_files(root: Path, files: Iterable[str], limit: int) -> tuple[Tensor, tuple[str, ...]]:
    """Read whole files until the next one would pass ``limit`` bytes."""
    parts, names, total = [], [], 0
    for name in files:
        part = (root / name).read_bytes() + SEPARATOR
        total += len(part)
        if total > limit:
            break
        parts.append(part)
        names.append(name)
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8), tuple(names)


def standard_library() -> Path:
    """Return the folder that holds the running Python's own library."""
    return Path(sysconfig.get_path("stdlib"))


def load_text(root: Path) -> Text:
    """Read the Python files below ``root`` and split them.

    Raises:
        DemoError: the folder holds no usable source.
    """
    files = find_files(root)
    heldout = [name for name in files if position(name) < HELDOUT_SHARE]
    train = [name for name in files if position(name) >= HELDOUT_SHARE]
    if not heldout or not train:
        raise DemoError(
            f"{root} holds {len(files)} usable Python files; the demo reads the standard library's "
            "source, which this Python does not carry as files"
        )
    try:
        train_bytes, train_files = read_files(root, train, TRAIN_BYTES)
        heldout_bytes, heldout_files = read_files(root, heldout, HELDOUT_BYTES)
    except OSError as error:
        raise DemoError(f"cannot read the text: {error}") from error
    return Text(train_bytes, heldout_bytes, train_files, heldout_files)


@lru_cache(maxsize=4)
def _shuffled(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Windows:
    """Cuts a text into windows and puts them into an order that depends on the seed alone.

    Every window comes once before any comes again. A window overlaps the next one by a byte,
    which is the last target of the one and the first input of the other.

    Attributes:
        text: the bytes, ``(N,)``.
        length: the number of targets of a window.
        batch: the number of windows of a step.
        seed: chooses the order.
    """

    text: Tensor
    length: int
    batch: int
    seed: int

    def __len__(self) -> int:
        return (self.text.numel() - 1) // self.length

    def order(self, epoch: int) -> Tensor:
        """Return the numbers of all windows in their order in one pass over the text."""
        return _shuffled(len(self), (self.seed << 32) + epoch)

    def take(self, numbers: Tensor) -> Tensor:
        """Return the windows of these numbers, ``(n, length + 1)``."""
        return self.text.unfold(0, self.length + 1, self.length)[numbers]

    def at(self, step: int) -> Tensor:
        """Return the windows of one step, ``(batch, length + 1)``."""
        first = step * self.batch
        epochs = range(first // len(self), (first + self.batch - 1) // len(self) + 1)
        orders = torch.cat([self.order(epoch) for epoch in epochs])
        start = first - epochs.start * len(self)
        return self.take(orders[start : start + self.batch])

    def seen(self, steps: int) -> Tensor:
        """Return the windows that ``steps`` steps have taken, each once."""
        return self.take(self.order(0)[: steps * self.batch])
