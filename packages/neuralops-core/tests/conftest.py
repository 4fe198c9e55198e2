"""An operator made as an installed distribution in a temporary directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from neuralops.core.__main__ import main
from neuralops.core.registry import forget_installed


@dataclass
class Result:
    """What a command left behind."""

    code: int
    output: str
    out: Path


@dataclass
class Toy:
    """A folder to put on the path, in which the distribution ``neuralops-toy`` is installed."""

    site: Path

    def edit(self, module: str, old: str, new: str) -> None:
        """Replace a piece of the operator's source."""
        path = self.site / "neuralops_toy" / f"{module}.py"
        source = path.read_text()
        assert old in source
        path.write_text(source.replace(old, new))

    def run(self, *arguments: str, environment: Mapping[str, str] | None = None) -> Result:
        """Run ``python -m neuralops.core`` with the toy installed."""
        changes = {"PYTHONPATH": str(self.site), "TRITON_CACHE_DIR": str(self.site / "cache"),
                   "TRITON_INTERPRET": "0", "NO_COLOR": "1", "COLUMNS": "200"}  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "neuralops.core", *arguments],
            env={**os.environ, **changes, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.site,
            timeout=120,
            check=False,
        )
        return Result(done.returncode, done.stdout, self.site / "out")


def install(site: Path) -> Toy:
    """Lay the distribution out as pip would."""
    source = Path(__file__).parent / "toy" / "neuralops_toy"
    shutil.copytree(source, site / "neuralops_toy", ignore=shutil.ignore_patterns("__pycache__"))
    metadata = site / "neuralops_toy-0.3.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: neuralops-toy\nVersion: 0.3.0\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[neuralops.ops]\ntoy_gate = neuralops_toy.op:OPERATOR\n"
    )
    return Toy(site)


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    """Return an installed toy operator."""
    return install(tmp_path)


@pytest.fixture
def refused(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Return a function that runs a wrong request here and returns what was said about it."""
    monkeypatch.syspath_prepend(str(toy.site))
    forget_installed()

    def call(*arguments: str) -> str:
        try:
            code: object = main(arguments)
        except SystemExit as left:
            code = left.code
        assert code == 2
        return capsys.readouterr().err

    yield call
    forget_installed()


@pytest.fixture(scope="session")
def blocked_modules(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes a folder which, on the path, hides modules."""

    def make(*names: str) -> Path:
        folder = tmp_path_factory.mktemp("blocked")
        (folder / "sitecustomize.py").write_text(
            "import importlib.abc, importlib.machinery, sys\n"
            f"HIDDEN = {names!r}\n"
            "real = importlib.machinery.PathFinder.find_spec\n"
            "def find_spec(name, path=None, target=None):\n"
            "    return None if name.partition('.')[0] in HIDDEN else real(name, path, target)\n"
            "importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)\n"
        )
        return folder

    return make
