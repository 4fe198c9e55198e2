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

    def pip(self, *arguments: str, command: str = "install") -> subprocess.CompletedProcess[str]:
        """Run pip on it; it installs from wheels only."""
        only_wheels = ["--no-index"] if command == "install" else []
        return subprocess.run(
            [sys.executable, "-m", "pip", "--python", str(self.python),
             "--disable-pip-version-check", command, *only_wheels, *arguments],
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
        build_wheel(ROOT / "packages" / f"neuralops-{package}", folder)
    return folder


def build_wheel(source: Path, out: Path) -> None:
    """Build one wheel."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--wheel-dir", str(out), str(source)],
        check=True,
        capture_output=True,
    )  # fmt: skip


@pytest.fixture(scope="session")
def build() -> Callable[[Path, Path], None]:
    """Return the function that builds a package's wheel into a folder."""
    return build_wheel


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
        build_wheel(copy, out)

    return make


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """Return an empty environment that sees the torch of the one that runs the tests."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True
    )
    made = Environment(tmp_path / "venv")
    own = Path(sysconfig.get_path("purelib"))
    if (own / "shared.pth").exists():
        shared = (own / "shared.pth").read_text()
    else:
        assert not (own / "neuralops").exists(), "this environment would lend its neuralops too"
        shared = f"{own}\n"
    (made.site / "shared.pth").write_text(shared)
    return made
