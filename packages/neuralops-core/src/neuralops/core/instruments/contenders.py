"""What is timed: the operator's backends and its peers, on the same inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from neuralops.core.dispatch import explain, use_backend
from neuralops.core.instruments.common import UsageError
from neuralops.core.operator import Arguments, Operator, Workload, load

Tensor = torch.Tensor


@dataclass(frozen=True)
class Contender:
    """A function that takes the public function's arguments.

    ``peer`` is the target of another library's adapter; without one it is ours, on ``backend``.
    """

    name: str
    operator: Operator
    backend: str | None = None
    peer: str | None = None

    def load(self) -> Callable[..., Any]:
        """Return the function.

        Raises:
            ImportError: the peer is not installed.
        """
        if self.peer is not None:
            function: Callable[..., Any] = load(self.peer)
            return function
        ours, backend = self.operator.load(), self.backend

        def run(*args: Any, **kwargs: Any) -> Any:
            return ours(*args, **kwargs, backend=backend)

        return run


@dataclass
class Task:
    """One workload's inputs, ready to run; floating inputs are differentiated."""

    names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: dict[str, Tensor]

    def forward(self, function: Callable[..., Any]) -> tuple[Tensor, ...]:
        """Run the forward alone, as inference does."""
        with torch.no_grad():
            return tensors(function(*self.args, **self.kwargs))

    def both(
        self, function: Callable[..., Any], gradients: tuple[Tensor, ...]
    ) -> dict[str, Tensor]:
        """Run forward and backward and return the inputs' gradients."""
        outputs = tensors(function(*self.args, **self.kwargs))
        pairs = [(o, g) for o, g in zip(outputs, gradients) if o.requires_grad]
        if not pairs:
            raise RuntimeError("the output does not require a gradient")
        found = torch.autograd.grad(
            [output for output, _ in pairs],
            list(self.leaves.values()),
            [gradient for _, gradient in pairs],
            allow_unused=True,
        )
        return {name: g for name, g in zip(self.leaves, found) if g is not None}


def make_task(
    operator: Operator, workload: Workload, device: torch.device, dtype: torch.dtype
) -> Task:
    """Make a workload's inputs.

    Raises:
        UsageError: an input is zero throughout, which would be timed too fast.
    """
    args, kwargs = workload.make(device, dtype, torch.Generator().manual_seed(0))
    return prepare(operator, (args, kwargs))


def prepare(
    operator: Operator,
    arguments: Arguments,
    dtype: torch.dtype | None = None,
    *,
    zeros: bool = False,
) -> Task:
    """Turn arguments into a task, with floating tensors converted to ``dtype`` if given.

    Raises:
        UsageError: an input is zero throughout, unless ``zeros`` allows it.
    """
    args, kwargs = arguments
    bound = inspect.signature(operator.load()).bind(*args, **kwargs)
    leaves = {}
    for name, value in bound.arguments.items():
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            if not zeros and value.numel() and not bool(value.any()):
                raise UsageError(f"{operator.name}: the input {name} is zero throughout")
            leaf = value.detach() if dtype is None else value.detach().to(dtype)
            leaves[name] = leaf.requires_grad_()
            bound.arguments[name] = leaves[name]
    return Task(tuple(bound.arguments), bound.args, bound.kwargs, leaves)


def output_gradients(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return random gradients for outputs.

    Raises:
        ValueError: an output is zero throughout or not finite.
    """
    for output in outputs:
        if output.numel() and not (bool(output.any()) and bool(output.isfinite().all())):
            raise ValueError("an output is zero throughout or not finite")
    return tuple(torch.randn_like(output) for output in outputs)


def automatic_backend(operator: Operator, task: Task) -> str:
    """Return the backend that runs ``task`` when none is asked for.

    Raises:
        RuntimeError: none can.
    """
    with use_backend(None):
        explanation = explain(operator.load(), *task.args, **task.kwargs)
    if explanation.backend is None:
        raise RuntimeError(str(explanation))
    return explanation.backend


def moved_bytes(task: Task, outputs: tuple[Tensor, ...]) -> tuple[int, int]:
    """Return the fewest bytes of a forward and of forward and backward.

    The forward reads each floating input and writes each output once; the backward reads the inputs
    and the outputs' gradients once more and writes the inputs' gradients.
    """
    inputs = sum(_bytes(leaf) for leaf in task.leaves.values())
    written = sum(_bytes(output) for output in outputs)
    forward = inputs + written
    return forward, forward + inputs + written + inputs


def _bytes(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def tensors(outputs: Any) -> tuple[Tensor, ...]:
    """Return what a call gave as a tuple; a state of several tensors is flattened into it."""
    return tuple(tree_flatten(outputs)[0])
