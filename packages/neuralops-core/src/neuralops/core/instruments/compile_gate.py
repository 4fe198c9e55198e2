"""Compiles every kernel ahead of time, with no GPU, and judges what it takes."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from neuralops.core.instruments.common import (
    UsageError,
    environment,
    environment_markdown,
    first_line,
    operator_failures,
    require_tools,
    select_operators,
    write_json,
)
from neuralops.core.instruments.tables import Table, progress_bar
from neuralops.core.operator import Operator
from neuralops.core.suitability import INTERPRETING, TRITON_RELEASE

if TYPE_CHECKING:
    from neuralops.core.instruments.recording import Configuration, Recording
    from neuralops.core.instruments.resources import Resources

SUMMARY = "compiles every kernel ahead of time and fails on spills or too much shared memory"
FEW = 12
SPILLS = "spills"
"""Compilations an operator unless all are asked for."""


@dataclass(frozen=True)
class Target:
    """A GPU to compile for, and the shared memory that one of its programs may have."""

    backend: str
    architecture: int | str
    warp_size: int
    shared_bytes: int


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 * 1024),
    "sm_90": Target("cuda", 90, 32, 227 * 1024),
    "sm_100": Target("cuda", 100, 32, 227 * 1024),
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024),
}


@dataclass
class Compilation:
    """One configuration for one target, and what came of it."""

    operator: str
    target: str
    configuration: Configuration
    resources: Resources | None = None
    faults: list[str] = field(default_factory=list)
    provisional: bool = False

    @property
    def is_excused(self) -> bool:
        """Whether all its faults are spills of a kernel that runs only when it is asked for."""
        return self.provisional and all(fault.startswith(SPILLS) for fault in self.faults)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    # fmt: off
    parser.add_argument("--package", action="append", default=[], metavar="FAMILY",
                        help="only this family (ssm, attn, ...); may be repeated")
    parser.add_argument("--operator", action="append", default=[], help="only this operator")
    parser.add_argument("--target", action="append", choices=tuple(TARGETS), default=[],
                        help="only this target; default: all")
    parser.add_argument("--all", action="store_true",
                        help=f"every configuration; default: {FEW} compilations an operator, "
                             "among them every kernel")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), metavar="N",
                        help="how many compile at a time (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FOLDER",
                        help="also write compile_gate.json and compile_gate.md")
    # fmt: on


def run(options: argparse.Namespace) -> int:
    """Record, compile, show and judge."""
    require_tools()
    if TRITON_RELEASE is None:
        raise UsageError("Triton is not installed: pip install 'neuralops-core[triton]'")
    if INTERPRETING:
        raise UsageError("TRITON_INTERPRET=1 is set, so that nothing would be compiled: unset it")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    operators = select_operators(options.operator, options.package)
    targets = options.target or list(TARGETS)
    compilations: list[Compilation] = []
    complaints: list[str] = []
    provisional: list[str] = []
    notes: list[str] = []
    for operator in operators:
        if "triton" not in operator.backends:
            notes.append(f"{operator.name} has no Triton kernels.")
            continue
        recordings = _record(operator, targets)
        for target, recording in recordings.items():
            complaints += [f"{operator.name}, {target}: {e}" for e in recording.failures]
        chosen, distinct = _choose(operator, recordings, options.all)
        _compile_all(chosen, options.jobs)
        compilations += chosen
        for c in chosen:
            lines = [_complaint(c, fault) for fault in c.faults]
            (provisional if c.is_excused else complaints).extend(lines)
        notes.append(_coverage(operator, recordings, len(chosen), distinct))
    table = _summary(compilations, " ".join(notes))
    table.show()
    for complaint in provisional:
        print(f"provisional: {complaint}")
    for complaint in complaints:
        print(f"FAIL {complaint}")
    if options.out:
        _write(options.out, table, compilations, complaints)
    verdict = f"{len(complaints)} FAILED" if complaints else "passed"
    if provisional:
        verdict += f", {len(provisional)} spills of provisional kernels"
    print(f"compile_gate: {len(compilations)} compilations, {verdict}")
    return 1 if complaints else 0


def _record(operator: Operator, targets: Sequence[str]) -> dict[str, Recording]:
    from neuralops.core.instruments.recording import record

    recordings = {}
    with progress_bar() as progress:
        task = progress.add_task(f"{operator.name}: recording", total=len(targets))
        for name in targets:
            recordings[name] = record(operator, _gpu_target(name))
            progress.advance(task)
    return recordings


def _choose(
    operator: Operator, recordings: Mapping[str, Recording], everything: bool
) -> tuple[list[Compilation], int]:
    """Return the compilations to make and how many there are.

    A few are spread over kernels, then targets, then configurations.
    """
    provisional = operator.implementation("triton").provisional is not None
    waiting = [
        Compilation(operator.name, target, configuration, provisional=provisional)
        for target, recording in recordings.items()
        for configuration in recording.configurations
    ]
    distinct = len(waiting)
    if everything:
        return waiting, distinct
    kernels: Counter[str] = Counter()
    pairs: Counter[tuple[str, str]] = Counter()
    targets: Counter[str] = Counter()
    origins: Counter[str] = Counter()

    def seen(c: Compilation) -> tuple[int, int, int, int]:
        kernel, origin = c.configuration.kernel, c.configuration.origin
        return kernels[kernel], pairs[kernel, c.target], targets[c.target], origins[origin]

    chosen: list[Compilation] = []
    while waiting and len(chosen) < FEW:
        best = min(waiting, key=seen)
        waiting.remove(best)
        chosen.append(best)
        kernels[best.configuration.kernel] += 1
        pairs[best.configuration.kernel, best.target] += 1
        targets[best.target] += 1
        origins[best.configuration.origin] += 1
    return chosen, distinct


def _compile_all(chosen: Sequence[Compilation], jobs: int) -> None:
    """Compile in forked processes, which inherit what cannot be pickled."""
    _inherited[:] = chosen
    with (
        progress_bar() as progress,
        ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool,
    ):
        task = progress.add_task("compiling", total=len(chosen))
        futures = [pool.submit(_compile, i) for i in range(len(chosen))]
        for compilation, future in zip(chosen, futures):
            kernel, target = compilation.configuration.kernel, compilation.target
            progress.update(task, description=f"{kernel} for {target}")
            try:
                compilation.resources, compilation.faults = future.result()
            except BrokenProcessPool:
                compilation.faults = ["the compiler crashed, here or in one before"]
            progress.advance(task)


_inherited: list[Compilation] = []


def _compile(index: int) -> tuple[Resources | None, list[str]]:
    from neuralops.core.instruments.resources import read_resources

    compilation = _inherited[index]
    limits = TARGETS[compilation.target]
    try:
        kernel = compilation.configuration.compile(_gpu_target(compilation.target))
    except operator_failures() as error:
        return None, [f"does not compile: {first_line(error)}"]
    found = read_resources(kernel, limits.architecture)
    faults = []
    if found.spilled:
        unit = "bytes" if limits.backend == "cuda" else "registers"
        faults.append(f"{SPILLS} {found.spilled} {unit}")
    if found.shared_bytes > limits.shared_bytes:
        faults.append(
            f"takes {_kibibytes(found.shared_bytes)} of shared memory, "
            f"{compilation.target} has {_kibibytes(limits.shared_bytes)}"
        )
    return found, faults


def _gpu_target(name: str) -> object:
    from triton.backends.compiler import GPUTarget

    target = TARGETS[name]
    return GPUTarget(target.backend, target.architecture, target.warp_size)


def _coverage(
    operator: Operator, recordings: Mapping[str, Recording], made: int, distinct: int
) -> str:
    kernels = {c.kernel for recording in recordings.values() for c in recording.configurations}
    text = f"{operator.name}: {len(kernels)} kernels, {made} of {distinct} configurations compiled."
    unserved = {reason for recording in recordings.values() for reason in recording.unserved}
    if unserved:
        text += f" Not served by Triton: {'; '.join(sorted(unserved))}."
    return text


def _summary(compilations: Sequence[Compilation], note: str) -> Table:
    table = Table(
        "compile gate",
        ("operator", "kernel", "target", "first asked for by",
         "warps", "registers", "spilled", "shared", "limit", ""),
        text_columns=4,
        note=note,
    )  # fmt: skip
    order = {name: i for i, name in enumerate(TARGETS)}
    for c in sorted(
        compilations, key=lambda c: (c.operator, c.configuration.kernel, order[c.target])
    ):
        found = c.resources
        cells = ("", "", "", "") if found is None else (
            str(found.warps), str(found.registers), str(found.spilled),
            _kibibytes(found.shared_bytes),
        )  # fmt: skip
        table.add(
            c.operator, c.configuration.kernel, c.target, c.configuration.origin, *cells,
            _kibibytes(TARGETS[c.target].shared_bytes), _verdict(c),
        )  # fmt: skip
    return table


def _verdict(compilation: Compilation) -> str:
    if not compilation.faults:
        return "pass"
    return "provisional" if compilation.is_excused else "FAIL"


def _kibibytes(size: int) -> str:
    return f"{size / 1024:.4g} KiB"


def _complaint(compilation: Compilation, fault: str) -> str:
    configuration = compilation.configuration
    return (
        f"{compilation.operator}, {configuration.kernel}, {compilation.target}, "
        f"for {configuration.origin}: {fault}"
    )


def _write(
    folder: Path, table: Table, compilations: Sequence[Compilation], complaints: Sequence[str]
) -> None:
    described = environment()
    rows = [
        {
            "operator": c.operator,
            "kernel": c.configuration.kernel,
            "target": c.target,
            "origin": c.configuration.origin,
            "signature": {name: str(kind) for name, kind in c.configuration.signature.items()},
            "constants": {str(k): str(v) for k, v in c.configuration.constants.items()},
            "resources": None if c.resources is None else vars(c.resources),
            "faults": c.faults,
        }
        for c in compilations
    ]
    write_json(
        folder / "compile_gate.json",
        {"environment": described, "passed": not complaints, "compilations": rows},
    )
    (folder / "compile_gate.md").write_text(
        f"# Compile gate\n\n{environment_markdown(described)}\n{table.markdown()}"
    )
