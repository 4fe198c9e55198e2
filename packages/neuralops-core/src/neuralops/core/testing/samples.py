"""Runs an operator on its sample inputs and holds the results against the oracle."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from neuralops.core.operator import Arguments, Operator, Sample
from neuralops.core.testing.errors import TOLERANCES, Error, compare, measure

Tensor = torch.Tensor

INTERPRETED_LENGTH = 130
"""The longest sequence that Triton's interpreter is asked to run."""


def uniform(
    shape: tuple[int, ...],
    low: float,
    high: float,
    *,
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor:
    """Return values drawn evenly between ``low`` and ``high``, the same on every device."""
    values = torch.rand(shape, generator=generator, dtype=torch.float32)
    return (low + (high - low) * values).to(device, dtype)


def make_sample(
    sample: Sample, device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> Arguments:
    """Return the arguments of ``sample``: the same values for the same seed on every device."""
    return sample.make(torch.device(device), dtype, torch.Generator().manual_seed(seed))


def evaluate(
    function: Callable[..., Any],
    arguments: Arguments,
    *,
    dtype: torch.dtype | None = None,
    constants: Collection[str] = (),
    **options: Any,
) -> dict[str, Tensor]:
    """Return every output of a call and the gradient of every floating argument, by name.

    Args:
        function: a public function.
        arguments: its positional and keyword arguments.
        dtype: what floating tensors are converted to first, or ``None``.
        constants: the arguments that are not differentiated.
        **options: further keyword arguments, such as ``backend="torch"``.

    The gradients are those of the outputs weighted with fixed random numbers that every dtype
    represents exactly. A state of several tensors is a tuple, in and out; its parts are named
    ``"initial_state[0]"`` and so on, and ``"final_state"``, ``"final_normalizer"``.
    """
    args, kwargs = arguments
    bound = inspect.signature(function).bind(*args, **kwargs, **options)
    leaves: dict[str, Tensor] = {}

    def prepared(name: str, label: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(prepared(name, f"{label}[{i}]", part) for i, part in enumerate(value))
        if not isinstance(value, Tensor):
            return value
        if not (value.is_floating_point() or value.is_complex()):
            return value
        leaf = value.detach() if dtype is None else _convert(value.detach(), dtype)
        if name not in constants:
            leaves[label] = leaf.requires_grad_()
        return leaf

    for name, value in bound.arguments.items():
        bound.arguments[name] = prepared(name, name, value)

    outputs, _ = tree_flatten(function(*bound.args, **bound.kwargs))
    names = ["output", "final_state", "final_normalizer"][: len(outputs)]
    generator = torch.Generator().manual_seed(len(leaves))
    weights = [
        torch.randn(output.shape, generator=generator).bfloat16().to(output.device, output.dtype)
        for output in outputs
    ]
    results = {name: output.detach() for name, output in zip(names, outputs)}
    differentiable = [
        (output, weight) for output, weight in zip(outputs, weights) if output.requires_grad
    ]
    if differentiable:
        gradients = torch.autograd.grad(
            [output for output, _ in differentiable],
            list(leaves.values()),
            [weight for _, weight in differentiable],
            allow_unused=True,
        )
        for (name, leaf), gradient in zip(leaves.items(), gradients):
            results[f"grad {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return results


def _convert(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype)


@dataclass(frozen=True)
class Oracle:
    """What the reference says about a sample.

    Attributes:
        results: outputs and gradients, computed in float64 on the sample's own inputs.
        plain: the same in the sample's dtype, where the sample is ``sensitive``.
    """

    results: Mapping[str, Tensor]
    plain: Mapping[str, Tensor]


def ask_oracle(
    operator: Operator,
    sample: Sample,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
) -> Oracle:
    """Run the reference on ``sample``; every backend is held against the same answer."""
    function = operator.load()
    arguments = make_sample(sample, device, dtype, seed)
    constants = sample.constants
    results = evaluate(
        function, arguments, dtype=torch.float64, constants=constants, backend="reference"
    )
    if not sample.sensitive:
        return Oracle(results, {})
    plain = evaluate(function, arguments, constants=constants, backend="reference")
    return Oracle(results, plain)


def check_sample(
    operator: Operator,
    sample: Sample,
    *,
    backend: str,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
    oracle: Oracle | None = None,
) -> list[Error]:
    """Run ``sample`` on ``backend`` and return the error of each quantity against the oracle.

    The oracle is the operator's reference on the same inputs in float64, asked here unless its
    answer is given. Where the sample is ``sensitive`` the bound is at least twice the error that
    the reference itself makes in ``dtype``.
    """
    arguments = make_sample(sample, device, dtype, seed)
    results = evaluate(operator.load(), arguments, constants=sample.constants, backend=backend)
    if oracle is None:
        oracle = ask_oracle(operator, sample, device=device, dtype=dtype, seed=seed)
    tolerance = TOLERANCES[dtype]
    errors = []
    for name, result in results.items():
        bound = tolerance.gradient if name.startswith("grad ") else tolerance.output
        if name in oracle.plain:
            bound = max(bound, 2 * measure(oracle.plain[name], oracle.results[name])[0])
        errors.append(compare(name, result, oracle.results[name], bound))
    return errors
