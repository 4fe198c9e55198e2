"""What tests of operators share. Needs pytest."""

from __future__ import annotations

import math

import pytest
import torch

from neuralops.core.operator import Operator, Sample
from neuralops.core.suitability import INTERPRETING
from neuralops.core.testing.samples import INTERPRETED_LENGTH

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETING else "cpu"
"""Where tests run: the GPU if there is one, unless Triton's interpreter was asked for."""

_runs_triton = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETING,
    reason="no CUDA device, and TRITON_INTERPRET=1 is not set",
)

BACKENDS = [
    pytest.param("torch", id="torch"),
    pytest.param("triton", id="triton", marks=[pytest.mark.triton, _runs_triton]),
]
"""The backends to parametrise a test with. The Triton half runs compiled on a GPU, in Triton's
interpreter with ``TRITON_INTERPRET=1``, and is skipped otherwise."""


def dtypes(backend: str) -> list[torch.dtype]:
    """Return the dtypes to test ``backend`` with on this machine."""
    if backend == "torch":
        return [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    if INTERPRETING:
        return [torch.float32, torch.float16]
    return [torch.float32, torch.float16, torch.bfloat16]


def samples(operator: Operator, backend: str) -> list[Sample]:
    """Return the samples to test ``backend`` with on this machine.

    Where kernels are interpreted they are the short ones.
    """
    longest = INTERPRETED_LENGTH if backend == "triton" and INTERPRETING else math.inf
    return [
        sample
        for sample in operator.samples
        if sample.device in (None, DEVICE) and sample.length <= longest
    ]


def sample_matrix(operator: Operator) -> list[object]:
    """Return ``pytest.param(backend, dtype, sample)`` for every combination to test."""
    parameters: list[object] = []
    for backend in BACKENDS:
        name = str(backend.values[0])
        for dtype in dtypes(name):
            for sample in samples(operator, name):
                identifier = f"{name}-{str(dtype).removeprefix('torch.')}-{sample.label}"
                parameters.append(
                    pytest.param(name, dtype, sample, id=identifier, marks=backend.marks)
                )
    return parameters
