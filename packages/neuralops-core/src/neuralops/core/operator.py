"""What an operator declares about itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

BACKENDS = ("triton", "torch", "reference")


def load(target: str) -> Any:
    """Return the object that ``"package.module:attribute"`` names, importing the module."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def no_reasons(*arguments: Any) -> Sequence[str]:
    """The suitability of an implementation that serves every valid call."""
    return ()


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator.

    Args:
        backend: ``"triton"``, ``"torch"`` or ``"reference"``.
        run: computes it. All the implementations of an operator take the same positional
            arguments. Its module imports no kernel before its first launch.
        suitability: takes those arguments and returns *every* reason, as sentences, why this
            implementation cannot serve them; nothing where it can.
        automatic: whether it may be chosen when no backend is asked for.
        provisional: a sentence why it is chosen only when it is asked for although it could serve,
            such as kernels that no GPU has run yet. It is given as a reason against it, and the
            compile gate tells its spills without failing.
    """

    backend: str
    run: Callable[..., Any]
    suitability: Callable[..., Sequence[str]] = no_reasons
    automatic: bool = True
    provisional: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, got {self.backend!r}")

    def reasons(self, *arguments: Any) -> Sequence[str]:
        """Return every reason why it is not chosen automatically for these arguments."""
        reasons = self.suitability(*arguments)
        return reasons if reasons or self.provisional is None else (self.provisional,)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Sample:
    """One small input of an operator, for tests, parity, docs and the compile gate.

    Args:
        label: a few words, unique within the operator.
        make: ``make(device, dtype, generator) -> (args, kwargs)`` of the public function.
            The generator lives on the CPU, so that a seed means the same input on every
            device. Floating tensors are differentiated unless they are named in
            ``constants``.
        length: the sequence length, by which interpreted runs pick the short ones.
        sensitive: whether the mathematics itself amplifies rounding here (a denominator near
            its clamp, a state at its clip), so that the error is judged against that of the
            reference in the same dtype instead of a fixed tolerance.
        constants: keyword arguments that are not differentiated.
        device: the kind of device it is run on, where the oracle would take too long on another.
    """

    label: str
    make: Callable[[torch.device, torch.dtype, torch.Generator], Arguments]
    length: int
    sensitive: bool = False
    constants: tuple[str, ...] = ()
    device: str | None = None


@dataclass(frozen=True)
class Workload:
    """One large input of an operator, for benchmarks and the compile gate.

    Args:
        label: the shape, such as ``"B8 L2048 D2048"``.
        make: as in `Sample`.
        device: the kind of device it is sized for, ``"cuda"`` or ``"cpu"``.
        series: workloads of one series differ in length only and are plotted together.
        length: the sequence length.
    """

    label: str
    make: Callable[[torch.device, torch.dtype, torch.Generator], Arguments]
    length: int
    device: str = "cuda"
    series: str | None = None


@dataclass(frozen=True)
class Operator:
    """An operator: its name, its implementations in order of preference, and its inputs.

    Args:
        name: the public function's name, the dispatch key and the registered name.
        family: the package below ``neuralops`` that holds it.
        function: ``"package.module:function"`` of the public function.
        implementations: in order of preference.
        samples: small inputs that together reach every path.
        workloads: the inputs it is timed on.
        peers: other libraries' functions to time beside it: a name, and
            ``"package.module:function"`` of an adapter that takes the public function's
            arguments and raises ImportError where the peer is not installed.
    """

    name: str
    family: str
    function: str
    implementations: tuple[Implementation, ...]
    samples: tuple[Sample, ...] = ()
    workloads: tuple[Workload, ...] = ()
    peers: Mapping[str, str] = field(default_factory=dict)

    @property
    def distribution(self) -> str:
        """The name to ``pip install``."""
        return f"neuralops-{self.family}"

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends this operator has, in order of preference."""
        return tuple(implementation.backend for implementation in self.implementations)

    def implementation(self, backend: str) -> Implementation:
        """Return the implementation of ``backend``.

        Raises:
            ValueError: the operator has no such backend.
        """
        for implementation in self.implementations:
            if implementation.backend == backend:
                return implementation
        raise ValueError(
            f"{self.name}: backend must be one of {', '.join(self.backends)}, got {backend!r}"
        )

    def load(self) -> Callable[..., Any]:
        """Return the public function."""
        function: Callable[..., Any] = load(self.function)
        return function
