"""Every task of the repository: ``python -m nox -l`` lists them.

The sessions test wheels. They share one installation of torch, Triton and the test tools, through
a ``.pth`` file in each session's own environment; the sources are never on the path. An
interpreter that already has torch, as on a machine with a GPU, shares its own, and what it lacks
is installed beside it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import shutil
import sys
from pathlib import Path

import nox
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
PACKAGES = ("core", "attn", "lowrank", "ssm")
FAMILIES = PACKAGES[1:]
EVERYTHING = tuple(f"neuralops-{package}" for package in PACKAGES)

TORCH = "torch==2.13.0"
TRITON = "triton==3.6.0"
HATCHLING = "hatchling==1.33.0"
TEST_TOOLS = (
    TORCH,
    *((TRITON,) if sys.platform == "linux" else ()),
    HATCHLING,
    "hypothesis==6.170.17",
    "matplotlib==3.11.2",
    "numpy==2.3.5",  # the interpreter of Triton 3.6 fails with NumPy 2.4
    "packaging==26.2",
    "pytest==9.2.0",
    "rich==15.0.0",
)
OLDEST = {
    "matplotlib": "matplotlib==3.8.0",
    "numpy": "numpy==1.26.4",  # Matplotlib 3.8.0's
    "rich": "rich==13.7.0",
}
OLDEST_TORCH = "2.11"
COVERAGE = "coverage==7.17.3"
DOCS_TOOLS = (
    "latex2mathml==3.81.1",
    "mkdocs==1.6.1",
    "mkdocs-material==9.8.1",
    "mkdocstrings[python]==1.0.8",
)
LINT_TOOLS = ("mypy==2.4.1", "ruff==0.17.6")

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True


# --- Shared steps ---------------------------------------------------------------------------


def own_site() -> list[str]:
    """Return the folders of this interpreter's packages if torch is among them.

    An interpreter that has our packages too, as when developing, is not shared.
    """
    if not importlib.util.find_spec("torch") or importlib.util.find_spec("neuralops"):
        return []
    return [folder for folder in sys.path if folder and any(Path(folder).glob("*.dist-info"))]


def shared_site(session: nox.Session, name: str, tools: tuple[str, ...]) -> list[str]:
    """Return the folders that hold ``tools``, installing once what this interpreter lacks."""
    own = own_site()
    home = Path(session.cache_dir) / f"{name}-python{sys.version_info[0]}.{sys.version_info[1]}"
    python = str(home / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    done = home / "installed"
    wanted = "\n".join((*own, *tools))
    if not done.exists() or done.read_text() != wanted:
        shutil.rmtree(home, ignore_errors=True)
        session.run(sys.executable, "-m", "virtualenv", "--quiet", str(home), external=True)
        see(session, own, python)
        missing = [t for t in tools if not own or t in OLDEST.values() or not is_here(t)]
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        for requirements in ([t for t in missing if t == TORCH], missing):
            if requirements:
                session.run(*pip, *requirements, external=True)
        done.write_text(wanted)
    return [site_of(session, python), *own]


def is_here(requirement: str) -> bool:
    """Whether this interpreter has some version of a package."""
    name = Requirement(requirement).name
    return importlib.util.find_spec(name.replace("-", "_")) is not None


def site_of(session: nox.Session, python: str = "python") -> str:
    """Return the site-packages of an interpreter."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return str(session.run(python, "-c", code, external=True, silent=True)).strip()


def see(session: nox.Session, folders: list[str], python: str = "python") -> None:
    """Let an interpreter see the packages in ``folders``."""
    Path(site_of(session, python), "shared.pth").write_text("".join(f"{f}\n" for f in folders))


def share(session: nox.Session, name: str = "newest", tools: tuple[str, ...] = TEST_TOOLS) -> None:
    """Let the session's environment see torch, Triton and the test tools."""
    see(session, shared_site(session, name, tools))


def has_gpu(session: nox.Session) -> bool:
    """Whether the session's torch sees a CUDA device."""
    code = "import torch; print(torch.cuda.is_available())"
    return str(session.run("python", "-c", code, silent=True)).strip() == "True"


def build_wheels(session: nox.Session, *sources: Path, out: Path = DIST) -> None:
    """Build the wheels of ``sources``, by default of the four packages, into ``out``."""
    out.mkdir(exist_ok=True)
    for source in sources or [ROOT / "packages" / f"neuralops-{package}" for package in PACKAGES]:
        for old in out.glob(f"{source.name.replace('-', '_')}-*"):
            old.unlink()
        session.run("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
                    "--wheel-dir", str(out), str(source), silent=True)  # fmt: skip


