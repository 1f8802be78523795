"""Installs the wheels of a release into a fresh environment of every Python here, and tries them.

Requirements on other packages (torch) are installed first: a wheel of PIP_FIND_LINKS, or the
version of `--with`. Otherwise an empty wheel of the lowest fitting version, a stand-in, satisfies
them: torch would be gigabytes for each Python.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from flashvar_factory.build import process
from flashvar_factory.config.schema import Config
from flashvar_factory.errors import PackagingError, SmokeError
from flashvar_factory.index import serve
from flashvar_factory.inspect import archive, core_metadata
from flashvar_factory.inspect.plain_text import plain
from flashvar_factory.release.pythons import Python, require

INSTALLERS: Final = ("pip", "uv")
_WHEEL: Final = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
# Settings of the user that could bring in other wheels than those under test.
_SETTINGS: Final = ("PIP_", "UV_", "PYTHON", "FLASHVAR_")


@dataclass(frozen=True)
class Check:
    """One environment, and what came of it."""

    python: str  # "3.12", "3.14t"
    installer: str
    dependencies: tuple[str, ...]  # e.g. "torch 2.13.0+cpu", "stand-in torch 2.8"
    installed: tuple[str, ...]
    seconds: float
    output: str  # the last lines of the project's own check
    error: str | None


@dataclass(frozen=True)
class Report:
    """All environments."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether there was an environment, and no error in any."""
        return bool(self.checks) and all(check.error is None for check in self.checks)

    def text(self) -> str:
        """A line for each environment, its error below it."""
        return "\n".join(line for check in self.checks for line in _lines(check))

    def to_json(self) -> str:
        """The same for machines."""
        document = {"ok": self.ok, "checks": [asdict(check) for check in self.checks]}
        return json.dumps(document, indent=1) + "\n"


@dataclass(frozen=True)
class _Subject:
    """What is installed, and from where."""

    requirements: tuple[str, ...]  # the wheels under test, their versions pinned
    names: tuple[str, ...]
    needs: Mapping[str, str]  # other distributions -> the lowest version that will do
    source: tuple[str, ...]  # options of the installer


def run(
    wheels: Path,
    *,
    root: Path,
    config: Config,
    pythons: Sequence[Python],
    index_url: str | None = None,
    with_versions: Sequence[str] = (),
) -> Report:
    """Install the latest versions in `wheels`, or those of them that `index_url` has, and check.

    `with_versions` are requirements such as "torch==2.8.0", taken from the configured index: each
    adds one environment per Python. PackagingError where there are no wheels, SmokeError where
    there is no Python.
    """
    subject = _subject(wheels, config, index_url)
    require(pythons)
    checks = []
    for python in pythons:
        for installer in INSTALLERS:
            if installer == "uv" and _uv() is None:
                continue
            for extra in with_versions or (None,):
                checks.append(_check(python, installer, extra, subject, root, config))
                print("\n".join(_lines(checks[-1])), flush=True)
    return Report(tuple(checks))


def run_with_index(
    wheels: Path, site: Path, *, root: Path, config: Config, pythons: Sequence[Python]
) -> Report:
    """`run` with the index of `wheels` in `site`; SmokeError if an environment does not work."""
    with serve.serving(site) as address:
        report = run(wheels, root=root, config=config, pythons=pythons, index_url=address)
    if not report.ok:
        names = ", ".join(str(python.executable) for python in pythons)
        raise SmokeError(
            f"expected wheels that install and work with {names}, found errors: see above"
        )
    return report


def _lines(check: Check) -> Iterator[str]:
    state = "ok" if check.error is None else "FAILED"
    wheels = f"{len(check.installed)} wheels, {', '.join(check.dependencies) or 'nothing else'}"
    yield f"{state}: Python {check.python}, {check.installer}: {wheels} ({check.seconds:.1f} s)"
    for line in (check.error or check.output).splitlines():
        yield f"  {plain(line)}"


def _subject(wheels: Path, config: Config, index_url: str | None) -> _Subject:
    machine = f"_{platform.machine()}"
    newest: dict[str, tuple[archive.Name, Path]] = {}
    named = [(archive.parse_name(path.name), path) for path in sorted(wheels.glob("*.whl"))]
    for name, path in sorted(named, key=lambda one: Version(one[0].version)):
        if name.variant_label is None and name.tag.endswith((machine, "-any")):
            newest[canonicalize_name(name.distribution)] = (name, path)
    if not newest:
        raise PackagingError(
            f"{wheels}: expected wheels for {machine[1:]}, found none; nox -s wheels -- all"
        )
    needs: dict[str, str] = {
        canonicalize_name(one.name): _lowest(one)
        for _, path in newest.values()
        for one in archive.metadata(path).requires_dist or ()
        if core_metadata.extra_of(one) is None and canonicalize_name(one.name) not in newest
    }
    every = {target.distribution for target in config.targets.values()}
    requirements = []
    for distribution, (name, _) in newest.items():
        whole = distribution == canonicalize_name(config.project.name) and every <= newest.keys()
        requirements.append(f"{distribution}{'[all]' if whole else ''}=={name.version}")
    source = (
        ("--index-url", index_url) if index_url else ("--no-index", "--find-links", str(wheels))
    )
    return _Subject(tuple(requirements), tuple(sorted(newest)), needs, source)


