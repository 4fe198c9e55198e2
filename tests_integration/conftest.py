"""Throw-away environments with chosen wheels in them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("core", "attn", "lowrank", "ssm")


@dataclass
class Environment:
    """A virtual environment that sees the shared torch and the wheels installed into it."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"

    @property
    def site(self) -> Path:
        """Its site-packages."""
        return next(self.folder.glob("lib*/**/site-packages"))

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run its interpreter, away from the checkout."""
        return subprocess.run(
            [str(self.python), *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": "", **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def check(self, code: str, **environment: str) -> str:
        """Run ``code``, which must succeed, and return what it prints."""
        done = self.run("-c", code, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def pip(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Install into it, from wheels only."""
        return subprocess.run(
            [sys.executable, "-m", "pip", "--python", str(self.python),
             "install", "--no-index", "--disable-pip-version-check", *arguments],
            env={**os.environ, "PYTHONPATH": ""},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )  # fmt: skip

    def install(self, *arguments: str) -> None:
        """Install into it, successfully."""
        done = self.pip(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the four wheels: NEURALOPS_WHEELS, or built here."""
    given = os.environ.get("NEURALOPS_WHEELS")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("wheels")
    for package in PACKAGES:
        build(ROOT / "packages" / f"neuralops-{package}", folder)
    return folder


def build(source: Path, out: Path) -> None:
    """Build one wheel."""
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), source],
        check=True,
        capture_output=True,
    )


@pytest.fixture(scope="session")
def build_version(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, Path], None]:
    """Return a function that builds another version of a package into a folder."""

    def make(package: str, version: str, out: Path) -> None:
        copy = tmp_path_factory.mktemp("source") / package
        shutil.copytree(
            ROOT / "packages" / f"neuralops-{package}",
            copy,
            ignore=shutil.ignore_patterns("__pycache__", "tests"),
        )
        for path in (copy / "pyproject.toml", copy / "src/neuralops" / package / "__init__.py"):
            text = path.read_text()
            changed = re.sub(
                r'^((?:__)?version(?:__)? = )".*"$', rf'\1"{version}"', text, flags=re.M
            )
            assert changed != text
            path.write_text(changed)
        build(copy, out)

    return make


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """Return an empty environment that sees the torch of the one that runs the tests."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True
    )
    made = Environment(tmp_path / "venv")
    import torch

    (made.site / "shared.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    shared = Path(sysconfig.get_path("purelib"))
    assert not (shared / "torch").exists() or not (shared / "neuralops").exists(), (
        "the tests' own environment would lend its neuralops together with its torch"
    )
    return made