def install_wheels(session: nox.Session, *requirements: str, links: tuple[Path, ...] = ()) -> None:
    """Install our own wheels anew; what else they need is in the shared site-packages."""
    session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes",
                *(f"neuralops-{package}" for package in PACKAGES), silent=True)  # fmt: skip
    folders = [argument for link in (DIST, *links) for argument in ("--find-links", str(link))]
    session.install("--quiet", "--no-index", *folders, *requirements)


def run_pytest(
    session: nox.Session, *arguments: str, none_is_fine: bool = False, **environment: str
) -> None:
    """Run pytest on installed packages, with the repository's settings."""
    session.run(
        "python", "-P", "-m", "pytest", "-c", str(ROOT / "pyproject.toml"),
        "--rootdir", str(ROOT), "-q", *arguments,
        env={**environment, "PYTHONPATH": "", "TRITON_DEFAULT_FP_FUSION": "1"},
        success_codes=[0, 5] if none_is_fine else [0],
    )  # fmt: skip


# --- Sessions -------------------------------------------------------------------------------


@nox.session
def build(session: nox.Session) -> None:
    """Build the four wheels into dist/."""
    if own_site():
        share(session)
    else:
        session.install("--quiet", HATCHLING)
    build_wheels(session)
    session.log("built %s", ", ".join(sorted(path.name for path in DIST.glob("*.whl"))))


def check_package(session: nox.Session, package: str, *options: str, gpu: bool) -> None:
    """Run the tests of an installed package, and its Triton kernels too where there is no GPU."""
    folder = str(ROOT / "packages" / f"neuralops-{package}" / "tests")
    run_pytest(session, folder, *options, none_is_fine=bool(options))
    if not gpu:
        session.log("the Triton kernels of neuralops-%s, in the interpreter", package)
        run_pytest(session, folder, "-m", "triton", *options, none_is_fine=True,
                   TRITON_INTERPRET="1")  # fmt: skip


@nox.session
def tests(session: nox.Session) -> None:
    """Test each package's wheel, with only what it needs, and then what shows across packages.

    ``-- ssm`` tests one package; ``-- integration`` what shows across packages. What follows is
    pytest's: ``-- ssm -k clip``.
    """
    parts = (*PACKAGES, "integration")
    chosen = list(itertools.takewhile(lambda argument: argument in parts, session.posargs))
    options = session.posargs[len(chosen) :]
    share(session)
    build_wheels(session)
    gpu = has_gpu(session)
    for package in PACKAGES:
        if package in (chosen or parts):
            install_wheels(session, f"neuralops-{package}")
            check_package(session, package, *options, gpu=gpu)
    if "integration" in (chosen or parts):
        install_wheels(session, *EVERYTHING)
        run_pytest(session, str(ROOT / "tests_integration"), *options, none_is_fine=bool(options),
                   NEURALOPS_WHEELS=str(DIST))  # fmt: skip


@nox.session
@nox.parametrize("bound", [nox.param("tools", id="tools"), nox.param("torch", id="torch")])
def oldest(session: nox.Session, bound: str) -> None:
    """Test every package at its declared lower bounds.

    ``oldest(tools)`` has the oldest Triton, Matplotlib and rich; ``oldest(torch)`` the oldest torch
    too, and needs an interpreter that has it: run nox there.
    """
    if bound == "torch":
        have = importlib.metadata.version("torch") if own_site() else "not there"
        if not have.startswith(f"{OLDEST_TORCH}."):
            session.skip(f"torch {OLDEST_TORCH} must be in the interpreter of nox: it is {have}")
        share(session)
    else:
        share(session, "oldest", tuple(OLDEST.get(Requirement(t).name, t) for t in TEST_TOOLS))
    build_wheels(session)
    for package in PACKAGES:
        install_wheels(session, f"neuralops-{package}")
        check_package(session, package, gpu=has_gpu(session))


@nox.session
@nox.parametrize("core", [nox.param("oldest", id="oldest"), nox.param("newest", id="newest")])
def cores(session: nox.Session, core: str) -> None:
    """Test every family with the oldest and the newest core it allows.

    The oldest is built from the lowest tag in the family's range; before the first release it is
    the checkout's own, as the newest always is.
    """
    share(session)
    build_wheels(session)
    for family in FAMILIES:
        version = oldest_core(session, family) if core == "oldest" else ""
        if core == "oldest" and not version:
            session.log("nothing in the range is released yet: core is the checkout's")
        requirement = f"neuralops-core=={version}" if version else "neuralops-core"
        install_wheels(session, f"neuralops-{family}", requirement,
                       links=(Path(session.create_tmp()),))  # fmt: skip
        run_pytest(session, str(ROOT / "packages" / f"neuralops-{family}" / "tests"))


