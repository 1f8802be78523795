"""Sessions of nox: `nox -s build-dev -- hdim=64`, `nox -s tests`, `nox -s wheels -- sm89`, ...

A session makes an environment from the pins of pyproject.toml, and calls the project; decisions are
flashvar_factory's.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
SOURCES = ROOT / "src" / "python"
sys.path.insert(0, str(SOURCES))

from flashvar_factory.build import example  # noqa: E402
from flashvar_factory.config import this_machine  # noqa: E402
from flashvar_factory.errors import ToolchainError  # noqa: E402
from flashvar_factory.toolchain import container, environment, nvcc  # noqa: E402

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["lint", "tests"]

PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
DEV_ENVIRONMENT = ROOT / ".nox" / "build-dev"
# uv does not read pip's settings.
PIP_AND_UV = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "").replace(" ", ",")}
WITH_SOURCES = {"PYTHONPATH": str(SOURCES)}
# Groups with lock files (with hashes): their packages make or check files of a release.
LOCKED = ["audit", "binary", "build", "ci", "cibuildwheel", "release", "smoke", "toolchain"]
# The benchmarks that need the environment that build-dev makes.
IN_DEV_ENVIRONMENT = {
    *("attention", "audit", "build", "host", "integrations", "layers", "models", "ops"),
    *("random", "shapes"),
}
# With these settings an example takes seconds on a CPU.
SMALL_EXAMPLES = {
    "finetune_packed": ["--steps", "3", "--tokens", "256"],
    "own_wheel": ["--head-dim", "32"],
    "train_gpt": ["--steps", "3", "--batch", "4", "--length", "128"],
    "unet_diffusion": ["--steps", "40", "--backend", "reference"],
}
# Folder of tests -> its files `test_<name>.py` that depend on torch's internals and need no
# packages but those of the groups `floor` and `ceiling`.
FLOOR = {
    "kernels": ["attention_*"],
    "unit": ["imports"],
    "unit/backends": ["reference*"],
    "unit/layers": ["layers*"],
    "unit/ops": [
        "any_argument",
        "attention_*",
        "autocast",
        "causal_conv1d_seq_idx",
        "dispatch_modes",
        "dropout",
        "flash_attn*",
        "gated_delta_rule_derivatives",
        "odd_*",
        "plan_key",
        "torch_*",
        "unknown_sizes",
        "vmap_places",
    ],
    "compat": ["causal_conv1d", "einops_patterns", "fla", "rotary_gradients"],
    "integrations": ["distributed", "documents", "torch*"],
}
# Those of the Triton kernels.
TRITON = {"kernels": ["*_triton", "triton_*"]}


@nox.session(name="build-dev", reuse_venv=True)
def build_dev(session: nox.Session) -> None:
    """Build kernels into a development environment: `-- hdim=64 arch=native ptx=1 jobs=2`."""
    check_selection(session, "--development")
    install(session, "dev", editable=True)
    install_toolkit(session)
    session.run("python", "-m", "flashvar_factory", "develop", *session.posargs)
    session.run("python", "examples/first_call.py")
    on_gpu = bool(this_machine.capabilities())
    session.run("flashvar", "doctor", success_codes=[0] if on_gpu else [0, 1])
    if not on_gpu:
        session.log("no CUDA device here: nothing but the reference can run, as doctor says")
    session.log(f"enter the environment: source {DEV_ENVIRONMENT / 'bin' / 'activate'}")


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Check style and types, the workflows and the issue forms."""
    install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    folders = (ROOT / "src" / "cuda", ROOT / "cmake", example.TEMPLATE, ROOT / "tests" / "foreign")
    files = [file for folder in folders for file in sorted(folder.rglob("*.*"))]
    cpp = [str(file) for file in files if file.suffix in {".cu", ".cuh", ".cc", ".h"}]
    session.run("clang-format", "--dry-run", "--Werror", *cpp)
    places = (ROOT / ".github" / "workflows", example.TEMPLATE / "github" / "workflows")
    workflows = [str(file) for folder in places for file in sorted(folder.glob("*.yml"))]
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    issue_forms = [
        str(file) for file in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    ]
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-issue-forms", *issue_forms)
    session.run("zizmor", "--offline", "--quiet", *workflows)


