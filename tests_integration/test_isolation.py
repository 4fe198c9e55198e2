"""One family alone, without its siblings and without Triton."""

import os
import subprocess
import zipfile

import pytest

FAMILIES = ("attn", "lowrank", "ssm")

OPERATORS = "fms_scan gdn_scan gla_scan hgrn2_scan nlms_scan"


def test_core_and_ssm_alone(environment, wheels):
    environment.install("--find-links", str(wheels), "neuralops-ssm")
    installed = environment.check(
        "from importlib.metadata import distributions\n"
        "print(*sorted(d.name for d in distributions() if d.name.startswith('neuralops')))"
    )
    assert installed == "neuralops-core neuralops-ssm"
    done = environment.run("-c", "import neuralops.attn")
    assert "No module named 'neuralops.attn'" in done.stderr
    done = environment.run(
        "-c", "import neuralops.core; neuralops.core.get_operator('linear_attn')"
    )
    assert "operator 'linear_attn' is not installed: pip install neuralops-attn" in done.stderr
    printed = environment.check(
        "import torch, neuralops.core\n"
        "from neuralops.ssm import hgrn2_scan\n"
        "f = torch.rand(1, 9, 2, requires_grad=True)\n"
        "hgrn2_scan(f, f).sum().backward()\n"
        "print(*neuralops.core.operators(), neuralops.core.explain('hgrn2_scan', f, f).backend)"
    )
    assert printed == f"{OPERATORS} torch"


def test_importing_is_light(environment, wheels):
    environment.install("--find-links", str(wheels), "neuralops-ssm")
    code = (
        "import sys, time, torch\n"
        "before = set(sys.modules)\n"
        "start = time.perf_counter()\n"
        "import neuralops.ssm\n"
        "spent = time.perf_counter() - start\n"
        "heavy = {'triton', 'rich', 'matplotlib', 'numpy', 'torch._dynamo', 'torch._inductor'}\n"
        "assert not heavy & (set(sys.modules) - before), heavy & set(sys.modules)\n"
        "print(spent * 1e3)"
    )
    milliseconds = min(float(environment.check(code)) for _ in range(5))
    assert milliseconds < 60


def test_without_triton(environment, wheels):
    environment.install("--find-links", str(wheels), "neuralops-ssm")
    printed = environment.check(
        "import sys; sys.modules['triton'] = None\n"
        "import importlib.util as util; real = util.find_spec\n"
        "util.find_spec = lambda name, *a: None if name == 'triton' else real(name, *a)\n"
        "import torch, neuralops.core\n"
        "from neuralops.ssm import hgrn2_scan\n"
        "f = torch.rand(1, 9, 2, requires_grad=True)\n"
        "hgrn2_scan(f, f).sum().backward()\n"
        "print(neuralops.core.explain(hgrn2_scan, f, f))"
    )
    assert "runs on torch" in printed
    assert "Triton is not installed: pip install" in printed


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_installs_alone(environment, wheels, family):
    environment.install("--find-links", str(wheels), f"neuralops-{family}")
    others = [other for other in FAMILIES if other != family]
    code = f"import importlib, neuralops.{family}\nfor other in {others!r}:\n"
    code += "    try: importlib.import_module('neuralops.' + other)\n"
    code += "    except ModuleNotFoundError: print(other)"
    assert environment.check(code).split() == others


def test_families_in_different_folders(environment, wheels, tmp_path):
    environment.install("--find-links", str(wheels), "neuralops-core")
    elsewhere = tmp_path / "elsewhere"
    environment.install(
        "--find-links", str(wheels), "--no-deps", "--target", str(elsewhere), "neuralops-ssm"
    )
    code = "import neuralops.core; print(*neuralops.core.operators())"
    assert environment.check(code) == ""
    assert environment.check(code, PYTHONPATH=str(elsewhere)) == OPERATORS


def test_the_reference_package_in_the_same_environment(environment, wheels, tmp_path):
    info = "neuralops-1.2.0.dist-info"
    files = {
        "neuralops/__init__.py": "",
        "neuralops/core/__init__.py": "",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: neuralops\nVersion: 1.2.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    other = tmp_path / "neuralops-1.2.0-py3-none-any.whl"
    with zipfile.ZipFile(other, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    environment.install(str(other))
    environment.install("--find-links", str(wheels), "neuralops-ssm")
    done = environment.run("-c", "import neuralops.ssm")
    assert done.returncode == 1
    for line in (
        "ImportError: the distribution 'neuralops'",
        "pip uninstall neuralops neuralops-core",
        "pip install neuralops-core",
    ):
        assert line in done.stderr

    environment.pip("--yes", "neuralops", "neuralops-core", command="uninstall")
    environment.install("--find-links", str(wheels), "neuralops-core")
    assert environment.check("import neuralops.ssm; print('well')") == "well"


def test_the_console_script(environment, wheels):
    environment.install("--find-links", str(wheels), "neuralops-ssm")
    done = subprocess.run(
        [environment.python.parent / "neuralops", "doctor"],
        cwd=environment.folder,
        env={**os.environ, "PYTHONPATH": "", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hgrn2_scan" in done.stdout
