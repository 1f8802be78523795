"""The installers: pip, or uv where the environment has no pip.

Each fetches a wheel into a folder of its own, unpacked, so that it is checked before the
environment changes. The checked files are packed again, and that wheel is installed by name and
hash.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from flashvar.errors import DamagedWheelError, InstallError, WheelNotFoundError
from flashvar.installing import destination, settings, temporary
from flashvar.installing.source import WheelSource
from flashvar.installing.wheel_requirements import WheelRequirement

# How pip and uv begin when a file has another hash than its source lists.
_HASHES: Final = ("DO NOT MATCH THE HASHES", "Hash mismatch")
# What pip and uv say of a file that ended early, or that is no wheel.
_TORN: Final = re.compile(
    r"incomplete-download|located at .* is invalid|has an invalid wheel"
    r"|end of file before message length|Failed to extract archive|The wheel is invalid"
)
# How the lines begin in which they say why: uv in two ways, and of an index that refused in a third
# one; pip of a page that it cannot read.
_CAUSES: Final = ("cause:", "Caused by:", "hint:", "Could not fetch URL", "WARNING: Skipping page")
# What pip and uv say of a file that its publisher withdrew, which an exact version still takes. The
# reason may have several lines.
_YANKED: Final = re.compile(
    r"^(?:Reason for being yanked: (.*)"
    r"|warning: `[^`]*` is yanked(?: \(reason: \"([\s\S]*?)\"\))?)$",
    re.MULTILINE,
)
# How they say that the temporary folder cannot take a file.
_FULL: Final = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
# pip's heading of a traceback: its last line says more.
_TRACEBACK: Final = "ERROR: Exception:"
_LABEL: Final = re.compile(r"^(error|cause|caused by|warning|hint):\s*", re.IGNORECASE)
# Older versions of uv draw a tree of errors, wrapped at 80 columns: the signs before an error and
# before its causes, and how their further lines begin.
_DRAWN: Final = re.compile(r"\s*(?:(?P<error>\u00d7)|[├╰]─▶)\s+")
_BELOW: Final = ("   ", "  │")
# How files of a wheel are packed; zipfile raises errors of their own for other ways.
_PACKED: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# What zipfile raises of an archive that is torn or encrypted.
_UNREADABLE: Final = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError)


@dataclass(frozen=True)
class Fetched:
    """A wheel that was unpacked."""

    tree: Path
    file: str  # its name and hash for people
    withdrawn: str | None  # why its publisher yanked it; None: it did not


class Installer(Protocol):
    """What installs into the environment of this process."""

    def fetch(self, requirement: WheelRequirement, source: WheelSource, folder: Path) -> Fetched:
        """Fetch a wheel into an empty folder and unpack it there; its source's hash is checked.

        Raises:
            WheelNotFoundError: the source does not have it.
            DamagedWheelError: it has another hash.
        """
        ...

    def install(self, requirements: Sequence[str], folder: Path) -> None:
        """Install the wheels of a folder, in place of other versions of them.

        `requirements` have a hash each: no other file meets them.

        Raises:
            InstallError: the installer gave up.
        """
        ...


def find(environ: Mapping[str, str]) -> Installer:
    """Pip if this Python has one that works, else uv.

    Raises:
        InstallError: there is neither, or the system manages this Python.
    """
    marker = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    is_own = sys.prefix != sys.base_prefix or settings.may_change_the_system(environ)
    if marker.exists() and not is_own:
        raise InstallError(
            f"expected an environment of your own, found {sys.prefix}, which the system manages: "
            "make one with `python -m venv`, and install flashvar there; in an image, set "
            "PIP_BREAK_SYSTEM_PACKAGES=1"
        )
    destination.require_writable()
    if _has("pip._internal.cli.main"):  # as far as its command, which a half-removed one is not
        return Pip((sys.executable, "-m", "pip"))
    scripts = sysconfig.get_path("scripts")
    uv = environ.get("UV") or shutil.which("uv", path=f"{scripts}:{environ.get('PATH', '')}")
    if uv:
        return Uv((uv,))
    fix = "`python -m ensurepip` adds pip" if _has("ensurepip") else "install uv"
    raise InstallError(f"expected pip in {sys.prefix} or uv on PATH, found neither working: {fix}")


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


@dataclass(frozen=True)
class Pip:
    """The pip of this Python."""

    command: tuple[str, ...]

    def fetch(self, requirement: WheelRequirement, source: WheelSource, folder: Path) -> Fetched:
        """Fetch a wheel into an empty folder and unpack it there."""
        wheels, tree = folder / "wheels", folder / "tree"
        with temporary.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        command = [*self.command, "download", "-vv", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", str(wheels)]
        command += [*_in_folder(source.folder), str(requirement)]
        done = _run(command, _variables(source, folder))
        _check_fetched(done, requirement, source)
        (wheel,) = wheels.glob("*.whl")
        try:
            with temporary.writing(tree), zipfile.ZipFile(wheel) as archive:
                if any(one.compress_type not in _PACKED for one in archive.infolist()):
                    raise zipfile.BadZipFile("a file that is neither stored nor deflated")
                archive.extractall(tree)
        except _UNREADABLE as error:
            raise DamagedWheelError(
                f"{wheel.name}: expected a whole wheel, found {error}: fetch it again from where "
                f"{source} has it"
            ) from error
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        return Fetched(tree, f"{wheel.name} sha256:{digest}", _withdrawn(done))

    def install(self, requirements: Sequence[str], folder: Path) -> None:
        """Install the wheels of a folder, in place of other versions of them."""
        command = [*self.command, "install", "--quiet", "--no-deps", "--force-reinstall"]
        _install(command, requirements, folder)


@dataclass(frozen=True)
class Uv:
    """uv, for environments that it made."""

    command: tuple[str, ...]

    def fetch(self, requirement: WheelRequirement, source: WheelSource, folder: Path) -> Fetched:
        """Fetch a wheel into an empty folder and unpack it there."""
        asked, pinned, tree = folder / "asked.txt", folder / "pinned.txt", folder / "tree"
        with temporary.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            asked.write_text(f"{requirement}\n", encoding="utf-8")
        # uv checks the hashes that its input names: those that the index lists, then.
        command = [*self.command, "pip", "compile", str(asked), "--output-file", str(pinned)]
        # Not quiet, for then it does not say what was yanked.
        command += ["--generate-hashes", "--no-header", "--no-annotate", *self._settings(source)]
        environ = _variables(source, folder)
        resolved = _run(command, environ)
        _check_fetched(resolved, requirement, source)
        listed = pinned.read_text(encoding="utf-8")
        hashes = ["--require-hashes"] if "--hash=" in listed else []
        command = [*self.command, "pip", "install", "--quiet", "--target", str(tree)]
        command += ["--link-mode", "copy"]
        command += ["--requirement", str(pinned), *hashes, *self._settings(source)]
        _check_fetched(_run(command, environ), requirement, source)
        digest = listed.partition("--hash=")[2].split("\n")[0].strip(" \\")
        return Fetched(tree, f"{requirement} {digest}".strip(), _withdrawn(resolved))

    def install(self, requirements: Sequence[str], folder: Path) -> None:
        """Install the wheels of a folder, in place of other versions of them."""
        # Its cache would keep the files: they are linked from there.
        command = [*self.command, "pip", "install", "--quiet", "--reinstall", "--no-cache"]
        command += ["--link-mode", "copy", "--no-config", *self._of_every_call()]
        _install(command, requirements, folder)

    def _settings(self, source: WheelSource) -> list[str]:
        only = ["--no-config"] if source.is_named else []
        return [*self._of_every_call(), *only, *_in_folder(source.folder)]

    @staticmethod
    def _of_every_call() -> list[str]:
        return ["--no-deps", "--only-binary", ":all:", "--python", sys.executable]


def _in_folder(folder: Path | None) -> list[str]:
    """Arguments of both installers: no place but a folder, as an address, for uv splits at ","."""
    return [] if folder is None else ["--no-index", "--find-links", folder.as_uri()]


def _install(command: Sequence[str], requirements: Sequence[str], folder: Path) -> None:
    file = folder / "requirements.txt"
    with temporary.writing(folder):
        file.write_text("".join(f"{one}\n" for one in requirements), encoding="utf-8")
    words = [*_in_folder(folder), "--require-hashes", "--requirement", str(file)]
    environ = _variables(WheelSource(folder=folder), folder)
    _check_installed(_run([*command, *words], environ, to_its_end=True))


def _variables(source: WheelSource, folder: Path) -> dict[str, str]:
    """The environment of a call; `folder` also takes what an installer that is killed leaves."""
    return settings.variables(os.environ, source) | {"TMPDIR": str(folder)}


def _run(
    command: Sequence[str], environ: Mapping[str, str], *, to_its_end: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run an installer; with `to_its_end`, an interrupt waits for it: half a change is worse.

    If this process dies meanwhile, the installer may go on, and others wait for it.
    """
    try:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=to_its_end,
            pass_fds=destination.lock_files() if to_its_end else (),
        )
    except OSError as error:
        raise InstallError(
            f"expected to run {command[0]}, found: {error.strerror}: correct its path"
        ) from error
    with process:
        try:
            stdout, stderr = process.communicate()
        except KeyboardInterrupt:
            if to_its_end:
                with contextlib.suppress(OSError):  # the terminal is closed
                    print("waiting for the installer to end", file=sys.stderr, flush=True)
                process.communicate()
            else:
                process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _check_fetched(
    done: subprocess.CompletedProcess[str], requirement: WheelRequirement, source: WheelSource
) -> None:
    if done.returncode == 0:
        return
    if any(words in done.stdout + done.stderr for words in _HASHES):
        raise DamagedWheelError(
            f"{requirement}: expected the file whose hash {source} lists, found other bytes; "
            "nothing was installed: publish the index again, or take another source"
        )
    if any(words in done.stdout + done.stderr for words in _FULL):
        raise InstallError(
            f"{requirement}: expected room to unpack it in {tempfile.gettempdir()}, found: "
            f"{_reason(done)}; nothing was installed: free space, or name another folder in "
            "TMPDIR"
        )
    if any(_TORN.search(line) for line in _lines(done.stderr)):
        raise DamagedWheelError(
            f"{requirement}: expected a whole wheel at {source}, found: {_reason(done)}; nothing "
            "was installed: try again, or take another source"
        )
    raise WheelNotFoundError(
        f"{requirement}: expected a wheel at {source}, found none that can be fetched "
        f"({_reason(done)}); nothing was installed: name another source with --from"
    )


