"""Tools that test operators: errors against the oracle, poisoned memory, opcheck.

What needs pytest is in :mod:`neuralops.core.testing.fixtures`.
"""

from neuralops.core.testing.errors import TOLERANCES, Error, Tolerance, compare, measure
from neuralops.core.testing.memory import poisoned_memory
from neuralops.core.testing.opcheck import opcheck_calls
from neuralops.core.testing.samples import (
    INTERPRETED_LENGTH,
    Oracle,
    ask_oracle,
    check_sample,
    evaluate,
    make_sample,
    uniform,
)

__all__ = [
    "INTERPRETED_LENGTH",
    "TOLERANCES",
    "Error",
    "Oracle",
    "Tolerance",
    "ask_oracle",
    "check_sample",
    "compare",
    "evaluate",
    "make_sample",
    "measure",
    "opcheck_calls",
    "poisoned_memory",
    "uniform",
]
