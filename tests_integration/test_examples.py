"""The examples of the documentation, the READMEs and the docstrings do what they say."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import neuralops

ROOT = Path(__file__).parents[1]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("README.md", "packages/*/README.md", "docs/**/*.md")
    for path in ROOT.glob(pattern)
    if "```pycon" in path.read_text()
)
MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(neuralops.__path__, "neuralops.")
    if not found.name.endswith(("kernels", "core.device", "peers", "__main__"))
)


def examples(text):
    """Return ``text`` with empty lines for whatever is not in a block of ``pycon``."""
    inside = False
    lines = []
    for line in text.splitlines():
        inside = inside and not line.startswith("```")
        lines.append(line if inside else "")
        inside = inside or line == "```pycon"
    return "\n".join(lines)


@pytest.mark.parametrize("page", PAGES)
def test_page(page):
    text = examples((ROOT / page).read_text(encoding="utf-8"))
    test = doctest.DocTestParser().get_doctest(text, {}, page, page, 0)
    assert test.examples
    assert doctest.DocTestRunner(optionflags=OPTIONS).run(test).failed == 0


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module):
    assert doctest.testmod(importlib.import_module(module), optionflags=OPTIONS).failed == 0


def test_every_public_function_has_an_example():
    without = [
        f"{family.name}.{name}"
        for family in pkgutil.iter_modules(neuralops.__path__, "neuralops.")
        if family.name != "neuralops.core"
        for module in [importlib.import_module(family.name)]
        for name in module.__all__
        if ">>> " not in (getattr(module, name).__doc__ or "")
    ]
    assert without == []
