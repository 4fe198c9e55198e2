"""Records what an operator's launchers would compile, without a GPU and without running it.

The public function is called on CPU tensors while a driver that only names a target is active.
Triton's own hook before a compilation is told every kernel with its specialisation, exactly as
the launcher passed it; it notes them and answers that there is nothing to compile, upon which
Triton launches nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from neuralops.core import suitability
from neuralops.core.dispatch import BackendUnavailableError
from neuralops.core.instruments.common import DTYPES, first_line, operator_failures
from neuralops.core.instruments.contenders import prepare, tensors
from neuralops.core.operator import Arguments, Operator, Sample, Workload

WORKLOAD_DTYPES = ("bf16", "fp16", "fp32")
SAMPLE_DTYPES = ("fp32", "bf16", "fp16")
CPU = torch.device("cpu")


@dataclass
class Configuration:
    """A kernel with everything that its compilation depends on.

    ``origin`` is the first input that asked for it.
    """

    kernel: str
    key: str
    origin: str
    function: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]

    def compile(self, target: GPUTarget) -> Any:
        """Compile it ahead of time."""
        source = ASTSource(self.function, self.signature, self.constants, self.attributes)
        return triton.compile(source, target=target, options=self.options)


@dataclass
class Recording:
    """The configurations of one operator for one target, and what could not be recorded."""

    configurations: list[Configuration]
    unserved: list[str]
    failures: list[str]


class _NamedDriver:
    """Names a target, and answers what a launch asks of a driver before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> tuple[str, object]:
        return ("ahead of time", self._target.arch)

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CPU

    def get_empty_cache_for_benchmark(self) -> None:
        return None

    def clear_cache(self, cache: object) -> None:
        return None

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Let an autotuner call every one of its configurations once."""

        def benchmark(call: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
            call()
            return [0.0] * len(quantiles)

        return benchmark


@contextmanager
def _recording(target: GPUTarget, note: Callable[[Any, dict[str, Any]], None]) -> Iterator[None]:
    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: A002
        note(fn.jit_function, compile)
        return True

    previous = driver._active, knobs.runtime.jit_cache_hook, suitability.CPU_TENSORS_SERVED
    driver.set_active(_NamedDriver(target))
    knobs.runtime.jit_cache_hook = hook
    suitability.CPU_TENSORS_SERVED = True
    try:
        yield
    finally:
        driver.set_active(previous[0])
        knobs.runtime.jit_cache_hook = previous[1]
        suitability.CPU_TENSORS_SERVED = previous[2]


def record(operator: Operator, target: GPUTarget) -> Recording:
    """Return what ``operator`` compiles for ``target`` over its workloads and samples."""
    found: dict[tuple[str, str], Configuration] = {}
    result = Recording([], [], [])
    for origin, make in _inputs(operator):

        def note(function: Any, details: dict[str, Any], origin: str = origin) -> None:
            configuration = _configuration(function, details, origin)
            found.setdefault((configuration.kernel, configuration.key), configuration)

        try:
            with _recording(target, note):
                _call(operator, make())
        except BackendUnavailableError as reasons:
            result.unserved.append(f"{origin}: {reasons}")
        except operator_failures() as error:
            result.failures.append(f"{origin}: {first_line(error)}")
    result.configurations = list(found.values())
    return result


def _configuration(function: Any, details: dict[str, Any], origin: str) -> Configuration:
    options = json.loads(details["specialization_data"])["options"]
    return Configuration(
        kernel=function.__name__,
        key=str(details["key"]),
        origin=origin,
        function=function,
        signature=details["signature"],
        constants=details["constants"],
        attributes=details["configs"][0],
        options={name: _as_tuple(value) for name, value in options.items()},
    )


def _as_tuple(value: Any) -> Any:
    """Turn JSON's lists back into tuples."""
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value


def _call(operator: Operator, arguments: Arguments) -> None:
    task = prepare(operator, arguments, zeros=True)
    outputs = tensors(operator.load()(*task.args, **task.kwargs, backend="triton"))
    outputs = tuple(output for output in outputs if output.requires_grad)
    if outputs:
        gradients = [torch.empty_like(output) for output in outputs]
        torch.autograd.grad(outputs, list(task.leaves.values()), gradients, allow_unused=True)


def _inputs(operator: Operator) -> Iterator[tuple[str, Callable[[], Arguments]]]:
    """Yield labelled makers of inputs: what is run in earnest comes first."""
    for dtype in WORKLOAD_DTYPES:
        for workload in operator.workloads:
            if workload.device == "cuda":
                yield f"{workload.label} {dtype}", _maker(workload, dtype)
    for dtype in SAMPLE_DTYPES:
        for sample in operator.samples:
            yield f"{sample.label} {dtype}", _maker(sample, dtype)


def _maker(source: Workload | Sample, dtype: str) -> Callable[[], Arguments]:
    """Make inputs without filling them, unless there are integers, whose values are checked."""

    def make() -> Arguments:
        with FakeTensorMode():
            shapes = source.make(CPU, DTYPES[dtype], torch.Generator())
        leaves, _ = tree_flatten(shapes)
        if any(isinstance(x, torch.Tensor) and not _floating(x) for x in leaves):
            return source.make(CPU, DTYPES[dtype], torch.Generator().manual_seed(0))
        unfilled: Arguments = tree_map(_unfilled, shapes)
        return unfilled

    return make


def _floating(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _unfilled(value: Any) -> Any:
    if not isinstance(value, FakeTensor):
        return value
    size = value.untyped_storage().nbytes() // value.element_size()
    memory = torch.empty(size, dtype=value.dtype)
    return memory.as_strided(value.shape, value.stride(), value.storage_offset())
