"""Measures the error of every sample; also the child process that runs Triton's interpreter.

The child is started with TRITON_INTERPRET=1, since Triton reads it when kernels are defined. It
takes operator and dtype names as arguments and prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from neuralops.core.dispatch import BackendUnavailableError
from neuralops.core.instruments.common import (
    DTYPES,
    child_environment,
    first_line,
    operator_failures,
)
from neuralops.core.operator import Operator, Sample
from neuralops.core.registry import get_operator
from neuralops.core.testing.errors import LARGEST, Error
from neuralops.core.testing.samples import INTERPRETED_LENGTH, Oracle, ask_oracle, check_sample


@dataclass(frozen=True)
class Half:
    """One backend on one device, with the dtypes it is measured in.

    ``execution`` is what the tables call it.
    """

    device: str
    backend: str
    dtypes: tuple[str, ...]
    execution: str

    @property
    def interpreted(self) -> bool:
        """Whether it runs in Triton's interpreter."""
        return self.backend == "triton" and self.device == "cpu"


HALVES = (
    Half("cpu", "torch", ("fp64", "fp32", "fp16", "bf16"), "cpu torch"),
    Half("cpu", "triton", ("fp32", "fp16"), "cpu triton (interpreted)"),
    Half("cuda", "torch", ("fp32", "fp16", "bf16"), "gpu torch"),
    Half("cuda", "triton", ("fp32", "fp16", "bf16"), "gpu triton"),
)


@dataclass(frozen=True)
class Measured:
    """What one sample gave on one backend in one dtype.

    Exactly one of ``errors``, ``failure`` (it raised) and ``unserved`` (the backend's reasons
    against this sample) says something.
    """

    operator: str
    execution: str
    dtype: str
    sample: str
    errors: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""
    unserved: str = ""


def share_of_bound(error: dict[str, Any]) -> float:
    """Return how much of its bound an error takes up: at most 1 where it passes."""
    share: float = max(error["ratio"], error["largest"] / LARGEST) / error["bound"]
    return share


def chosen_samples(operator: Operator, half: Half) -> list[Sample]:
    """Return the samples that a half runs: short ones where kernels are interpreted."""
    longest = INTERPRETED_LENGTH if half.interpreted else math.inf
    return [
        sample
        for sample in operator.samples
        if sample.device in (None, half.device) and sample.length <= longest
    ]


def measure(operator: Operator, halves: Sequence[Half]) -> Iterator[Measured]:
    """Measure every sample of ``operator`` in this process, on backends of one device.

    The backends take turns, so that the reference is asked once for all of them.
    """
    for dtype in DTYPES:
        here = [half for half in halves if dtype in half.dtypes]
        for sample in operator.samples:
            serving = [half for half in here if sample in chosen_samples(operator, half)]
            if serving:
                yield from _measure_sample(operator, serving, dtype, sample)


def _measure_sample(
    operator: Operator, halves: Sequence[Half], dtype: str, sample: Sample
) -> Iterator[Measured]:
    device = halves[0].device
    try:
        oracle = ask_oracle(operator, sample, device=device, dtype=DTYPES[dtype])
    except operator_failures() as failure:
        reason = f"the reference: {first_line(failure)}"
        for half in halves:
            yield Measured(operator.name, half.execution, dtype, sample.label, failure=reason)
        return
    for half in halves:
        yield _measure_half(operator, half, dtype, sample, oracle)


def _measure_half(
    operator: Operator, half: Half, dtype: str, sample: Sample, oracle: Oracle
) -> Measured:
    place = (operator.name, half.execution, dtype, sample.label)
    try:
        errors = check_sample(
            operator,
            sample,
            backend=half.backend,
            device=half.device,
            dtype=DTYPES[dtype],
            oracle=oracle,
        )
    except BackendUnavailableError as reasons:
        return Measured(*place, unserved=str(reasons))
    except operator_failures() as failure:
        return Measured(*place, failure=first_line(failure))
    return Measured(*place, errors=[_as_dict(error) for error in errors])


def _as_dict(error: Error) -> dict[str, Any]:
    return {**asdict(error), "passed": error.passed}


def measure_in_child(operator: Operator, half: Half) -> Iterator[Measured]:
    """Measure every sample of ``operator`` in Triton's interpreter, in a child process.

    Raises:
        RuntimeError: the child ended before it was done.
    """
    command = [sys.executable, "-m", __name__, operator.name, *half.dtypes]
    with subprocess.Popen(
        command,
        env=child_environment(TRITON_INTERPRET="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        for line in child.stdout or ():
            if line.startswith("{"):
                yield Measured(**json.loads(line))
        complaint = child.stderr.read().strip() if child.stderr else ""
    if child.returncode != 0:
        raise RuntimeError(
            f"the interpreter's process ended with {child.returncode}: {complaint[-2000:]}"
        )


def main() -> None:
    """Measure in this process, which the parent started with TRITON_INTERPRET=1."""
    parser = argparse.ArgumentParser()
    parser.add_argument("operator")
    parser.add_argument("dtypes", nargs="+")
    options = parser.parse_args()
    interpreted = next(half for half in HALVES if half.interpreted)
    half = replace(interpreted, dtypes=tuple(options.dtypes))
    for measured in measure(get_operator(options.operator), [half]):
        print(json.dumps(asdict(measured)), flush=True)


if __name__ == "__main__":
    main()
