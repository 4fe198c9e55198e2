"""What the instruments share: choosing operators, describing the machine, writing files."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

import torch

from neuralops.core.operator import Operator
from neuralops.core.registry import DISTRIBUTIONS, GROUP, get_operator, operators

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class UsageError(ValueError):
    """What the user asked for does not exist here; the command ends with exit code 2."""


def require_tools() -> None:
    """Raise where the extra ``tools`` is missing."""
    missing = [name for name in ("rich", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"this command needs {' and '.join(missing)}: pip install 'neuralops-core[tools]'"
        )


def operator_failures() -> tuple[type[Exception], ...]:
    """The errors by which a call of an operator or a peer fails, and the others go on."""
    failures: tuple[type[Exception], ...] = (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        NameError,
        NotImplementedError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    )
    if "triton" in sys.modules:
        from triton.errors import TritonError

        failures += (TritonError,)
    return failures


def first_line(error: BaseException) -> str:
    """Return the error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def installed_families() -> dict[str, Distribution]:
    """Return the installed distributions that declare operators or carry a family's name."""
    families: dict[str, Distribution] = {}
    for distribution in distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        declares = any(point.group == GROUP for point in distribution.entry_points)
        if declares or name in DISTRIBUTIONS.values():
            families.setdefault(name, distribution)
    return dict(sorted(families.items()))


def select_operators(names: Sequence[str], families: Sequence[str]) -> list[Operator]:
    """Return the installed operators that were asked for; all of them by default.

    Raises:
        UsageError: one is unknown or not installed.
    """
    try:
        chosen = [get_operator(name) for name in names] or list(operators().values())
    except ValueError as error:
        raise UsageError(str(error)) from error
    installed = {name.removeprefix("neuralops-") for name in installed_families()}
    installed |= {operator.family for operator in operators().values()}
    for family in families:
        if family not in installed:
            known = sorted(name.removeprefix("neuralops-") for name in set(DISTRIBUTIONS.values()))
            hint = (
                f"pip install neuralops-{family}"
                if family in known
                else f"the installed ones are {', '.join(sorted(installed)) or 'none'}"
            )
            raise UsageError(f"package {family!r} is not installed: {hint}")
    return [operator for operator in chosen if not families or operator.family in families]


def processor_name() -> str:
    """Return the name of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def distribution_version(name: str) -> str | None:
    """Return the installed version of a distribution, or ``None``."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def triton_version() -> str | None:
    """Return the version of an importable Triton, or ``None``. Triton is not imported."""
    if importlib.util.find_spec("triton") is None:
        return None
    return distribution_version("triton")


def gpu_name() -> str | None:
    """Return the name of the first GPU, or ``None``."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def environment() -> dict[str, Any]:
    """Return hardware, versions, date and command, to stand beside every recorded result."""
    packages = {name: found.version for name, found in installed_families().items()}
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": command_line(),
        "gpu": gpu_name(),
        "cpu": f"{processor_name()}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "neuralops-core": distribution_version("neuralops-core"),
        **packages,
    }


def command_line() -> str:
    """Return the command as a user would type it."""
    program = Path(sys.argv[0])
    name = "python -m neuralops.core" if program.name == "__main__.py" else program.name
    return f"{name} {shlex.join(sys.argv[1:])}".strip()


def environment_markdown(description: Mapping[str, Any]) -> str:
    """Return :func:`environment` as a Markdown list."""
    hardware = description["gpu"] or description["cpu"]
    if description["gpu"]:
        hardware = f"{description['gpu']}; {description['cpu']}"
    versions = ", ".join(
        f"{name} {value or 'not installed'}"
        for name, value in description.items()
        if name not in ("date", "command", "gpu", "cpu")
    )
    return (
        f"- Hardware: {hardware}\n- Versions: {versions}\n- Date: {description['date']}\n"
        f"- Command: `{description['command']}`\n"
    )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content``, with infinities and NaN as strings so that it is valid JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def child_environment(**changes: str) -> dict[str, str]:
    """Return the environment of a child process that sees the same packages as this one."""
    paths = [path for path in sys.path if path and Path(path).exists()]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **changes}


def unique(values: Iterable[str]) -> list[str]:
    """Return the values without repetitions, in order."""
    return list(dict.fromkeys(values))
