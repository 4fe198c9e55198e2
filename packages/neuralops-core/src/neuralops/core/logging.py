"""Says, once for each operator and set of reasons, that a slower backend runs.

The loggers are ``neuralops.<family>.<operator>``; the library attaches no handler.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from neuralops.core.operator import Operator

_logged: set[tuple[str, tuple[str, ...], bool]] = set()


def log_fallback(
    operator: Operator, backend: str, reasons: Sequence[str], arguments: Sequence[Any]
) -> None:
    """Log that ``backend`` runs because of ``reasons``: a warning where a GPU lies idle."""
    on_gpu = any(isinstance(a, torch.Tensor) and a.is_cuda for a in arguments)
    key = (operator.name, tuple(reasons), on_gpu)
    if key in _logged:
        return
    _logged.add(key)
    logging.getLogger(f"neuralops.{operator.family}.{operator.name}").log(
        logging.WARNING if on_gpu else logging.INFO,
        "%s runs on %s. %s",
        operator.name,
        backend,
        "; ".join(reasons),
    )


def forget_logged() -> None:
    """Let every message be logged once more."""
    _logged.clear()