@nox.session(reuse_venv=True)
def tests(session: nox.Session) -> None:
    """Test without a GPU: wheels, kernels on the CPU, units; after `--` come pytest's arguments."""
    refuse_selection(session)
    install(session, "test")
    install_toolkit(session)
    # One worker runs a whole file, because its tests share what they build. The folders are in the
    # order of testpaths (pyproject.toml): the files of tests/packaging, which take minutes, start
    # first, and those of tests/kernels next, so that all workers end about together. Three keep two
    # processors busy: downloads and installers wait.
    dist = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
    # pytest stores its compiled test modules; otherwise each worker compiles all of them.
    env = {"PYTHONDONTWRITEBYTECODE": None}
    session.run("python", "-m", "pytest", *dist, *session.posargs, env=env)


@nox.session(name="every-wheel", reuse_venv=True)
def every_wheel(session: nox.Session) -> None:
    """Test the wheels of a whole release, of which `tests` builds a sample of the kernels."""
    refuse_selection(session)
    install(session, "test")
    install_toolkit(session)
    files = [f"tests/packaging/test_{name}.py" for name in ("wheels", "audit", "sbom")]
    session.run("python", "-m", "pytest", *files, "--every-wheel", *session.posargs)


@nox.session(reuse_venv=True)
def floor(session: nox.Session) -> None:
    """Test what depends on torch's internals, with the oldest supported torch."""
    run_by_name(session, "floor", FLOOR)


@nox.session(reuse_venv=True)
def ceiling(session: nox.Session) -> None:
    """Test the same, and the Triton kernels, with the newest torch and its Triton."""
    if sys.version_info < (3, 11):
        session.skip("expected Python 3.11 or newer for the newest torch, found an older one")
    run_by_name(session, "ceiling", FLOOR, TRITON)


@nox.session(reuse_venv=True)
def fla(session: nox.Session) -> None:
    """Test compat.fla with flash-linear-attention, whose functions it replaces."""
    run_by_name(session, "fla", {"compat": ["fla_real"]})


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Test on the GPU of this machine what build-dev built; `-- sanitize` under its sanitizer."""
    if session.posargs[:1] == ["sanitize"]:
        command = ["tests/gpu/sanitized.py", *session.posargs[1:]]
    else:
        command = ["-m", "pytest", "tests/gpu", "--require-device", *session.posargs]
    session.run(dev_python(session), *command, external=True)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Measure: `-- build`, `-- attention --json OUT`, ... (benchmarks/run.py)."""
    alone = not IN_DEV_ENVIRONMENT.intersection(session.posargs)
    whole = environment.is_whole(DEV_ENVIRONMENT)
    python = sys.executable if alone and not whole else dev_python(session)
    command = (python, "benchmarks/run.py", *session.posargs)
    session.run(*command, env=WITH_SOURCES, external=True)


@nox.session(reuse_venv=True)
def draw(session: nox.Session) -> None:
    """Draw pictures of measured rates: `-- benchmarks/results/attention-h200.json`."""
    install(session, "draw")
    session.run("python", "benchmarks/draw.py", *session.posargs)


