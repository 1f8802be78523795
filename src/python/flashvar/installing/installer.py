"""The installers: pip, or uv where the environment has no pip.

Each fetches a wheel into a folder of its own, unpacked, so that it is judged before the environment
changes, and then installs the bytes that were judged.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from flashvar.errors import InstallError, IntegrityError, SourceError
from flashvar.installing import repacked
from flashvar.installing.offers import Offer
from flashvar.installing.source import Source

# Settings that would let another place than the named one answer, or move what is installed.
_PLACES: Final = (
    *("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS", "NO_INDEX", "INDEX", "DEFAULT_INDEX"),
    *("TARGET", "PREFIX", "ROOT", "USER", "PYTHON", "DRY_RUN", "REQUIRE_HASHES", "NO_BINARY"),
    *("CONFIG_FILE", "CONSTRAINT", "REQUIREMENT", "PROJECT", "PLATFORM"),
)
# How pip and uv begin when a file has another hash than its source lists.
_HASHES: Final = ("DO NOT MATCH THE HASHES", "Hash mismatch")


@dataclass(frozen=True)
class Fetched:
    """A wheel that was unpacked, and what the installer is given to install it."""

    tree: Path
    file: str  # its name and hash for people
    arguments: tuple[str, ...]


class Installer(Protocol):
    """What installs into the environment of this process."""

    def fetch(self, offer: Offer, source: Source, folder: Path) -> Fetched:
        """Fetch a wheel into an empty folder and unpack it there; its source's hash is checked.

        Raises:
            SourceError: the source does not have it.
            IntegrityError: it has another hash.
        """
        ...

    def install(self, fetched: Sequence[Fetched], source: Source) -> None:
        """Install fetched wheels, in place of other versions of them.

        Raises:
            InstallError: the installer gave up.
        """
        ...


def find(environ: Mapping[str, str]) -> Installer:
    """Pip if this Python has one that works, else uv.

    Raises:
        InstallError: there is neither, or the system manages this Python.
    """
    site = Path(sysconfig.get_path("purelib"))
    marker = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    allowed = any(environ.get(f"{tool}_BREAK_SYSTEM_PACKAGES") for tool in ("PIP", "UV"))
    if sys.prefix == sys.base_prefix and marker.exists() and not allowed:
        raise InstallError(
            f"expected an environment of your own, found {sys.prefix}, which the system manages: "
            "make one with `python -m venv`, and install flashvar there; in an image, set "
            "PIP_BREAK_SYSTEM_PACKAGES=1"
        )
    if not site.is_dir() or not os.access(site, os.W_OK | os.X_OK):
        raise InstallError(
            f"expected to write into {site}, found "
            f"{'no permission' if site.is_dir() else 'no such folder'}: complete the environment, "
            "or make a new one"
        )
    if _has_pip():
        return Pip((sys.executable, "-m", "pip"))
    scripts = sysconfig.get_path("scripts")
    uv = environ.get("UV") or shutil.which("uv", path=f"{scripts}:{environ.get('PATH', '')}")
    if uv:
        return Uv((uv,))
    raise InstallError(
        f"expected pip in {sys.prefix} or uv on PATH, found neither working: "
        "`python -m ensurepip` adds pip"
    )


def _has_pip() -> bool:
    """Whether pip is there as far as its command, which a half-removed one is not."""
    try:
        return importlib.util.find_spec("pip._internal.cli.main") is not None
    except ImportError:
        return False


@dataclass(frozen=True)
class Pip:
    """The pip of this Python."""

    command: tuple[str, ...]

    def fetch(self, offer: Offer, source: Source, folder: Path) -> Fetched:
        """Fetch a wheel into an empty folder and unpack it there."""
        wheels = folder / "wheels"
        command = [*self.command, "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--dest", str(wheels), *self._places(source), str(offer)]
        done = _run(command, _environment(source, {"PIP_CONFIG_FILE": os.devnull}))
        _check_fetched(done, offer, source)
        (wheel,) = wheels.glob("*.whl")
        tree = folder / "tree"
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(tree)
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            raise IntegrityError(
                f"{wheel.name}: expected a whole wheel, found {error}: fetch it again from where "
                f"{source} has it"
            ) from error
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        return Fetched(tree, f"{wheel.name} sha256:{digest}", (str(wheel),))

    def install(self, fetched: Sequence[Fetched], source: Source) -> None:
        """Install fetched wheels, in place of other versions of them."""
        command = [*self.command, "install", "--quiet", "--no-deps", "--force-reinstall"]
        command += ["--no-index", *(word for one in fetched for word in one.arguments)]
        _check_installed(_run(command, _environment(source, {"PIP_CONFIG_FILE": os.devnull})))

    @staticmethod
    def _places(source: Source) -> list[str]:
        if source.folder is not None:
            return ["--no-index", "--find-links", str(source.folder)]
        return [] if source.index is None else ["--index-url", source.index]


@dataclass(frozen=True)
class Uv:
    """uv, for environments that it made."""

    command: tuple[str, ...]

    def fetch(self, offer: Offer, source: Source, folder: Path) -> Fetched:
        """Fetch a wheel into an empty folder and unpack it there."""
        folder.mkdir(parents=True, exist_ok=True)
        asked, pinned, tree = folder / "asked.txt", folder / "pinned.txt", folder / "tree"
        asked.write_text(f"{offer}\n", encoding="utf-8")
        # uv checks the hashes that its input names: those that the index lists, then.
        command = [*self.command, "pip", "compile", str(asked), "--output-file", str(pinned)]
        command += ["--generate-hashes", "--no-header", "--no-annotate"]
        command += [*self._settings(source), *self._places(source)]
        environ = _environment(source)
        _check_fetched(_run(command, environ), offer, source)
        listed = pinned.read_text(encoding="utf-8")
        hashes = ["--require-hashes"] if "--hash=" in listed else []
        arguments = ("--requirement", str(pinned), *hashes)
        command = [*self.command, "pip", "install", "--target", str(tree), *arguments]
        command += [*self._settings(source), *self._places(source)]
        _check_fetched(_run(command, environ), offer, source)
        digest = listed.partition("--hash=")[2].split("\n")[0].strip(" \\")
        # uv leaves no file: what is judged is packed again, so that nothing is fetched twice.
        wheel = repacked.write(tree, folder)
        return Fetched(tree, f"{offer} {digest}".strip(), (str(wheel),))

    def install(self, fetched: Sequence[Fetched], source: Source) -> None:
        """Install fetched wheels, in place of other versions of them."""
        command = [*self.command, "pip", "install", "--reinstall", "--no-index"]
        command += [*self._settings(source), *(word for one in fetched for word in one.arguments)]
        _check_installed(_run(command, _environment(source)))

    @staticmethod
    def _settings(source: Source) -> list[str]:
        settings = ["--quiet", "--no-deps", "--only-binary", ":all:", "--python", sys.executable]
        return [*settings, "--no-config"] if source.is_named else settings

    @staticmethod
    def _places(source: Source) -> list[str]:
        if source.folder is not None:
            return ["--no-index", "--find-links", str(source.folder)]
        return [] if source.index is None else ["--default-index", source.index]


def _environment(source: Source, further: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of this process; for a named source without those that name other places."""
    if not source.is_named:
        return dict(os.environ)
    others = {f"{tool}_{place}" for tool in ("PIP", "UV") for place in _PLACES}
    kept = {key: value for key, value in os.environ.items() if key not in others}
    return {**kept, **(further or {})}


def _run(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            env={**environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise InstallError(
            f"expected to run {command[0]}, found: {error.strerror}: correct its path"
        ) from error


def _check_fetched(done: subprocess.CompletedProcess[str], offer: Offer, source: Source) -> None:
    if done.returncode == 0:
        return
    if any(words in done.stdout + done.stderr for words in _HASHES):
        raise IntegrityError(
            f"{offer}: expected the file whose hash {source} lists, found other bytes; nothing was "
            "installed: publish the index again, or take another source"
        )
    raise SourceError(
        f"{offer}: expected a wheel of it at {source}, found none that can be fetched "
        f"({_last_words(done)}); nothing was installed: name another source with --from"
    )


def _check_installed(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode != 0:
        raise InstallError(
            f"expected the installer to succeed, found exit code {done.returncode} "
            f"({_last_words(done)}): repair the environment, or make a new one"
        )


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    """The first error that an installer printed, and its last cause."""
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error:")]
    causes = [line for line in lines if line.startswith(("cause:", "Caused by:"))]
    chosen = [*errors[:1], *causes[-1:]] or lines[-1:] or ["it printed nothing"]
    return "; ".join(line.partition(":")[2].strip() or line for line in chosen)
