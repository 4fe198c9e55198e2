"""Holds every installed operator against its float64 reference."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from neuralops.core.instruments.common import (
    DTYPES,
    UsageError,
    environment,
    environment_markdown,
    first_line,
    operator_failures,
    require_tools,
    select_operators,
    unique,
    write_json,
)
from neuralops.core.instruments.parity_measure import (
    HALVES,
    Half,
    Measured,
    chosen_samples,
    measure,
    measure_in_child,
    share_of_bound,
)
from neuralops.core.instruments.tables import Table, progress_bar
from neuralops.core.operator import Operator
from neuralops.core.suitability import INTERPRETING, TRITON_RELEASE

SUMMARY = "the error of every operator, backend and dtype against the float64 reference"
EXPLANATION = (
    "The error is rms(x - reference) / rms(reference), the worst over the samples; a single "
    "element may be off by four times the bound, in units of max |reference|. Where the "
    "mathematics itself amplifies rounding, the bound is twice the error of a plain loop in the "
    "same dtype."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    # fmt: off
    parser.add_argument("--package", action="append", default=[], metavar="FAMILY",
                        help="only this family (ssm, attn, ...); may be repeated")
    parser.add_argument("--operator", action="append", default=[], help="only this operator")
    parser.add_argument("--device", action="append", choices=("cpu", "gpu"), default=[],
                        help="only this device; default: both")
    parser.add_argument("--dtype", action="append", choices=tuple(DTYPES), default=[],
                        help="only this dtype; default: all that a backend is measured in")
    parser.add_argument("--out", type=Path, default=Path("build/parity"), metavar="FOLDER",
                        help="where parity.json and parity.md go (default: %(default)s)")
    # fmt: on


@dataclass(frozen=True)
class Skip:
    """Something that was not measured, and why."""

    what: str
    reason: str


def run(options: argparse.Namespace) -> int:
    """Measure, show, write and judge."""
    require_tools()
    operators = select_operators(options.operator, options.package)
    if not operators:
        print("parity: no operator is installed in " + (", ".join(options.package) or "any family"))
    halves, skips = _halves(options.device or ["cpu", "gpu"], options.dtype)
    measured = _measure_all(operators, halves)
    skips += [Skip(o.name, "it declares no samples") for o in operators if not o.samples]
    skips += _unserved(measured)
    table = _summary(operators, halves, measured, skips)
    table.show()
    complaints = _complaints(measured)
    for complaint in complaints:
        print(complaint)
    _write(options.out, table, measured, skips, complaints)
    print(f"parity: {_verdict(measured, complaints)}; written to {options.out}/parity.json and .md")
    return 1 if complaints else 0


def _halves(devices: Sequence[str], dtypes: Sequence[str]) -> tuple[list[Half], list[Skip]]:
    """Return what can be measured here, with the dtypes asked for, and what cannot and why."""
    kinds = {"gpu" if device == "gpu" else "cpu" for device in devices}
    halves, skips = [], []
    for half in HALVES:
        if ("gpu" if half.device == "cuda" else "cpu") not in kinds:
            continue
        wanted = tuple(dtype for dtype in half.dtypes if not dtypes or dtype in dtypes)
        reason = _absence(half)
        if reason:
            skips.append(Skip(half.execution, reason))
        elif wanted:
            halves.append(Half(half.device, half.backend, wanted, half.execution))
    if not halves and not skips:
        raise UsageError(f"no backend is measured in {', '.join(dtypes)} on {', '.join(devices)}")
    return halves, skips


def _absence(half: Half) -> str:
    if half.backend == "triton" and TRITON_RELEASE is None:
        return "Triton is not installed: pip install 'neuralops-core[triton]'"
    if half.device == "cuda" and not torch.cuda.is_available():
        return "no GPU"
    if half.device == "cuda" and half.backend == "triton" and INTERPRETING:
        return "TRITON_INTERPRET=1 is set, so that no kernel would be compiled: unset it"
    return ""


def _measure_all(operators: Sequence[Operator], halves: Sequence[Half]) -> list[Measured]:
    total = sum(len(chosen_samples(o, h)) * len(h.dtypes) for o in operators for h in halves)
    measured = []
    with progress_bar() as progress:
        task = progress.add_task("parity", total=total)
        for operator in operators:
            for group in _groups(operator, halves):
                name = " and ".join(half.execution for half in group)
                progress.update(task, description=f"{operator.name} {name}")
                for one in _measure_group(operator, group):
                    measured.append(one)
                    progress.advance(task)
    return measured


def _groups(operator: Operator, halves: Sequence[Half]) -> list[list[Half]]:
    """Return the halves that run together: on one device, and the interpreter by itself."""
    served = [half for half in halves if half.backend in operator.backends]
    groups = [
        [half for half in served if half.device == device and not half.interpreted]
        for device in ("cpu", "cuda")
    ]
    groups.insert(1, [half for half in served if half.interpreted])
    return [group for group in groups if group]


def _measure_group(operator: Operator, group: Sequence[Half]) -> Iterator[Measured]:
    try:
        if group[0].interpreted:
            yield from measure_in_child(operator, group[0])
        else:
            yield from measure(operator, group)
    except operator_failures() as failure:
        for half in group:
            yield Measured(
                operator.name,
                half.execution,
                ", ".join(half.dtypes),
                "every sample",
                failure=first_line(failure),
            )


def _unserved(measured: Sequence[Measured]) -> list[Skip]:
    found = [m for m in measured if m.unserved]
    return [
        Skip(f"{m.operator} {m.execution} {m.dtype} on {m.sample!r}", m.unserved) for m in found
    ]


def _summary(
    operators: Sequence[Operator],
    halves: Sequence[Half],
    measured: Sequence[Measured],
    skips: Sequence[Skip],
) -> Table:
    table = Table(
        "parity: the worst error against the float64 reference",
        ("operator", "backend", "dtype", "quantity", "samples", "error", "bound", "worst on", ""),
        text_columns=4,
    )
    for operator in operators:
        for half in halves:
            for dtype in half.dtypes:
                place = (operator.name, half.execution, dtype)
                here = [m for m in measured if (m.operator, m.execution, m.dtype) == place]
                for row in _rows(here):
                    table.add(*place, *row)
    for one in measured:
        if one.failure:
            table.add(one.operator, one.execution, one.dtype, "raised", "1", "", "",
                      one.sample, "FAIL")  # fmt: skip
    for skip in skips:
        table.add(skip.what, "", "", skip.reason, "", "", "", "", "skipped")
    return table


def _rows(measured: Sequence[Measured]) -> Iterator[tuple[str, ...]]:
    """Yield, for each quantity, the cells after operator, backend and dtype."""
    quantities = unique(error["quantity"] for one in measured for error in one.errors)
    order = {"output": 0}
    quantities.sort(key=lambda name: (order.get(name, 1), name.startswith("grad ")))
    for quantity in quantities:
        found = [(e, m) for m in measured for e in m.errors if e["quantity"] == quantity]
        error, where = max(found, key=lambda pair: _rank(pair[0]))
        passed = all(e["passed"] for e, _ in found)
        yield (
            quantity,
            str(len(found)),
            f"{error['ratio']:.1e}",
            f"{error['bound']:.1e}",
            where.sample,
            "pass" if passed else "FAIL",
        )


def _rank(error: dict[str, Any]) -> float:
    share = share_of_bound(error)
    return math.inf if math.isnan(share) else share


def _complaints(measured: Sequence[Measured]) -> list[str]:
    complaints = []
    for one in measured:
        place = f"FAIL {one.operator}, {one.execution}, {one.dtype}"
        if one.failure:
            complaints.append(f"{place}, sample {one.sample!r}: raised {one.failure}")
        complaints += [
            f"{place}, {error['quantity']}, sample {one.sample!r}: "
            f"rms ratio {error['ratio']:.2e}, largest {error['largest']:.2e}, "
            f"bound {error['bound']:.2e}"
            for error in one.errors
            if not error["passed"]
        ]
    return complaints


def _verdict(measured: Sequence[Measured], complaints: Sequence[str]) -> str:
    if complaints:
        return f"{len(complaints)} FAILED"
    if not measured:
        return "nothing was measured"
    errors = sum(len(one.errors) for one in measured)
    return f"all {errors} errors of {len(measured)} runs within their bounds"


def _write(
    folder: Path,
    table: Table,
    measured: Sequence[Measured],
    skips: Sequence[Skip],
    complaints: Sequence[str],
) -> None:
    description = environment()
    write_json(
        folder / "parity.json",
        {
            "environment": description,
            "passed": not complaints,
            "skipped": [asdict(skip) for skip in skips],
            "runs": [asdict(one) for one in measured],
        },
    )
    text = (
        f"# Parity\n\n{EXPLANATION}\n\n{environment_markdown(description)}"
        f"- Result: {_verdict(measured, complaints)}\n\n{table.markdown()}"
    )
    if complaints:
        text += "\n" + "\n".join(f"- {complaint}" for complaint in complaints) + "\n"
    (folder / "parity.md").write_text(text)
