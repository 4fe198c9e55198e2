"""Times the first forward and backward in a fresh process with an empty Triton cache."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile

import torch

from neuralops.core.instruments.common import DTYPES, child_environment
from neuralops.core.instruments.contenders import Contender, Task, make_task, tensors
from neuralops.core.instruments.timing import synchronize, time_once
from neuralops.core.registry import get_operator

LONGEST = 150.0
"""Seconds after which a cold start is given up."""


def cold_seconds(contender: Contender, shape: str, dtype: str, device: torch.device) -> float:
    """Return how long a fresh process needs for its first forward and backward.

    Importing PyTorch, making the inputs and starting the device are not counted.

    Raises:
        RuntimeError: the process failed, or took too long.
    """
    command = [sys.executable, "-m", __name__, contender.operator.name, shape, dtype, str(device)]
    if contender.peer is not None:
        command += ["--peer", contender.peer]
    else:
        command += ["--backend", str(contender.backend)]
    with tempfile.TemporaryDirectory() as cache:
        try:
            done = subprocess.run(
                command,
                env=child_environment(TRITON_CACHE_DIR=cache),
                capture_output=True,
                text=True,
                timeout=LONGEST,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"no result after {LONGEST:.0f} s") from error
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it failed"])[-1])
    return float(done.stdout.splitlines()[-1])


def _first(task: Task, contender: Contender) -> None:
    function = contender.load()
    outputs = tensors(function(*task.args, **task.kwargs))
    outputs = tuple(output for output in outputs if output.requires_grad)
    gradients = [torch.ones_like(output) for output in outputs]
    torch.autograd.grad(outputs, list(task.leaves.values()), gradients, allow_unused=True)


def main() -> None:
    """Print the seconds that this process needs."""
    parser = argparse.ArgumentParser()
    for name in ("operator", "shape", "dtype", "device"):
        parser.add_argument(name)
    parser.add_argument("--peer")
    parser.add_argument("--backend")
    options = parser.parse_args()
    operator = get_operator(options.operator)
    device = torch.device(options.device)
    workload = next(
        w for w in operator.workloads if w.label == options.shape and w.device == device.type
    )
    task = make_task(operator, workload, device, DTYPES[options.dtype])
    contender = Contender("", operator, options.backend, options.peer)
    synchronize(device)
    print(time_once(lambda: _first(task, contender), device))


if __name__ == "__main__":
    main()