def _check_installed(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode != 0:
        raise InstallError(
            f"expected the installer to succeed, found exit code {done.returncode} "
            f"({_reason(done)}): repair the environment, or make a new one"
        )


def _withdrawn(done: subprocess.CompletedProcess[str]) -> str | None:
    """The reason that an index gives for a file that was yanked (PEP 592); None of others."""
    found = _YANKED.search(done.stdout + "\n" + done.stderr)
    if found is None:
        return None
    reason = found[1] or found[2] or "<none given>"  # pip's own words
    return "".join(filter(str.isprintable, " ".join(reason.split())))


def _lines(text: str) -> Iterator[str]:
    """The lines that are not empty; of a tree, each error and each cause in one line."""
    line, is_drawn = "", False
    for raw in text.splitlines():
        sign = _DRAWN.match(raw)
        if is_drawn and line and sign is None and raw.startswith(_BELOW):
            line += " " + raw.strip(" │")
            continue
        if line:
            yield line
        is_drawn = sign is not None
        line = raw.strip()
        if sign is not None:
            line = ("error: " if sign["error"] else "cause: ") + raw[sign.end() :]
    if line:
        yield line


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """The first error that an installer printed, and its last cause."""
    lines = list(_lines(done.stdout + done.stderr))
    errors = [line for line in lines if line.lower().startswith("error:")]
    causes = [line for line in lines if line.startswith(_CAUSES)]
    if _TRACEBACK in errors:
        errors = lines[-1:]
    chosen = [*errors[:1], *causes[-1:]] or lines[-1:] or ["it printed nothing"]
    return "; ".join(_LABEL.sub("", line).removesuffix(":") for line in chosen)
