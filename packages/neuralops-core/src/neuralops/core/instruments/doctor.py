"""Tells what is installed, which backend runs where, and what stands against the faster one."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from importlib.metadata import distributions, entry_points

import torch

from neuralops.core.dispatch import Explanation, explain, use_backend
from neuralops.core.instruments.common import (
    distribution_version,
    first_line,
    installed_families,
    operator_failures,
    processor_name,
    triton_version,
)
from neuralops.core.instruments.tables import Table
from neuralops.core.operator import BACKENDS, Operator
from neuralops.core.registry import DISTRIBUTIONS, GROUP, get_operator
from neuralops.core.testing.samples import make_sample

SUMMARY = "what is installed, which backend runs where, and why not a faster one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options: it has none."""


def run(options: argparse.Namespace) -> int:
    """Show everything; 1 where something is broken."""
    conflicts = list(_conflicts())
    tables = [_versions(), _devices(), _families(), _backends(), _environment(), *conflicts]
    for table in tables:
        table.show()
    broken = any("FAIL" in row or "CONFLICT" in row for table in tables for row in table.rows)
    print("doctor: something is broken, see above" if broken else "doctor: nothing is broken")
    return 1 if broken else 0


def _versions() -> Table:
    table = Table("Versions", ("what", "version", ""), text_columns=3)
    table.add("Python", platform.python_version(), platform.platform())
    built = "built without CUDA"
    if torch.version.cuda is not None:
        built = f"built for CUDA {torch.version.cuda}"
    elif torch.version.hip is not None:
        built = f"built for ROCm {torch.version.hip}"
    table.add("torch", torch.__version__, built)
    missing = "the Triton kernels need it: pip install 'neuralops-core[triton]'"
    triton = triton_version()
    table.add("triton", triton or "absent", "" if triton else missing)
    table.add(
        "neuralops-core", distribution_version("neuralops-core") or "not installed by pip", ""
    )
    return table


def _devices() -> Table:
    table = Table("Devices", ("device", "name", "capability", "memory"), text_columns=3)
    table.add("cpu", f"{processor_name()}, {torch.get_num_threads()} threads", "", "")
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        table.add(
            f"cuda:{i}",
            properties.name,
            f"{properties.major}.{properties.minor}",
            f"{properties.total_memory / 2**30:.0f} GiB",
        )
    if not torch.cuda.is_available():
        table.note = "torch sees no GPU."
    return table


def _families() -> Table:
    table = Table("Families", ("package", "version", "operators"), text_columns=3)
    installed = installed_families()
    for name in sorted({*installed, *DISTRIBUTIONS.values()}):
        if name not in installed:
            table.add(name, "absent", f"pip install {name}")
            continue
        own = sorted(p.name for p in installed[name].entry_points if p.group == GROUP)
        table.add(name, installed[name].version, ", ".join(own) or "none yet")
    return table


def _backends() -> Table:
    table = Table(
        "Backends that run by themselves",
        ("operator", "device", "runs on", "against the faster one"),
        text_columns=4,
    )
    kinds = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    for name in sorted(point.name for point in entry_points(group=GROUP)):
        try:
            operator = get_operator(name)
        except operator_failures() as error:
            table.add(name, "every", "FAIL", first_line(error))
            continue
        for kind in kinds:
            table.add(name, kind, *_explained(operator, torch.device(kind)))
    return table


def _explained(operator: Operator, device: torch.device) -> tuple[str, str]:
    fitting = [s for s in operator.samples if s.device in (None, device.type)]
    if not fitting:
        return "unknown", f"{operator.name} declares no sample"
    try:
        args, kwargs = make_sample(fitting[0], device, torch.float32)
        with use_backend(None):
            found = explain(operator.load(), *args, **kwargs)
    except operator_failures() as error:
        return "FAIL", first_line(error)
    return found.backend or "FAIL", _reasons(operator, found) or "it is the fastest"


def _reasons(operator: Operator, found: Explanation) -> str:
    faster = list(operator.backends)
    if found.backend is not None:
        faster = faster[: faster.index(found.backend)]
    lines = [f"{name}: {reason}" for name in faster for reason in found.reasons[name]]
    return "\n".join(lines)


def _environment() -> Table:
    table = Table("Environment", ("variable", "value", "effect"), text_columns=3)
    for name, effect in {
        "NEURALOPS_BACKEND": _backend_effect,
        "NEURALOPS_VALIDATE": _validate_effect,
        "TRITON_INTERPRET": _interpret_effect,
    }.items():
        value = os.environ.get(name)
        table.add(name, value or "unset", effect(value) if value else "")
    return table


def _backend_effect(value: str) -> str:
    if value in BACKENDS:
        return f"every call without backend= runs on {value}, or raises where it cannot"
    return f"every call raises: the backends are {', '.join(BACKENDS)}"


def _validate_effect(value: str) -> str:
    if value == "1":
        return "the values of cu_seqlens are checked on a GPU too, with a copy to the host"
    return "none: only 1 has one"


def _interpret_effect(value: str) -> str:
    if value == "1":
        return "kernels run in Triton's interpreter: slow, for tests"
    return "none: only 1 has one"


def _conflicts() -> Iterator[Table]:
    """Yield a table for what mixes its files with ours.

    While ``neuralops/__init__.py`` is there, importing ``neuralops.core`` raises with the same
    advice; the metadata alone shows an installation that ours has overwritten.
    """
    for distribution in distributions():
        if (distribution.metadata["Name"] or "").lower() == "neuralops":
            table = Table("Conflicts", ("package", "version", "state", "advice"), text_columns=4)
            table.add(
                "neuralops",
                distribution.version,
                "CONFLICT",
                "this other package owns neuralops/core too, and the two mix their files:\n"
                "pip uninstall neuralops neuralops-core\n"
                "pip install neuralops-core",
            )
            yield table
            return
