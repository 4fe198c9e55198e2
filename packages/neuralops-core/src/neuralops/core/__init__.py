"""Dispatch, suitability and logging of the NeuralOps kernel families.

This package knows no kernel family: the installed ones declare their operators through
the entry-point group ``neuralops.ops``.
"""

import neuralops

if getattr(neuralops, "__file__", None) is not None:
    raise ImportError(
        f"the distribution 'neuralops' ({neuralops.__file__}) owns the same modules as "
        "'neuralops-core', and the two mix their files when both are installed. Run:\n"
        "    pip uninstall neuralops neuralops-core\n"
        "    pip install neuralops-core"
    )

from neuralops.core.dispatch import (
    BackendUnavailableError,
    Explanation,
    explain,
    use_backend,
)
from neuralops.core.operator import Implementation, Operator, Sample, Workload
from neuralops.core.registry import get_operator, operators

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "Explanation",
    "Implementation",
    "Operator",
    "Sample",
    "Workload",
    "explain",
    "get_operator",
    "operators",
    "use_backend",
]
