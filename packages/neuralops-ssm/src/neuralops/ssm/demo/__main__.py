"""The command line: ``python -m neuralops.ssm.demo``."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from neuralops.ssm.demo import DemoError
from neuralops.ssm.demo.mixers import MIXERS

STEPS = 1400
EXTRA = ("matplotlib", "rich")
LARGEST_SEED = 2**31 - 1


def _positive(text: str) -> int:
    value = _integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _seed(text: str) -> int:
    value = _integer(text)
    if not 0 <= value <= LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"must be from 0 to {LARGEST_SEED}, got {value}")
    return value


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from error


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from error
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text}")
    return value


def _device(text: str) -> torch.device:
    cuda = torch.cuda.is_available()
    if text == "auto":
        return torch.device("cuda" if cuda else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"must be auto, cpu or cuda, got {text!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be auto, cpu or cuda, got {text!r}")
    if device.type == "cuda" and not cuda:
        raise argparse.ArgumentTypeError(
            "cuda was asked for, but this PyTorch finds no CUDA device; use --device cpu"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(
            f"there is no {device}, this machine has {torch.cuda.device_count()} CUDA device(s)"
        )
    return device


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m neuralops.ssm.demo",
        description="Train a small byte-level language model on the Python standard library's "
        "source, measure it on files it has not seen, and let it write. The same command resumes "
        "from the checkpoint.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--steps", type=_positive, default=STEPS, help="the step at which the training ends")
    add("--device", type=_device, default="auto", help="auto, cpu or cuda")
    add("--seed", type=_seed, default=0, help="of the weights, the order and the sample")
    add("--mixer", choices=sorted(MIXERS), default="hgrn2", help="the operator that mixes tokens")
    add("--out", type=Path, default=Path("demo_output"), help="the folder for what it writes")
    add("--batch", type=_positive, default=16, help="windows in a step")
    add("--length", type=_positive, default=256, help="bytes in a window")
    add("--learning-rate", type=_rate, default=8e-3, help="of AdamW; Muon's follows it")
    add("--prompt", default="def read_", help="what the generated text begins with")
    add("--fresh", action="store_true", help="start anew although there is a checkpoint")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo with these command-line arguments and return the exit status."""
    given = _parser().parse_args(arguments)
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"The demo needs {' and '.join(missing)}: pip install 'neuralops-ssm[demo]'",
            file=sys.stderr,
        )
        return 1
    from neuralops.ssm.demo.run import INTERRUPTED, Options, run

    given.prompt = given.prompt.encode("utf-8", errors="surrogateescape")
    try:
        return run(Options(**vars(given)))
    except DemoError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted. The same command resumes from the last checkpoint.", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
