"""What the user sees: the progress, the table, the sample and the picture."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from matplotlib.figure import Figure
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from neuralops.ssm.demo import DemoError

LINES = 20
SMOOTHING = 0.9


class _Average:
    """A mean of the values so far in which the recent ones weigh more."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float) -> float:
        self._sum = SMOOTHING * self._sum + value
        self._weight = SMOOTHING * self._weight + 1
        return self._sum / self._weight


class TrainingProgress:
    """A live bar on a terminal, and a line now and then elsewhere.

    Args:
        console: where to write.
        done: the steps done before this run.
        steps: the step at which the training ends.
        tokens: the tokens of a step.
        backend: the name of the backend that runs.
    """

    def __init__(self, console: Console, done: int, steps: int, tokens: int, backend: str) -> None:
        self._console = console
        self._step = done
        self._steps = steps
        self._tokens = tokens
        self._backend = backend
        self._loss = _Average()
        self._seconds = 0.0
        self._trained = 0
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=steps, completed=done, figures="")

    def __enter__(self) -> None:
        self._bar.start()
        self._last = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    @property
    def seconds(self) -> float:
        """The time that this run's steps took."""
        return self._seconds

    @property
    def tokens_per_second(self) -> float:
        """The mean over this run's steps."""
        return self._trained * self._tokens / self._seconds if self._seconds else 0.0

    def resume_clock(self) -> None:
        """Leave out the time since the last step."""
        self._last = time.perf_counter()

    def advance(self, loss: float) -> None:
        """Show one more step with this loss, in nats a byte."""
        now = time.perf_counter()
        self._seconds += now - self._last
        self._last = now
        self._trained += 1
        self._step += 1
        recent = self._loss.add(loss)
        figures = (
            f"loss {recent:.3f}  {recent / math.log(2):.3f} bits/byte  "
            f"{self.tokens_per_second:,.0f} tokens/s  {self._backend}"
        )
        self._bar.update(self._task, completed=self._step, figures=figures)
        every = max(1, self._steps // LINES)
        if not self._console.is_terminal and (
            self._step % every == 0 or self._step == self._steps or self._trained == 1
        ):
            line = f"step {self._step}/{self._steps}  {figures}  {self._seconds:.0f} s"
            self._console.print(line, soft_wrap=True)


def comparison(
    net: float, step: int, seen: Sequence[float | None], everything: Sequence[float]
) -> Table:
    """Return the table of held-out bits per byte.

    Args:
        net: those of the net.
        step: the number of steps it was trained.
        seen: those of the models of order 0 and 2 fitted on what the net has seen.
        everything: those of the same fitted on all training bytes.
    """
    table = Table(title="Held-out bits per byte (lower is better)")
    table.add_column("model")
    table.add_column("fitted on the bytes\nthe net has seen", justify="right")
    table.add_column("fitted on all\ntraining bytes", justify="right")
    for name, ours, theirs in zip(
        ("order 0", "order 2, interpolated"), seen, everything, strict=True
    ):
        table.add_row(name, "-" if ours is None else f"{ours:.3f}", f"{theirs:.3f}")
    table.add_row(f"this net, {step} steps", f"{net:.3f}", "-", style="bold")
    return table


def printable(text: bytes) -> str:
    """Return ``text`` with everything that could upset a terminal escaped."""
    shown = text.replace(b"\r", b"").decode("ascii", errors="backslashreplace")
    return "".join(c if c == "\n" or c.isprintable() else f"\\x{ord(c):02x}" for c in shown)


def sample_panel(prompt: bytes, generated: bytes) -> Panel:
    """Return the prompt and what the model made of it."""
    body = Text(printable(prompt), style="bold")
    body.append(printable(generated), style="not bold")
    return Panel(body, title="generated by steps with the carried state", title_align="left")


def plot(
    path: Path,
    losses: Sequence[float],
    heldout: Sequence[tuple[int, float]],
    baseline: float,
) -> None:
    """Draw the loss curve as a PNG.

    Raises:
        DemoError: the file cannot be written.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(losses) + 1)
    bits = [loss / math.log(2) for loss in losses]
    axes.plot(steps, bits, color="tab:blue", alpha=0.2, linewidth=0.8)
    average = _Average()
    axes.plot(steps, [average.add(value) for value in bits], color="tab:blue", label="training")
    if heldout:
        at, values = zip(*heldout, strict=True)
        axes.plot(at, values, "o-", color="tab:orange", markersize=4, label="held-out")
    axes.axhline(baseline, color="tab:gray", linestyle="--", label="order 2, interpolated")
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.set_ylim(bottom=math.floor(2 * min(bits)) / 2, top=8.25)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise DemoError(f"cannot write the picture {path}: {error}") from error