@nox.session(reuse_venv=True)
def docs(session: nox.Session) -> None:
    """Build the documentation into build/site; a warning is an error."""
    install(session, "docs")
    env = WITH_SOURCES | {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", "build", "--strict", *session.posargs, env=env)


@nox.session(reuse_venv=True)
def examples(session: nox.Session) -> None:
    """Run the examples, small: `-- train_gpt`; with settings of one's own: `-- NAME --steps 50`."""
    known = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    name, *settings = session.posargs or [""]
    if name and name not in known:
        session.error(f"expected an example of {', '.join(known)}, found {name!r}")
    install(session, "examples")
    install_toolkit(session)
    for one in [name] if name else known:
        arguments = settings or SMALL_EXAMPLES.get(one, [])
        session.run("python", f"examples/{one}.py", *arguments, env=WITH_SOURCES)


@nox.session(reuse_venv=True)
def wheels(session: nox.Session) -> None:
    """Build wheels into dist/: `-- sm89 hdim=64`, `-- all`."""
    run_with_toolkit(session, "build", "wheels")


@nox.session(reuse_venv=True)
def release(session: nox.Session) -> None:
    """Build and check a release in dist/, from a clean checkout: `-- sm80 hdim=32` for a part."""
    run_with_toolkit(session, "release", "release")
    session.run("twine", "check", "--strict", *distributions(ROOT / "dist"))


@nox.session(name="check-release", reuse_venv=True)
def check_release(session: nox.Session) -> None:
    """Check that a folder has the release: `-- dist --second-build two --tag v1.2.3`."""
    install(session, "release")
    session.run(
        "twine", "check", "--strict", *distributions(Path(*session.posargs[:1] or ["dist"]))
    )
    run_factory(session, "check-release", *session.posargs)


@nox.session(name="select-unpublished", reuse_venv=True)
def select_unpublished(session: nox.Session) -> None:
    """Copy what an index lacks: `-- dist --checked FILE --index URL --output DIR`."""
    install(session, "release")
    run_factory(session, "select-unpublished", *session.posargs)


@nox.session(reuse_venv=True)
def lock(session: nox.Session) -> None:
    """Write locks/ from the pins of pyproject.toml: `-- --upgrade` also what these require."""
    session.install(*nox.project.dependency_groups(PYPROJECT, "smoke"), env=PIP_AND_UV)
    for group in LOCKED:
        command = ["uv", "pip", "compile", "--group", group, "--universal", "--generate-hashes"]
        command += ["--python-version", "3.10", "--no-annotate", "--quiet", *session.posargs]
        command += [
            "--custom-compile-command",
            "nox -s lock",
            "--output-file",
            f"locks/{group}.txt",
        ]
        session.run(*command, env={"UV_NO_CONFIG": "1", "UV_FIND_LINKS": ""})


@nox.session(reuse_venv=True)
def reproduce(session: nox.Session) -> None:
    """Build wheels twice, in two folders, and compare the bytes: `-- sm80 hdim=32`."""
    run_with_toolkit(session, "build", "reproduce")


@nox.session(reuse_venv=True)
def audit(session: nox.Session) -> None:
    """Audit the files in dist/, or those named: `-- X.whl --json --budget BYTES`."""
    run_on_files(session, "audit", "audit", "*.whl", "*.tar.gz")


@nox.session(reuse_venv=True)
def smoke(session: nox.Session) -> None:
    """Try the wheels of dist/ in fresh environments: `-- --serve --with torch==2.8.0`."""
    install(session, "smoke")
    run_factory(session, "smoke", *session.posargs, env=WITH_SOURCES | PIP_AND_UV)


@nox.session(reuse_venv=True)
def sbom(session: nox.Session) -> None:
    """Check and print the SBOMs of the wheels in dist/, or of those named: `-- X.whl --json`."""
    run_on_files(session, "build", "sbom", "*.whl")


@nox.session(reuse_venv=True)
def variants(session: nox.Session) -> None:
    """Make wheel variants of the wheels in dist/, in build/variants: `-- --experimental`."""
    install(session, "build")
    run_factory(session, "variants", *session.posargs)


@nox.session(venv_backend="none")
def index(session: nox.Session) -> None:
    """Make a static package index of dist/ in build/index/."""
    command = (sys.executable, "-m", "flashvar_factory", "index", *session.posargs)
    session.run(*command, env=WITH_SOURCES, external=True)


@nox.session(reuse_venv=True)
def cibuildwheel(session: nox.Session) -> None:
    """Build a wheel in a manylinux container, repair, audit and load it: `-- sm80 hdim=32`."""
    check_selection(session)
    why_not = container.choose(container.gather(os.environ)).why_not
    if sys.version_info < (3, 11):
        why_not = "expected Python 3.11 or newer for cibuildwheel, found an older one"
    if why_not:
        session.skip(why_not)
    install(session, "cibuildwheel")
    run_factory(session, "cibuildwheel", *session.posargs)


@nox.session(name="foreign-wheels", reuse_venv=True)
def foreign_wheels(session: nox.Session) -> None:
    """Build wheels of another project's kernels, from its sdist: `-- causal_conv1d sm_90`."""
    install(session, "foreign")
    install_toolkit(session)
    arguments = session.posargs or ["causal_conv1d"]
    session.run("python", "tests/foreign/wheels.py", *arguments, env=WITH_SOURCES)


def run_by_name(session: nox.Session, group: str, *named: dict[str, list[str]]) -> None:
    """Run the tests of these folders and names in the environment of a group."""
    refuse_selection(session)
    install(session, group)
    files = [
        file
        for folders in named
        for folder, names in folders.items()
        for name in names
        for file in files_named(folder, name)
    ]
    session.run("python", "-m", "pytest", *files, *session.posargs)


def files_named(folder: str, name: str) -> list[str]:
    """The files of tests that a name in a folder of theirs stands for."""
    return sorted(map(str, (ROOT / "tests" / folder).glob(f"test_{name}.py")))


def run_factory(
    session: nox.Session, command: str, *arguments: str, env: dict[str, str] = WITH_SOURCES
) -> None:
    """Run a command of the factory of this checkout, in the environment of the session."""
    session.run("python", "-m", "flashvar_factory", command, *arguments, env=env)


def run_with_toolkit(session: nox.Session, group: str, command: str) -> None:
    """Run a command of the factory that compiles."""
    check_selection(session)
    install(session, group)
    install_toolkit(session)
    run_factory(session, command, *session.posargs)


def run_on_files(session: nox.Session, group: str, command: str, *patterns: str) -> None:
    """Run a command of the factory on the files that are named, else on those of dist/."""
    made = [path for pattern in patterns for path in (ROOT / "dist").glob(pattern)]
    files = session.posargs or sorted(map(str, made))
    if not files:
        session.error("dist: expected wheels, found none: nox -s wheels -- all")
    install(session, group)
    run_factory(session, command, *files)


def distributions(folder: Path) -> list[str]:
    """The wheels and sdists in a folder."""
    return [str(path) for path in sorted(folder.glob("*")) if path.suffix in {".whl", ".gz"}]


def check_selection(session: nox.Session, *options: str) -> None:
    """Refuse what the factory would refuse, before minutes are spent on an environment."""
    given = itertools.takewhile(lambda word: not word.startswith("-"), session.posargs)
    call_check(session, *options, *given)


def refuse_selection(session: nox.Session) -> None:
    """Refuse a selection of kernels in a session whose arguments are pytest's."""
    call_check(session, "--tests", session.name, "--", *session.posargs)


def call_check(session: nox.Session, *arguments: str) -> None:
    """Call the factory's command check-selection; end as it does if it fails."""
    command = [sys.executable, "-m", "flashvar_factory", "--root", str(ROOT), "check-selection"]
    done = subprocess.run([*command, *arguments], env={**os.environ, **WITH_SOURCES})
    if done.returncode:
        environment.remove_unless_whole(Path(session.virtualenv.location))
        sys.exit(done.returncode)


def pinned(group: str) -> tuple[list[str], list[str]]:
    """The installer's arguments for a group, and its pins: of its lock file, if it has one."""
    file = ROOT / "locks" / f"{group}.txt"
    if file.is_file():
        arguments = ["--require-hashes", "--requirement", str(file)]
        return arguments, file.read_text(encoding="utf-8").splitlines()
    pins = list(nox.project.dependency_groups(PYPROJECT, group))
    return pins, pins


def install(session: nox.Session, group: str, *, editable: bool = False) -> None:
    """Install a dependency group of pyproject.toml (and flashvar), unless it is there already."""
    requirements, locked = pinned(group)
    # What decides the metadata of an editable flashvar, beside its requirements.
    sources = ["pyproject.toml", "variants.toml", "src/python/flashvar/_version.py"]
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in sources] if editable else []
    folder = Path(session.virtualenv.location)
    pins = "\n".join([*locked, *texts])
    if environment.holds(folder, pins):
        return
    stamp = folder / environment.STAMP
    stamp.unlink(missing_ok=True)
    session.install(*requirements, env=PIP_AND_UV)
    if editable:
        session.install("--no-build-isolation", "--no-deps", "--editable", ".", env=PIP_AND_UV)
    stamp.write_text(pins, encoding="utf-8")