def oldest_core(session: nox.Session, family: str) -> str:
    """Build the oldest released core in a family's range, and return its version, if any."""
    project = ROOT / "packages" / f"neuralops-{family}" / "pyproject.toml"
    needs = map(Requirement, nox.project.load_toml(project)["project"]["dependencies"])
    (allowed,) = (need.specifier for need in needs if need.name == "neuralops-core")
    prefix = "neuralops-core-v"
    tags = str(session.run("git", "-C", str(ROOT), "tag", "--list", f"{prefix}*",
                           external=True, silent=True)).split()  # fmt: skip
    released = {Version(tag.removeprefix(prefix)): tag for tag in tags}
    versions = sorted(allowed.filter(released))
    if not versions:
        return ""
    home = Path(session.create_tmp())
    session.run("git", "-C", str(ROOT), "archive", "--output", str(home / "core.tar"),
                released[versions[0]], "packages/neuralops-core", external=True)  # fmt: skip
    shutil.unpack_archive(home / "core.tar", home)
    build_wheels(session, home / "packages" / "neuralops-core", out=home)
    return str(versions[0])


@nox.session
def coverage(session: nox.Session) -> None:
    """Report the lines that the tests of the packages reach on this machine."""
    share(session)
    build_wheels(session)
    install_wheels(session, *EVERYTHING)
    session.install("--quiet", COVERAGE)
    configuration = f"--rcfile={ROOT / 'pyproject.toml'}"
    folders = [str(ROOT / "packages" / f"neuralops-{package}" / "tests") for package in PACKAGES]
    session.run("python", "-m", "coverage", "erase", configuration)
    for interpret in ("0", "1"):
        session.run(
            "python", "-P", "-m", "coverage", "run", configuration, "-m", "pytest",
            "-c", str(ROOT / "pyproject.toml"), "-q", *(["-m", "triton"] * int(interpret)),
            *folders, env={"PYTHONPATH": "", "TRITON_INTERPRET": interpret},
        )  # fmt: skip
    session.run("python", "-m", "coverage", "combine", "--quiet", configuration)
    session.run("python", "-m", "coverage", "report", configuration)


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small language model with the wheel of neuralops-ssm alone; options after ``--``."""
    share(session)
    build_wheels(session)
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
    if device == "gpu" and not has_gpu(session):
        session.skip("no CUDA device: the GPU's half is not measured")
    build_wheels(session)
    install_wheels(session, f"neuralops-{package}", "neuralops-core[tools]")
    session.run("python", "-m", "neuralops.core", "parity", "--package", package,
                "--device", device, *session.posargs, env={"PYTHONPATH": ""})  # fmt: skip


@nox.session
def bench(session: nox.Session) -> None:
    """Time an operator: ``-- hgrn2_scan --device cpu``."""
    share(session)
    build_wheels(session)
    install_wheels(session, *EVERYTHING, "neuralops-core[tools]")
    session.run("python", "-m", "neuralops.core", "bench", *session.posargs,
                env={"PYTHONPATH": ""})  # fmt: skip


@nox.session
@nox.parametrize("triton", [nox.param("pinned", id="pinned"), nox.param("newest", id="newest")])
def compile_gate(session: nox.Session, triton: str) -> None:
    """Compile every kernel ahead of time, without a GPU; ``-- --all`` for all configurations."""
    share(session)
    build_wheels(session)
    install_wheels(session, *EVERYTHING, "neuralops-core[tools]")
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


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into dist/docs and run its examples; ``-- serve`` shows it."""
    session.install("--quiet", *DOCS_TOOLS)
    configuration = ("--config-file", str(ROOT / ".mkdocs.yml"))
    if session.posargs:
        session.run("mkdocs", *session.posargs, *configuration)
        return
    session.run("mkdocs", "build", "--quiet", "--strict", *configuration,
                env={"NO_MKDOCS_2_WARNING": "1"})  # fmt: skip
    share(session)
    build_wheels(session)
    install_wheels(session, *EVERYTHING)
    folder = ROOT / "tests_integration"
    run_pytest(session, str(folder / "test_examples.py"), NEURALOPS_WHEELS=str(DIST))
    run_pytest(session, str(folder / "test_new_operator.py"), "-k", "page",
               NEURALOPS_WHEELS=str(DIST))  # fmt: skip
