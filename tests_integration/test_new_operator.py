"""An operator added by docs/adding_an_operator.md alone has every instrument; core is unchanged."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = re.compile(r'^```\w+ title="(?P<path>[^"]+)"\n(?P<text>.*?)^```$', re.DOTALL | re.MULTILINE)


@pytest.fixture
def source(tmp_path):
    """The package that the guide writes."""
    folder = tmp_path / "neuralops-example"
    for file in FILE.finditer((ROOT / "docs" / "adding_an_operator.md").read_text()):
        path = folder / file["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file["text"])
    (folder / "src/neuralops/example/py.typed").touch()
    return folder


@pytest.fixture
def installed(environment, wheels, build, source, tmp_path):
    """An environment with core and the wheel of the guide's package."""
    build(source, tmp_path)
    links = ("--find-links", str(wheels), "--find-links", str(tmp_path))
    environment.install(*links, "neuralops-example")
    return environment


def test_a_new_operator_has_every_instrument(installed, source, tmp_path):
    out = tmp_path / "out"

    def neuralops(*arguments, **environment):
        done = installed.run("-m", "neuralops.core", *arguments, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    doctor = neuralops("doctor", COLUMNS="200")
    assert "neuralops-example" in doctor and "swiglu" in doctor

    neuralops("parity", "--package", "example", "--device", "cpu", "--out", str(out))
    parity = json.loads((out / "parity.json").read_text())
    assert parity["passed"]
    assert {run["operator"] for run in parity["runs"]} == {"swiglu"}
    assert {run["execution"] for run in parity["runs"]} >= {"cpu torch"}

    neuralops("bench", "swiglu", "--quick", "--device", "cpu", "--out", str(out))
    assert "L1024 D512" in (out / "swiglu-cpu.md").read_text()

    example = "import doctest, neuralops.example.gating.api as api; print(doctest.testmod(api))"
    assert installed.check(example) == "TestResults(failed=0, attempted=3)"


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")
def test_a_new_operator_passes_the_compile_gate(installed):
    done = installed.run(
        "-m", "neuralops.core", "compile_gate", "--package", "example", TRITON_INTERPRET="0"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compile_gate: 12 compilations, passed" in done.stdout


@pytest.mark.parametrize("interpreted", [False, True])
def test_the_guides_own_tests_pass(installed, source, interpreted):
    chosen = ("-m", "triton") if interpreted else ()
    done = installed.run(
        "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(source),
        "-p", "no:cacheprovider", "-q", str(source / "tests"), *chosen,
        TRITON_INTERPRET=str(int(interpreted)), TRITON_DEFAULT_FP_FUSION="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_operator_has_a_page(source, tmp_path):
    """Run by the session ``docs``, which has MkDocs."""
    pytest.importorskip("mkdocs")
    site = tmp_path / "checkout"
    shutil.copytree(ROOT / "docs", site / "docs")
    shutil.copy(source / "docs/operators/swiglu.md", site / "docs/operators")
    config = (ROOT / ".mkdocs.yml").read_text()
    config = config.replace("- packages/", f"- {ROOT}/packages/")
    for old, new in (("paths:\n", f"            - {source}/src\n"),
                     ("- Operators:\n", "      - swiglu: operators/swiglu.md\n")):  # fmt: skip
        assert old in config
        config = config.replace(old, old + new)
    (site / ".mkdocs.yml").write_text(config)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ".mkdocs.yml"],
        cwd=site,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (site / "dist/docs/operators/swiglu.html").read_text()
    assert "GLU Variants Improve Transformer" in page and "<math" in page
