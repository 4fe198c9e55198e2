"""What only the built wheels show."""

import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
PACKAGES = ("core", "attn", "lowrank", "ssm")


def open_wheel(wheels, package):
    (path,) = wheels.glob(f"neuralops_{package}-*.whl")
    return zipfile.ZipFile(path)


def metadata(wheel):
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


@pytest.mark.parametrize("package", PACKAGES)
def test_contents(wheels, package):
    with open_wheel(wheels, package) as wheel:
        names = wheel.namelist()
        assert "neuralops/__init__.py" not in names, "neuralops is a namespace"
        assert f"neuralops/{package}/__init__.py" in names
        assert f"neuralops/{package}/py.typed" in names
        assert any(name.endswith("licenses/LICENSE") for name in names)
        stray = [n for n in names if not n.startswith((f"neuralops/{package}/", "neuralops_"))]
        assert stray == []
        assert not any("tests" in name.split("/") for name in names)


@pytest.mark.parametrize("package", PACKAGES)
def test_metadata(wheels, package):
    project = tomllib.loads(
        (ROOT / "packages" / f"neuralops-{package}" / "pyproject.toml").read_text()
    )["project"]
    with open_wheel(wheels, package) as wheel:
        found = metadata(wheel)
        source = wheel.read(f"neuralops/{package}/__init__.py").decode()
    assert found["Version"] == project["version"]
    assert f'__version__ = "{project["version"]}"' in source
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.10"
    needed = {r.replace(" ", "") for r in found.get_all("Requires-Dist") if "extra" not in r}
    expected = {"torch>=2.11"} | (set() if package == "core" else {"neuralops-core<0.2,>=0.1"})
    assert needed == expected


def test_dependencies_point_one_way():
    for package in PACKAGES:
        others = [p for p in PACKAGES if p not in (package, "core")]
        pattern = re.compile(rf"^\s*(?:from|import) neuralops\.({'|'.join(others)})\b", re.M)
        for path in (ROOT / "packages" / f"neuralops-{package}" / "src").rglob("*.py"):
            assert not pattern.search(path.read_text()), path


@pytest.mark.skipif(shutil.which("git") is None, reason="git lists the files")
def test_the_top_level_holds_nothing_else():
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("no git checkout")
    top = {name.split("/")[0] for name in listed.stdout.splitlines() if not name.startswith(".")}
    assert top == {"LICENSE", "README.md", "docs", "noxfile.py", "packages", "pyproject.toml",
                   "tests_integration"}  # fmt: skip
