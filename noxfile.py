"""The front door: `nox -s build-dev -- hdim=64`, `nox -s tests`, `nox -s wheels -- sm89`, ...

A session makes an environment from the pins of pyproject.toml, and calls the project; decisions are
flashvar_factory's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
SOURCES = ROOT / "src" / "python"
sys.path.insert(0, str(SOURCES))

from flashvar.errors import FlashvarError, ToolchainError  # noqa: E402
from flashvar_factory import native, schema, toolchain, words  # noqa: E402

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["lint", "tests"]

PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
DEV_ENVIRONMENT = ROOT / ".nox" / "build-dev"
# uv does not read pip's settings.
PIP_AND_UV = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "").replace(" ", ",")}
WITH_SOURCES = {"PYTHONPATH": str(SOURCES)}


@nox.session(name="build-dev", reuse_venv=True)
def build_dev(session: nox.Session) -> None:
    """Build kernels into a development environment: `-- hdim=64 arch=native ptx=1 jobs=2`."""
    check_words(session)
    install(session, "dev", editable=True)
    install_toolkit(session)
    session.run("python", "-m", "flashvar_factory", "develop", *session.posargs)
    session.run("python", "examples/first_call.py")
    on_gpu = bool(native.capabilities())
    session.run("flashvar", "doctor", success_codes=[0] if on_gpu else [0, 1])
    if not on_gpu:
        session.log("no CUDA device here: nothing but the reference can run, as doctor says")
    session.log(f"enter the environment: source {DEV_ENVIRONMENT / 'bin' / 'activate'}")


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Check style and types: ruff, mypy --strict, clang-format."""
    install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    folders = (ROOT / "src" / "cuda", ROOT / "cmake")
    files = [file for folder in folders for file in sorted(folder.rglob("*.*"))]
    cpp = [str(file) for file in files if file.suffix in {".cu", ".cuh", ".cc", ".h"}]
    session.run("clang-format", "--dry-run", "--Werror", *cpp)


@nox.session(reuse_venv=True)
def tests(session: nox.Session) -> None:
    """Test without a GPU: the unit tests, and the wheels; pytest's own words after `--`."""
    install(session, "test")
    install_toolkit(session)
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Test on the GPU of this machine, what build-dev built: wraps `python -m pytest tests/gpu`."""
    session.run(dev_python(session), "-m", "pytest", "tests/gpu", *session.posargs, external=True)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Measure: `-- build`, `-- attention --json OUT`, ... (benchmarks/run.py)."""
    session.run(dev_python(session), "benchmarks/run.py", *session.posargs, external=True)


@nox.session(reuse_venv=True)
def wheels(session: nox.Session) -> None:
    """Build wheels into dist/: `-- sm89 hdim=64`, `-- all`."""
    check_words(session)
    install(session, "build")
    install_toolkit(session)
    command = ("python", "-m", "flashvar_factory", "wheels", *session.posargs)
    session.run(*command, env=WITH_SOURCES)


@nox.session(venv_backend="none")
def index(session: nox.Session) -> None:
    """Make a static package index of dist/ in build/index/."""
    command = (sys.executable, "-m", "flashvar_factory", "index", *session.posargs)
    session.run(*command, env=WITH_SOURCES, external=True)


def check_words(session: nox.Session) -> None:
    """Refuse what the factory would refuse, before minutes are spent on an environment."""
    try:
        words.parse(session.posargs, schema.read(ROOT / schema.FILE_NAME))
    except FlashvarError as error:
        session.warn(str(error))
        sys.exit(error.exit_code)


def install(session: nox.Session, group: str, *, editable: bool = False) -> None:
    """Install a dependency group of pyproject.toml (and flashvar), unless it is there already."""
    requirements = nox.project.dependency_groups(PYPROJECT, group)
    # What decides the metadata of an editable flashvar, beside its requirements.
    sources = ["pyproject.toml", "variants.toml", "src/python/flashvar/_version.py"]
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in sources] if editable else []
    stamp = Path(session.virtualenv.location, "installed-pins.txt")
    pins = "\n".join([*requirements, *texts])
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == pins:
        return
    stamp.unlink(missing_ok=True)
    session.install(*requirements, env=PIP_AND_UV)
    if editable:
        session.install("--no-build-isolation", "--no-deps", "--editable", ".", env=PIP_AND_UV)
    stamp.write_text(pins, encoding="utf-8")


def install_toolkit(session: nox.Session) -> None:
    """Get the pinned CUDA toolkit from PyPI where the factory finds no nvcc that will do."""
    forced = next((word for word in session.posargs if word.startswith("toolkit=")), "auto")
    try:
        toolchain.find(forced.removeprefix("toolkit="), os.environ, ROOT)
    except ToolchainError as error:
        if forced == "toolkit=system":
            session.error(str(error))
        session.log("no CUDA compiler that will do on this machine: it comes from PyPI")
        folder = str(ROOT / toolchain.PYPI_FOLDER)
        requirements = nox.project.dependency_groups(PYPROJECT, toolchain.GROUP)
        session.install("--target", folder, *requirements, env=PIP_AND_UV)


def dev_python(session: nox.Session) -> str:
    """The Python of the environment that build-dev made."""
    python = DEV_ENVIRONMENT / "bin" / "python"
    if not python.is_file():
        session.error(f"expected the development environment {DEV_ENVIRONMENT}: nox -s build-dev")
    return str(python)
