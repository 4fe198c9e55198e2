"""Finds the operators of the installed families.

A family's distribution declares each operator as an entry point of the group
``neuralops.ops``. They are looked up once; an operator's module is imported when first asked
for, and does not import Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from types import MappingProxyType

from neuralops.core.operator import Operator

GROUP = "neuralops.ops"

DISTRIBUTIONS: Mapping[str, str] = MappingProxyType(
    {
        name: distribution
        for distribution, names in {
            "neuralops-attn": ("gqa", "gqa_attn", "linear_attn", "sparse_attn"),
            "neuralops-lowrank": ("lora_linear", "low_rank"),
            "neuralops-ssm": (
                "fms_scan",
                "gdn_scan",
                "gla_scan",
                "hgrn2_scan",
                "nlms_scan",
                "selective_scan",
                "state_update",
            ),
        }.items()
        for name in names
    }
)
"""Which distribution brings a published operator, for the message that says so."""


@cache
def _entry_points() -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


@cache
def _load(name: str) -> Operator:
    operator = _entry_points()[name].load()
    if not isinstance(operator, Operator):
        raise TypeError(f"the entry point {name!r} of {GROUP} is no Operator but {operator!r}")
    return operator


def operators() -> Mapping[str, Operator]:
    """Return the operators of every installed family by name, in alphabetical order."""
    return {name: _load(name) for name in sorted(_entry_points())}


def get_operator(name: str) -> Operator:
    """Return the operator called ``name``.

    Raises:
        ValueError: no installed family has it. Where a published family does, the message
            says what to install.
    """
    if name in _entry_points():
        return _load(name)
    if name in DISTRIBUTIONS:
        raise ValueError(_absent(name, DISTRIBUTIONS[name]))
    known = ", ".join(sorted({*_entry_points(), *DISTRIBUTIONS}))
    raise ValueError(f"unknown operator {name!r}: the known ones are {known}")


def _absent(name: str, distribution: str) -> str:
    try:
        found = version(distribution)
    except PackageNotFoundError:
        return f"operator {name!r} is not installed: pip install {distribution}"
    return (
        f"operator {name!r} is not in the installed {distribution} {found}; "
        "a later release brings it"
    )


def forget_installed() -> None:
    """Look the installed families up again, after an installation in this process."""
    _entry_points.cache_clear()
    _load.cache_clear()
