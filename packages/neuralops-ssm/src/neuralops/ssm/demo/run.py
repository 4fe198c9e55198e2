"""The demo from its options to its last line."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console

from neuralops.ssm.demo import DemoError
from neuralops.ssm.demo import text as texts
from neuralops.ssm.demo.baselines import ByteModel
from neuralops.ssm.demo.generate import TOLERANCE, generate
from neuralops.ssm.demo.report import TrainingProgress, comparison, plot, sample_panel
from neuralops.ssm.demo.train import Settings, Trainer, bits_per_byte

HELDOUT_POINTS = 10
HELDOUT_POINT_BYTES = 65_536
SAVE_SECONDS = 30.0
GENERATED = 400
INTERRUPTED = 130


@dataclass(frozen=True)
class Options:
    """The command line, checked."""

    steps: int
    device: torch.device
    seed: int
    mixer: str
    out: Path
    batch: int
    length: int
    learning_rate: float
    prompt: bytes
    fresh: bool


class _Stop:
    """Remembers Ctrl-C until a step is complete; a second one interrupts at once."""

    requested = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _stop_on_interrupt() -> Iterator[_Stop]:
    stop = _Stop()
    previous = signal.signal(signal.SIGINT, stop)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


def run(options: Options) -> int:
    """Train, measure, generate; return the exit status.

    Raises:
        DemoError: something the user can mend.
    """
    console = Console(highlight=False)
    _prepare(options.out)
    checkpoint, picture = options.out / "checkpoint.pt", options.out / "loss.png"
    text = texts.load_text(texts.standard_library())
    settings = Settings(
        mixer=options.mixer,
        batch=options.batch,
        length=options.length,
        learning_rate=options.learning_rate,
        seed=options.seed,
        text=text.fingerprint,
    )
    trainer = Trainer(settings, text.train, options.steps, options.device)
    if len(trainer.windows) < options.batch:
        raise DemoError(
            f"the text has only {len(trainer.windows)} windows of {options.length} bytes, fewer "
            f"than a batch of {options.batch}: lower --batch or --length"
        )
    try:
        explanation = trainer.model.explain(options.batch, options.length)
    except ValueError as error:
        raise DemoError(str(error)) from error
    backend = explanation.backend
    if backend is None:
        raise DemoError(str(explanation))

    parameters = sum(p.numel() for p in trainer.model.parameters())
    console.print(
        f"Text: the Python standard library, {text.train.numel():,} bytes of "
        f"{len(text.train_files)} files to learn, {text.heldout.numel():,} of "
        f"{len(text.heldout_files)} others held out\n"
        f"Model: {parameters:,} parameters, mixer {options.mixer} on {options.device}, "
        f"backend {backend}",
        soft_wrap=True,
    )
    if checkpoint.exists() and not options.fresh:
        trainer.load(checkpoint)
        console.print(f"Resuming from {checkpoint} at step {trainer.step}", soft_wrap=True)
    if options.device.type == "cpu" and (busy := _others_at_work()):
        console.print(busy, soft_wrap=True)
    if trainer.step < options.steps:
        finished = _train(console, trainer, text.heldout, backend, checkpoint)
        if not finished:
            console.print(
                f"Stopped at step {trainer.step}; the checkpoint is {checkpoint}. "
                "The same command resumes from there.",
                soft_wrap=True,
            )
            return INTERRUPTED
    else:
        console.print(f"Nothing left to train at step {trainer.step}")

    net = bits_per_byte(trainer.model, text.heldout)
    seen = trainer.windows.seen(trainer.step)
    of_seen = [ByteModel(seen, order).bits_per_byte(text.heldout) for order in (0, 2)]
    of_all = [ByteModel(text.train, order).bits_per_byte(text.heldout) for order in (0, 2)]
    console.print(comparison(net, trainer.step, of_seen, of_all))
    plot(picture, trainer.losses, trainer.heldout, of_all[-1])

    sample = generate(trainer.model, options.prompt, GENERATED, options.seed)
    console.print(sample_panel(options.prompt, sample.text[sample.prompt :]))
    verdict = "equal" if sample.agrees else "DIFFERENT"
    console.print(
        f"Logits by steps and by one forward are {verdict}: error ratio {sample.error:.1e}, "
        f"tolerated {TOLERANCE:.0e}\n"
        f"Held-out bits per byte: {net:.3f}\n"
        f"Wrote {checkpoint} and {picture}",
        soft_wrap=True,
    )
    return 0 if sample.agrees else 1


def _others_at_work() -> str:
    """Say so where other programs keep the processors busy: torch's threads wait for each other."""
    if not hasattr(os, "getloadavg"):
        return ""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < cores / 2 or torch.get_num_threads() == 1:
        return ""
    return (
        f"Other programs are at work (load {load:.1f} on {cores} cores), and torch's threads wait "
        "for each other: with OMP_NUM_THREADS=1 in the environment it may be much faster"
    )


def _prepare(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise DemoError(f"cannot write to the folder --out {out}: it is a file")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise DemoError(f"cannot write to the folder --out {out}: {error}") from error


def _train(
    console: Console, trainer: Trainer, heldout: torch.Tensor, backend: str, checkpoint: Path
) -> bool:
    """Train to the end, saving as it goes; return whether Ctrl-C left it unfinished."""
    every = max(1, trainer.steps // HELDOUT_POINTS)
    saved = time.monotonic()
    progress = TrainingProgress(
        console, trainer.step, trainer.steps, trainer.tokens_per_step, backend
    )
    with _stop_on_interrupt() as stop, progress:
        while trainer.step < trainer.steps and not stop.requested:
            progress.advance(trainer.advance())
            if trainer.step % every == 0 or trainer.step == trainer.steps:
                value = bits_per_byte(trainer.model, heldout[:HELDOUT_POINT_BYTES])
                trainer.heldout.append((trainer.step, value))
            if time.monotonic() - saved > SAVE_SECONDS:
                trainer.save(checkpoint)
                saved = time.monotonic()
            progress.resume_clock()
        trainer.save(checkpoint)
    console.print(
        f"Trained to step {trainer.step} in {progress.seconds:.0f} s, "
        f"{progress.tokens_per_second:,.0f} tokens/s",
        soft_wrap=True,
    )
    return trainer.step == trainer.steps
