"""Every task of the repository: ``python -m nox -l`` lists them.

The sessions test wheels. They share one installation of torch, Triton and the test tools, through
a ``.pth`` file in each session's own environment; the sources are never on the path. An
interpreter that already has torch, as on a machine with a GPU, shares its own.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
PACKAGES = ("core", "attn", "lowrank", "ssm")
FAMILIES = PACKAGES[1:]

TORCH = "torch==2.13.0"
OLDEST_TORCH = "torch==2.11.0"
TRITON = "triton==3.6.0"
TEST_TOOLS = (
    "hypothesis==6.170.17",
    "matplotlib==3.11.2",
    "numpy==2.3.5",  # the interpreter of Triton 3.6 fails with NumPy 2.4
    "packaging==26.2",
    "pytest==9.2.0",
    "pytest-benchmark==5.3.1",
    "rich==15.0.0",
)
BUILD_TOOLS = ("build==1.6.0", "hatchling==1.33.0")
LINT_TOOLS = ("mypy==2.4.1", "ruff==0.17.6")

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True


# --- Shared steps ---------------------------------------------------------------------------


def has_gpu(session: nox.Session) -> bool:
    """Whether the session's torch sees a CUDA device."""
    code = "import torch; print(torch.cuda.is_available())"
    return session.run("python", "-c", code, silent=True).strip() == "True"


def shared_site(session: nox.Session, torch: str) -> Path:
    """Return the site-packages that hold torch, Triton and the test tools, installing them once."""
    found = importlib.util.find_spec("torch")
    if found is not None and found.origin is not None:
        return Path(found.origin).parents[1]
    home = Path(session.cache_dir) / f"{torch}-python{sys.version_info[0]}.{sys.version_info[1]}"
    python = home / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    done = home / "installed"
    wanted = "\n".join((torch, TRITON, *TEST_TOOLS))
    if not done.exists() or done.read_text() != wanted:
        shutil.rmtree(home, ignore_errors=True)
        session.run(sys.executable, "-m", "venv", str(home), external=True)
        triton = [TRITON] if sys.platform == "linux" else []
        run = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        session.run(*run, torch, external=True)
        session.run(*run, torch, *triton, *TEST_TOOLS, external=True)
        done.write_text(wanted)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(session.run(str(python), "-c", code, external=True, silent=True).strip())


def share(session: nox.Session, torch: str = TORCH) -> None:
    """Let the session's environment see the shared site-packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(session.run("python", "-c", code, silent=True).strip())
    (own / "shared.pth").write_text(f"{shared_site(session, torch)}\n")


def build_wheels(session: nox.Session, *packages: str, out: Path = DIST) -> None:
    """Build the wheels of ``packages`` into ``out``."""
    session.install("--quiet", *BUILD_TOOLS)
    out.mkdir(exist_ok=True)
    for package in packages:
        for old in out.glob(f"neuralops_{package}-*"):
            old.unlink()
        session.run(
            "python", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out),
            str(ROOT / "packages" / f"neuralops-{package}"),
            silent=True,
        )  # fmt: skip


def install_wheels(session: nox.Session, *requirements: str) -> None:
    """Install our own wheels anew; what else they need is in the shared site-packages."""
    session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes",
                *(f"neuralops-{package}" for package in PACKAGES), silent=True)  # fmt: skip
    session.install("--quiet", "--no-index", "--find-links", str(DIST), *requirements)


def run_pytest(
    session: nox.Session, *arguments: str, none_is_fine: bool = False, **environment: str
) -> None:
    """Run pytest on installed packages, with the repository's settings."""
    session.run(
        "python", "-P" if sys.version_info >= (3, 11) else "-I", "-m", "pytest",
        "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-q", *arguments,
        env={**environment, "PYTHONPATH": "", "TRITON_DEFAULT_FP_FUSION": "1"},
        success_codes=[0, 5] if none_is_fine else [0],
    )  # fmt: skip


# --- Sessions -------------------------------------------------------------------------------


@nox.session
def build(session: nox.Session) -> None:
    """Build the four wheels into dist/."""
    build_wheels(session, *PACKAGES)
    session.log("built %s", ", ".join(sorted(path.name for path in DIST.glob("*.whl"))))


def check_package(session: nox.Session, package: str, *, gpu: bool) -> None:
    """Run the tests of an installed package, and its Triton kernels too where there is no GPU."""
    folder = str(ROOT / "packages" / f"neuralops-{package}" / "tests")
    run_pytest(session, folder)
    if not gpu:
        session.log("the Triton kernels of neuralops-%s, in the interpreter", package)
        run_pytest(session, folder, "-m", "triton", none_is_fine=True, TRITON_INTERPRET="1")


