"""Chooses the implementation that runs a call.

An explicit request, from the ``backend=`` argument, :class:`use_backend` or the environment
variable ``NEURALOPS_BACKEND`` in this order, never falls back. Without one, the first
implementation against which its suitability gives no reason runs.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from neuralops.core.logging import log_fallback
from neuralops.core.operator import BACKENDS, Operator
from neuralops.core.registry import get_operator


class BackendUnavailableError(RuntimeError):
    """The requested backend cannot serve this call; the message gives every reason."""


class _ThreadState(threading.local):
    backend: str | None = None
    explaining: bool = False


_thread = _ThreadState()


class use_backend:  # noqa: N801 - a context manager used like a function
    """Request a backend for every call of this thread inside a ``with`` block.

    Args:
        backend: ``"triton"``, ``"torch"`` or ``"reference"``; ``None`` returns to the
            automatic choice, whatever an enclosing block or the environment says.

    Raises:
        ValueError: an unknown backend.

    Example:
        >>> import neuralops.core
        >>> with neuralops.core.use_backend("torch"):
        ...     pass
    """

    def __init__(self, backend: str | None) -> None:
        if backend is not None:
            _check_backend("use_backend", backend)
        self._backend = backend if backend is not None else "automatic"
        self._previous: list[str | None] = []

    def __enter__(self) -> None:
        self._previous.append(_thread.backend)
        _thread.backend = self._backend

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _thread.backend = self._previous.pop()


def _check_backend(source: str, backend: object) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"{source}: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")


def _requested(operator: Operator, backend: str | None) -> str | None:
    if backend is not None:
        _check_backend(operator.name, backend)
        return backend
    if _thread.backend is not None:
        return None if _thread.backend == "automatic" else _thread.backend
    backend = os.environ.get("NEURALOPS_BACKEND") or None
    if backend is not None:
        _check_backend("the environment variable NEURALOPS_BACKEND", backend)
    return backend


def dispatch(operator: Operator, backend: str | None, *arguments: Any) -> Any:
    """Run ``operator`` on validated ``arguments`` with the implementation that serves them.

    Raises:
        ValueError: an unknown backend.
        BackendUnavailableError: the requested backend cannot serve the call, or none can.
    """
    requested = _requested(operator, backend)
    if _thread.explaining:
        raise _ExplainedError(_explanation(operator, requested, arguments))
    if requested is not None:
        implementation = operator.implementation(requested)
        reasons = implementation.suitability(*arguments)
        if reasons:
            raise BackendUnavailableError(
                f"{operator.name}: backend {requested!r} was requested but cannot serve this "
                f"call: {'; '.join(reasons)}. Without backend= the fastest suitable one is chosen."
            )
        return implementation.run(*arguments)

    against: list[str] = []
    for implementation in operator.implementations:
        if not implementation.automatic:
            continue
        reasons = implementation.reasons(*arguments)
        if reasons:
            against.extend(f"{implementation.backend}: {reason}" for reason in reasons)
            continue
        if torch.compiler.is_compiling():
            return implementation.run(*arguments)
        if against:
            log_fallback(operator, implementation.backend, against, arguments)
        try:
            return implementation.run(*arguments)
        except _kernel_failures() as error:
            against.append(f"{implementation.backend}: {type(error).__name__}: {error}")
    raise BackendUnavailableError(
        f"{operator.name}: no backend can serve this call: {'; '.join(against)}"
    )


def _kernel_failures() -> tuple[type[BaseException], ...]:
    """The errors of a kernel that does not compile or asks for more than the device has.

    Evaluated only while an error passes, so that no call pays for it, and empty as long as
    nothing has imported Triton.
    """
    if "triton" not in sys.modules:
        return ()
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return (CompilationError, OutOfResources, PTXASError)


@dataclass(frozen=True)
class Explanation:
    """What `explain` found.

    Attributes:
        operator: the operator's name.
        backend: the backend that would run, or ``None`` where none can.
        requested: the backend that was asked for, or ``None``.
        reasons: for each backend of the operator, every reason against it.
    """

    operator: str
    backend: str | None
    requested: str | None
    reasons: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        runs = f"runs on {self.backend}" if self.backend else "cannot run"
        asked = f" ({self.requested} was requested)" if self.requested else ""
        lines = [f"{self.operator} {runs}{asked}"]
        lines += [
            f"  not on {backend}: {reason}"
            for backend, reasons in self.reasons.items()
            for reason in reasons
        ]
        return "\n".join(lines)


class _ExplainedError(Exception):
    """Carries the explanation out of a call that stops where its kernel would start."""

    def __init__(self, explanation: Explanation) -> None:
        super().__init__(str(explanation))
        self.explanation = explanation


def _explanation(
    operator: Operator, requested: str | None, arguments: tuple[Any, ...]
) -> Explanation:
    reasons = {
        i.backend: tuple((i.suitability if requested else i.reasons)(*arguments))
        for i in operator.implementations
    }
    candidates = (
        [requested] if requested else [i.backend for i in operator.implementations if i.automatic]
    )
    serving = [backend for backend in candidates if not reasons.get(backend, ("absent",))]
    return Explanation(operator.name, serving[0] if serving else None, requested, reasons)


def explain(op: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Explanation:
    """Tell which backend would run ``op(*args, **kwargs)`` and why, without running it.

    Args:
        op: an operator's public function, or its name.
        *args: the arguments of the call; they are validated as the call would validate them.
        **kwargs: likewise.

    Raises:
        TypeError: ``op`` is no operator of an installed family.
        ValueError: an unknown name, or what the call itself would raise.

    Example:
        >>> import torch, neuralops.core
        >>> from neuralops.ssm import hgrn2_scan
        >>> f, iv = torch.rand(1, 8, 4), torch.randn(1, 8, 4)
        >>> neuralops.core.explain(hgrn2_scan, f, iv).backend
        'torch'
    """
    function = get_operator(op).load() if isinstance(op, str) else op
    if not callable(function):
        raise TypeError(
            f"explain: op must be a NeuralOps operator or its name, got {type(op).__name__}; "
            "the call's arguments come after it"
        )
    _thread.explaining = True
    try:
        function(*args, **kwargs)
    except _ExplainedError as explained:
        return explained.explanation
    finally:
        _thread.explaining = False
    raise TypeError(
        f"explain: op must be a NeuralOps operator or its name, got {op!r}, "
        "which dispatched nothing"
    )