def install_toolkit(session: nox.Session) -> None:
    """Install the pinned CUDA toolkit from PyPI if the factory finds no nvcc that is new enough.

    Also if the one that it finds was installed from other pins.
    """
    folder = ROOT / nvcc.PYPI_FOLDER
    requirements, locked = pinned(nvcc.GROUP)
    pins = "\n".join(locked)
    forced = next((word for word in session.posargs if word.startswith("toolkit=")), "auto")
    try:
        found = nvcc.find(forced.removeprefix("toolkit="), os.environ, ROOT)
        if environment.holds(folder, pins) or not found.nvcc.is_relative_to(folder.resolve()):
            return
        session.log(f"{folder} does not hold the pinned CUDA compiler: it comes from PyPI again")
    except ToolchainError as error:
        if forced == "toolkit=system":
            session.error(str(error))
        session.log("no CUDA compiler on this machine that is new enough: it comes from PyPI")
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    session.install("--target", str(folder), *requirements, env=PIP_AND_UV)
    (folder / environment.STAMP).write_text(pins, encoding="utf-8")


def dev_python(session: nox.Session) -> str:
    """The Python of the environment that build-dev made."""
    try:
        return str(environment.python(DEV_ENVIRONMENT, "build-dev"))
    except ToolchainError as error:
        session.error(str(error))
