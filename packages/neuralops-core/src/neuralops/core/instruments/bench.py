"""Times an operator on its workloads, with its peers beside it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from neuralops.core.instruments.bench_measure import (
    STAGES,
    Plan,
    Record,
    host_times,
    measure_workload,
)
from neuralops.core.instruments.bench_report import summary, write
from neuralops.core.instruments.cold import cold_seconds
from neuralops.core.instruments.common import (
    DTYPES,
    UsageError,
    environment,
    first_line,
    require_tools,
    select_operators,
)
from neuralops.core.instruments.contenders import Contender, make_task, prepare
from neuralops.core.instruments.tables import progress_bar
from neuralops.core.instruments.timing import copy_rate
from neuralops.core.operator import Operator, Workload
from neuralops.core.testing.samples import make_sample

SUMMARY = "times an operator on its workloads, with its peers beside it"
HOST_LENGTH = 256
"""Host time is measured at a workload this short, or else at the operator's first sample."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    # fmt: off
    parser.add_argument("operator", help="the operator's name, such as hgrn2_scan")
    parser.add_argument("--shape", action="append", default=[], metavar="TEXT",
                        help="only workloads whose label contains this; may be repeated")
    parser.add_argument("--backend", action="append", default=[],
                        help="time this backend; default: the one that runs by itself")
    parser.add_argument("--peer", action="append", default=None, metavar="NAME",
                        help="time this peer; default: all of the operator's; 'none' for none")
    parser.add_argument("--dtype", action="append", choices=tuple(DTYPES), default=[],
                        help="default: bf16 on a GPU, fp32 on the CPU")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: the GPU if there is one")
    parser.add_argument("--budget", type=float, default=0.3, metavar="SECONDS",
                        help="time for each measurement (default: %(default)s)")
    parser.add_argument("--cold", choices=("first", "all", "none"), default="first",
                        help="for which shapes cold starts are measured (default: %(default)s)")
    parser.add_argument("--precision", action="store_true",
                        help="also measure the errors against the float64 reference")
    parser.add_argument("--quick", action="store_true",
                        help="few repetitions and no cold start: shows that it works")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), metavar="FOLDER",
                        help="where JSON, Markdown and plots go (default: %(default)s)")
    # fmt: on


def run(options: argparse.Namespace) -> int:
    """Measure, show and write; 1 where ours failed on a workload."""
    require_tools()
    (operator,) = select_operators([options.operator], [])
    device = _device(options.device)
    workloads = _workloads(operator, options.shape, device)
    plan = _plan(operator, options, device)
    dtypes = options.dtype or ["bf16" if device.type == "cuda" else "fp32"]
    cold = "none" if options.quick else options.cold
    records = _measure(operator, workloads, dtypes, plan, cold)

    described = environment()
    hardware = described["gpu"] if device.type == "cuda" else described["cpu"]
    table = summary(
        records,
        f"{operator.name} on {hardware}",
        f"Floor: the bytes that must be moved, at the rate of a copy: {plan.rate / 1e9:.0f} GB/s.",
    )
    table.show()
    kind = "gpu" if device.type == "cuda" else "cpu"
    stem = f"{operator.name}-{kind}"
    for path in write(options.out, stem, table, records, described, plan.rate):
        print(path)
    return 1 if any(not r.peer and r.problems for r in records) else 0


def _device(asked: str | None) -> torch.device:
    present = torch.cuda.is_available()
    if asked == "gpu" and not present:
        raise UsageError("there is no GPU: leave out --device gpu, or check torch.version.cuda")
    return torch.device("cuda" if present and asked != "cpu" else "cpu")


def _workloads(operator: Operator, shapes: Sequence[str], device: torch.device) -> list[Workload]:
    fitting = [w for w in operator.workloads if w.device == device.type]
    if not fitting:
        raise UsageError(f"{operator.name} declares no workload for {device.type}")
    for shape in shapes:
        if not any(shape in workload.label for workload in fitting):
            labels = "; ".join(workload.label for workload in fitting)
            raise UsageError(f"no workload of {operator.name} is called {shape!r}: {labels}")
    return [w for w in fitting if not shapes or any(shape in w.label for shape in shapes)]


def _plan(operator: Operator, options: argparse.Namespace, device: torch.device) -> Plan:
    for backend in options.backend:
        if backend not in operator.backends:
            known = ", ".join(operator.backends)
            raise UsageError(f"{operator.name} has no backend {backend!r}: {known}")
    peers = list(operator.peers) if options.peer is None else options.peer
    if peers == ["none"]:
        peers = []
    for peer in peers:
        if peer not in operator.peers:
            known = ", ".join(operator.peers) or "it declares none"
            raise UsageError(f"{operator.name} has no peer {peer!r}: {known}")
    budget = 0.01 if options.quick else options.budget
    return Plan(device, copy_rate(device), budget, options.backend, peers, options.precision)


def _measure(
    operator: Operator,
    workloads: Sequence[Workload],
    dtypes: Sequence[str],
    plan: Plan,
    cold: str,
) -> list[Record]:
    records: list[Record] = []
    with progress_bar() as progress:
        steps = len(workloads) * len(dtypes) * (len(STAGES) + 1)
        bar = progress.add_task(operator.name, total=steps)
        for dtype in dtypes:
            host = _host_times(operator, workloads, dtype, plan)
            for i, workload in enumerate(workloads):
                title = f"{workload.label} {dtype}"

                def advance(stage: str, title: str = title) -> None:
                    progress.update(bar, advance=1, description=f"{title}: {stage}")

                found = measure_workload(operator, workload, dtype, plan, advance)
                for _, record in found:
                    record.host_us = host.get(record.contender)
                advance("cold start")
                if cold == "all" or (cold == "first" and i == 0):
                    _add_cold(found, plan.device)
                records += [record for _, record in found]
    return records


def _host_times(
    operator: Operator, workloads: Sequence[Workload], dtype: str, plan: Plan
) -> dict[str, float]:
    """Measure host times, on a GPU: on the CPU the call waits for the arithmetic."""
    if plan.device.type != "cuda":
        return {}
    short = [
        w for w in operator.workloads if w.device == plan.device.type and w.length <= HOST_LENGTH
    ]
    if short:
        workload = min(short, key=lambda w: w.length)
        return host_times(operator, make_task(operator, workload, plan.device, DTYPES[dtype]), plan)
    if not operator.samples:
        return {}
    sample = make_sample(operator.samples[0], plan.device, DTYPES[dtype])
    return host_times(operator, prepare(operator, sample), plan)


def _add_cold(found: Sequence[tuple[Contender, Record]], device: torch.device) -> None:
    """Measure the cold start of every contender that ran forward and backward."""
    torch.cuda.empty_cache()
    for contender, record in found:
        if record.both_ms is None:
            continue
        try:
            record.cold_seconds = cold_seconds(contender, record.shape, record.dtype, device)
        except RuntimeError as error:
            record.problems["cold"] = first_line(error)