def _lowest(requirement: Requirement) -> str:
    """The lowest version that satisfies a requirement such as `torch>=2.8`, or one near it."""
    bounds = [one.version.removesuffix(".*") for one in requirement.specifier]
    near = [*bounds, *(f"{bound}.1" for bound in bounds), "1", "0"]
    return next(filter(requirement.specifier.contains, near), "1")


def _check(
    python: Python, installer: str, extra: str | None, subject: _Subject, root: Path, config: Config
) -> Check:
    began = time.monotonic()
    failure, output, dependencies = None, "", [extra] if extra else []
    with tempfile.TemporaryDirectory(prefix="smoke-") as folder:
        try:
            inside = _environment(python, installer, Path(folder, "environment"))
            first, stand_ins = _dependencies(python, extra, subject.needs, Path(folder, "links"))
            dependencies += [
                f"{file.name.split('-')[0]} {file.name.split('-')[1]}" for file in first
            ]
            dependencies += [f"stand-in {name} {subject.needs[name]}" for name in stand_ins]
            taken = [*map(str, first), *([extra] if extra else [])]
            if taken:
                _install(installer, inside, *taken, asked=True)
            links = ("--find-links", str(Path(folder, "links"))) if stand_ins else ()
            _install(installer, inside, *subject.source, *links, *subject.requirements)
            if config.project.smoke is not None:
                command = [str(inside), "-I", str(root / config.project.smoke), *subject.names]
                output = _run(command, cwd=Path(folder))
        except PackagingError as error:
            failure = str(error)
    return Check(
        ".".join(map(str, python.version)) + ("t" if python.free_threaded else ""),
        installer,
        tuple(dependencies),
        subject.names,
        round(time.monotonic() - began, 1),
        output,
        failure,
    )


def _environment(python: Python, installer: str, folder: Path) -> Path:
    """A fresh virtual environment; its Python."""
    pip = [] if installer == "pip" else ["--without-pip"]
    _run([str(python.executable), "-I", "-m", "venv", *pip, str(folder)])
    return folder / "bin" / "python"


def _dependencies(
    python: Python, extra: str | None, needs: Mapping[str, str], links: Path
) -> tuple[list[Path], list[str]]:
    """Wheels of this machine to install first; and the names a stand-in was made for in `links`."""
    found, stand_ins = [], []
    links.mkdir()
    for name, lowest in needs.items():
        if extra is not None and canonicalize_name(extra).startswith(name):
            continue
        local = [
            path
            for folder in os.environ.get("PIP_FIND_LINKS", "").split()
            for path in sorted(Path(folder).glob(f"{name.replace('-', '_')}-*-{python.tag}-*.whl"))
        ]
        if local:
            found.append(local[-1])
        else:
            _stand_in(name, lowest, links)
            stand_ins.append(name)
    return found, stand_ins


def _stand_in(name: str, version: str, links: Path) -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {f"{info}/METADATA": metadata, f"{info}/WHEEL": _WHEEL}
    contents = {path: text.encode() for path, text in files.items()}
    archive.write(links / f"{stem}-py3-none-any.whl", contents, info)


def _install(installer: str, inside: Path, *arguments: str, asked: bool = False) -> None:
    """Install into the environment of `inside`; the user's settings count for what was `asked`."""
    if installer == "pip":
        command = [str(inside), "-m", "pip", "install", "--quiet", "--no-input"]
    else:
        command = [str(_uv()), "pip", "install", "--quiet", "--python", str(inside)]
        command += ["--no-config"] if not asked else []
    _run([*command, *arguments], settings=asked)


def _uv() -> str | None:
    beside = str(Path(sys.executable).parent)
    return shutil.which("uv", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))


def _run(command: Sequence[str], *, settings: bool = False, cwd: Path | None = None) -> str:
    """What a command printed; PackagingError with all of it when it fails."""
    environ = {
        key: value for key, value in os.environ.items() if settings or not key.startswith(_SETTINGS)
    }
    if not settings:
        environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = process.run(command, quiet=True, env=environ, cwd=cwd)
    if done.returncode != 0:
        raise PackagingError(
            f"expected exit code 0, found {done.returncode} of: {' '.join(command)}\n"
            f"{done.stdout.strip()}"
        )
    return done.stdout.strip()
