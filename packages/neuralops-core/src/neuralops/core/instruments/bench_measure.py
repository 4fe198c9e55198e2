"""Measures one workload: the operator and its peers, in turns, on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from neuralops.core.instruments.common import DTYPES, first_line, operator_failures
from neuralops.core.instruments.contenders import (
    Contender,
    Task,
    automatic_backend,
    make_task,
    moved_bytes,
    output_gradients,
    prepare,
)
from neuralops.core.instruments.timing import (
    host_microseconds,
    launches,
    peak_mebibytes,
    time_interleaved,
)
from neuralops.core.operator import Operator, Workload
from neuralops.core.testing.errors import measure

STAGES = ("inputs", "warm-up", "forward", "forward + backward", "memory and launches")


@dataclass
class Record:
    """What one contender did on one workload; ``None`` is not measured.

    ``problems`` says, by quantity, what it refused and why.
    """

    operator: str
    shape: str
    length: int
    series: str | None
    dtype: str
    contender: str
    peer: bool
    forward_ms: float | None = None
    both_ms: float | None = None
    floor_forward_ms: float | None = None
    floor_both_ms: float | None = None
    forward_bytes: int | None = None
    both_bytes: int | None = None
    peak_mib: float | None = None
    launches_forward: int | None = None
    launches_backward: int | None = None
    cold_seconds: float | None = None
    host_us: float | None = None
    error_output: float | None = None
    error_gradient: float | None = None
    problems: dict[str, str] = field(default_factory=dict)


@dataclass
class _Entrant:
    record: Record
    function: Callable[..., Any]
    gradients: tuple[torch.Tensor, ...] = ()
    backward: bool = False


def contenders(
    operator: Operator,
    task: Task,
    backends: Sequence[str],
    peers: Iterable[str],
) -> list[Contender]:
    """Return who is timed: ours on each backend (the automatic one by default), then the peers."""
    ours = backends or [automatic_backend(operator, task)]
    return [
        *(Contender(f"neuralops {backend}", operator, backend=backend) for backend in ours),
        *(Contender(name, operator, peer=operator.peers[name]) for name in peers),
    ]


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Args:
        device: where.
        rate: bytes a second of a copy there.
        budget: seconds for each timed quantity.
        backends: ours; the automatic choice where empty.
        peers: by name.
        precision: whether errors against the float64 reference are measured too.
    """

    device: torch.device
    rate: float
    budget: float
    backends: Sequence[str]
    peers: Sequence[str]
    precision: bool


def measure_workload(
    operator: Operator,
    workload: Workload,
    dtype: str,
    plan: Plan,
    advance: Callable[[str], None],
) -> list[tuple[Contender, Record]]:
    """Measure every contender on one workload; ``advance`` is told each of :data:`STAGES`."""
    advance("inputs")
    task = make_task(operator, workload, plan.device, DTYPES[dtype])
    records: list[tuple[Contender, Record]] = []
    entrants = []
    advance("warm-up")
    for contender in contenders(operator, task, plan.backends, plan.peers):
        record = Record(
            operator.name, workload.label, workload.length, workload.series, dtype,
            contender.name, contender.peer is not None,
        )  # fmt: skip
        records.append((contender, record))
        entrant = _enter(contender, record, task, plan.rate)
        if entrant is not None:
            entrants.append(entrant)

    advance("forward")
    times = time_interleaved(
        {e.record.contender: _forward(e, task) for e in entrants}, plan.device, plan.budget
    )
    for entrant in entrants:
        entrant.record.forward_ms = times[entrant.record.contender]

    advance("forward + backward")
    full = [entrant for entrant in entrants if entrant.backward]
    times = time_interleaved(
        {e.record.contender: _both(e, task) for e in full}, plan.device, plan.budget
    )
    for entrant in full:
        entrant.record.both_ms = times[entrant.record.contender]

    advance("memory and launches")
    for entrant in entrants:
        _count(entrant, task, plan.device)
    if plan.precision:
        _measure_errors(operator, entrants, task)
    return records


def _enter(contender: Contender, record: Record, task: Task, rate: float) -> _Entrant | None:
    """Warm a contender up and note what it cannot do; ``None`` where that is everything."""
    try:
        entrant = _Entrant(record, contender.load())
        outputs = task.forward(entrant.function)
        entrant.gradients = output_gradients(outputs)
    except operator_failures() as error:
        absent = contender.peer is not None and isinstance(error, ImportError)
        record.problems["absent" if absent else "forward"] = first_line(error)
        return None
    record.forward_bytes, record.both_bytes = moved_bytes(task, outputs)
    record.floor_forward_ms = 1e3 * record.forward_bytes / rate
    record.floor_both_ms = 1e3 * record.both_bytes / rate
    try:
        task.both(entrant.function, entrant.gradients)
        entrant.backward = True
    except operator_failures() as error:
        record.problems["backward"] = first_line(error)
    return entrant


def _forward(entrant: _Entrant, task: Task) -> Callable[[], object]:
    return lambda: task.forward(entrant.function)


def _both(entrant: _Entrant, task: Task) -> Callable[[], object]:
    return lambda: task.both(entrant.function, entrant.gradients)


def _count(entrant: _Entrant, task: Task, device: torch.device) -> None:
    record = entrant.record
    record.launches_forward = launches(_forward(entrant, task), device)
    if not entrant.backward:
        return
    record.peak_mib = peak_mebibytes(_both(entrant, task), device)
    both = launches(_both(entrant, task), device)
    if both is not None and record.launches_forward is not None:
        record.launches_backward = both - record.launches_forward


def _measure_errors(operator: Operator, entrants: Sequence[_Entrant], task: Task) -> None:
    """Note the error of the output and the largest error of a gradient against float64."""
    try:
        reference = Contender("reference", operator, backend="reference").load()
        wide = prepare(operator, (task.args, task.kwargs), torch.float64)
        outputs = wide.forward(reference)
        upstream = output_gradients(outputs)
        gradients = wide.both(reference, upstream)
        for entrant in entrants:
            record = entrant.record
            actual = task.forward(entrant.function)
            record.error_output = max(measure(a, o)[0] for a, o in zip(actual, outputs))
            if entrant.backward:
                narrow = tuple(g.to(a.dtype) for g, a in zip(upstream, actual))
                found = task.both(entrant.function, narrow)
                record.error_gradient = max(measure(found[n], gradients[n])[0] for n in found)
    except operator_failures() as error:
        for entrant in entrants:
            entrant.record.problems["precision"] = first_line(error)


def host_times(operator: Operator, task: Task, plan: Plan) -> dict[str, float]:
    """Return the host microseconds of a forward call of each contender that can make it."""
    times = {}
    for contender in contenders(operator, task, plan.backends, plan.peers):
        try:
            function = contender.load()
            task.forward(function)
            times[contender.name] = host_microseconds(partial(task.forward, function), plan.device)
        except operator_failures():
            continue
    return times