@nox.session
def tests(session: nox.Session) -> None:
    """Test each package's wheel, with only what it needs, and then what shows across packages.

    ``-- ssm`` tests one package; ``-- integration`` what shows across packages.
    """
    chosen = session.posargs or [*PACKAGES, "integration"]
    unknown = set(chosen) - {*PACKAGES, "integration"}
    if unknown:
        session.error(f"unknown: {', '.join(sorted(unknown))}; "
                      f"choose from {', '.join((*PACKAGES, 'integration'))}")  # fmt: skip
    share(session)
    build_wheels(session, *PACKAGES)
    gpu = has_gpu(session)
    for package in PACKAGES:
        if package not in chosen:
            continue
        install_wheels(session, f"neuralops-{package}")
        check_package(session, package, gpu=gpu)
    if "integration" in chosen:
        install_wheels(session, *(f"neuralops-{package}" for package in PACKAGES))
        run_pytest(session, str(ROOT / "tests_integration"), NEURALOPS_WHEELS=str(DIST))


@nox.session
def oldest(session: nox.Session) -> None:
    """Test every package with the oldest torch and Triton it declares."""
    share(session, OLDEST_TORCH)
    build_wheels(session, *PACKAGES)
    for package in PACKAGES:
        install_wheels(session, f"neuralops-{package}")
        check_package(session, package, gpu=has_gpu(session))


@nox.session
@nox.parametrize("core", [nox.param("oldest", id="oldest"), nox.param("newest", id="newest")])
def cores(session: nox.Session, core: str) -> None:
    """Test every family with the oldest and the newest core it allows.

    The oldest is built from the lowest tag in the families' range; before the first release that
    is the checkout's own.
    """
    share(session)
    build_wheels(session, *PACKAGES)
    if core == "oldest":
        tags = session.run(
            "git", "-C", str(ROOT), "tag", "--sort=version:refname", "--list",
            "neuralops-core-v0.1.*", external=True, silent=True,
        ).split()  # fmt: skip
        if tags:
            source = Path(session.create_tmp()) / "core.tar"
            session.run("git", "-C", str(ROOT), "archive", "--output", str(source), tags[0],
                        "packages/neuralops-core", external=True)  # fmt: skip
            shutil.unpack_archive(source, source.parent)
            for wheel in DIST.glob("neuralops_core-*"):
                wheel.unlink()
            session.run("python", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(DIST),
                        str(source.parent / "packages" / "neuralops-core"))  # fmt: skip
        session.log("core %s", tags[0] if tags else "of the checkout: nothing is released yet")
    for family in FAMILIES:
        install_wheels(session, f"neuralops-{family}")
        run_pytest(session, str(ROOT / "packages" / f"neuralops-{family}" / "tests"))


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small language model with the wheel of neuralops-ssm alone; options after ``--``."""
    share(session)
    build_wheels(session, "core", "ssm")
    install_wheels(session, "neuralops-ssm[demo]")
    session.run("python", "-m", "neuralops.ssm.demo", *session.posargs, env={"PYTHONPATH": ""})


@nox.session
@nox.parametrize("package,device", [
    nox.param(package, device, id=f"{package}-{device}")
    for package in FAMILIES for device in ("cpu", "gpu")
])  # fmt: skip
def parity(session: nox.Session, package: str, device: str) -> None:
    """Measure each operator's error against its float64 reference."""
    share(session)
    build_wheels(session, "core", package)
    install_wheels(session, f"neuralops-{package}", "neuralops-core[tools]")
    session.run("python", "-m", "neuralops.core", "parity", "--package", package,
                "--device", device, *session.posargs, env={"PYTHONPATH": ""})  # fmt: skip


@nox.session
def bench(session: nox.Session) -> None:
    """Time an operator: ``-- hgrn2_scan --device cpu``."""
    share(session)
    build_wheels(session, *PACKAGES)
    install_wheels(
        session, *(f"neuralops-{family}" for family in FAMILIES), "neuralops-core[tools]"
    )
    session.run("python", "-m", "neuralops.core", "bench", *session.posargs,
                env={"PYTHONPATH": ""})  # fmt: skip


@nox.session
@nox.parametrize("triton", [nox.param("pinned", id="pinned"), nox.param("newest", id="newest")])
def compile_gate(session: nox.Session, triton: str) -> None:
    """Compile every kernel ahead of time, without a GPU; ``-- --all`` for all configurations."""
    share(session)
    build_wheels(session, *PACKAGES)
    install_wheels(
        session, *(f"neuralops-{family}" for family in FAMILIES), "neuralops-core[tools]"
    )
    if triton == "newest":
        session.install("--quiet", "--upgrade", "--ignore-installed", "--no-deps", "triton")
    session.run("python", "-m", "neuralops.core", "compile_gate", *session.posargs,
                env={"PYTHONPATH": "", "TRITON_INTERPRET": "0"})  # fmt: skip


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format with ruff."""
    session.install("--quiet", *LINT_TOOLS)
    session.run("ruff", "check", str(ROOT))
    session.run("ruff", "format", "--check", str(ROOT))


@nox.session
def types(session: nox.Session) -> None:
    """Check types with mypy in strict mode, one package at a time."""
    share(session)
    session.install("--quiet", *LINT_TOOLS)
    paths = os.pathsep.join(str(ROOT / "packages" / f"neuralops-{p}" / "src") for p in PACKAGES)
    for package in PACKAGES:
        session.run(
            "mypy", "--config-file", str(ROOT / "pyproject.toml"),
            "--python-executable", str(Path(session.bin) / "python"),
            "-p", f"neuralops.{package}", env={"MYPYPATH": paths},
        )  # fmt: skip
