"""Identifies the sources: git revision, and a hash of everything that reaches the compiler."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

from flashvar.binaries.manifest import SourceRevision, Toolkit
from flashvar_factory.build import code
from flashvar_factory.config.expand import Build
from flashvar_factory.errors import CheckoutError

CMAKE: Final = "cmake"
# In a copy of a checkout's sources: its revision, whether it differed from that, and their hash.
REVISION_FILE: Final = "source_revision.json"
# By convention of a project: its CMake files, and its C++ and CUDA sources.
CUDA: Final = "src/cuda"
PARTS: Final = ("CMakeLists.txt", CMAKE, CUDA)
_GIT: Final = ".git"
# Among the sources, but none: git's files of a submodule, and what Python compiles there.
NO_SOURCES: Final = frozenset({_GIT, "__pycache__"})
# The checkout that this factory is part of: its CMake files build every project.
HOME: Final = Path(__file__).resolve().parents[4]
# What git sets for a hook, and users for another checkout: with these, git reads that one.
_OF_OTHERS: Final = frozenset(
    {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_NAMESPACE", "GIT_PREFIX"}
)
# What differs from the commit; settings of the user may hide files that are not of it.
_STATUS: Final = ("status", "--porcelain", "--untracked-files=normal", "--ignore-submodules=none")


def gather(root: Path, plan: str) -> SourceRevision:
    """Revision and dirtiness of the checkout at `root`, and the hash of its sources and `plan`."""
    revision, dirty = stated(root)
    return SourceRevision(revision, dirty, digest(root, plan))


def stated(root: Path) -> tuple[str | None, bool | None]:
    """Revision of the checkout at `root`, and whether it differs; None for both without one."""
    return _copied_revision(root) or _git(root)


def identity(build: Build, labeled: str, toolkit: Toolkit, *, lineinfo: bool) -> str:
    """The parts of the plan that affect the binary, without paths."""
    names = [kernel.name for kernel in build.kernels]
    target = build.target
    made_for = [target.architecture.code, target.family, target.shared_memory]
    parts = [labeled, *made_for, build.code_kinds, names]
    coupled = [] if build.torch is None else [build.torch]
    return json.dumps([*parts, vars(toolkit), build.platform, lineinfo, *coupled])


def write_revision(root: Path, output: Path) -> None:
    """Write the revision of the checkout at `root` down for a copy of its sources in `output`."""
    text = json.dumps([*stated(root), _hash(_files(output)).hexdigest()])
    (output / REVISION_FILE).write_text(text, encoding="utf-8")


def _copied_revision(root: Path) -> tuple[str | None, bool | None] | None:
    """What the file says; a copy that was changed differs from the revision too."""
    path = root / REVISION_FILE
    if not path.is_file():
        return None
    try:
        revision, dirty, copied = json.loads(path.read_bytes())
    except (ValueError, TypeError) as error:
        raise CheckoutError(
            f"{path}: expected what the command project wrote, found: {error}; write it again"
        ) from None
    changed = _hash(_files(root)).hexdigest() != copied
    return revision, None if dirty is None else dirty or changed


def committed(root: Path) -> int | None:
    """When the revision was committed, in seconds since 1970; None outside a checkout."""
    revision, _ = _git(root)
    if revision is None:
        return None
    return int(run(root, "show", "-s", "--no-show-signature", "--format=%ct", revision))


def changes(root: Path) -> list[str]:
    """What differs from the revision, a line of `git status --short` each."""
    return run(root, *_STATUS).splitlines()


def tagged(root: Path, tag: str) -> str | None:
    """The commit that a tag of the checkout at `root` is on; None where there is no such tag."""
    return _commit(root, f"refs/tags/{tag}")


def touched(root: Path, revision: str, names: Sequence[str]) -> list[str] | None:
    """The files in `names` that differ between a commit and HEAD; None for an unknown commit."""
    commit = _commit(root, revision)
    if commit is None:
        return None
    listing = run(root, "diff", "--name-only", "--no-renames", "-z", commit, "HEAD", "--", *names)
    return [name for name in listing.split("\0") if name]


def has_other_code(root: Path, revision: str, name: str) -> bool:
    """Whether the code of a file differs between a commit and HEAD, or the file is in one alone."""
    one, other = (_content(root, commit, name) for commit in (revision, "HEAD"))
    return one is None or other is None or not code.is_same(name, one, other)


def files(root: Path, revision: str, *parts: str) -> list[str]:
    """The files of a commit in `parts`; none of an unknown one."""
    commit = _commit(root, revision)
    if commit is None:
        return []
    words = ("--name-only", "-z", commit, "--", *parts)
    return [name for name in run(root, "ls-tree", "-r", *words).split("\0") if name]


def lines(root: Path, pattern: str, parts: Sequence[str]) -> list[tuple[str, str]]:
    """The lines at HEAD that match an extended regular expression, each behind its file's name."""
    words = ["-E", "-z", "--text", "--full-name", "--no-color", "--no-line-number", "--no-column"]
    done = _ask(root, "grep", *words, "-e", pattern, "HEAD", "--", *parts)
    if done.returncode > 1:  # 1: no line matches
        raise _failed(root, "grep", done)
    rows = (line.partition("\0") for line in _text(done).split("\n") if line)
    return [(name.removeprefix("HEAD:"), line) for name, _, line in rows]


def _content(root: Path, commit: str, name: str) -> bytes | None:
    """The content of a file in a commit; None where git has none."""
    done = _ask(root, "cat-file", "blob", f"{commit}:{name}")
    return None if done.returncode else done.stdout


def _commit(root: Path, name: str) -> str | None:
    words = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    try:
        done = _ask(root, *words)
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return None
    return None if done.returncode else _text(done).strip()


def listed(root: Path) -> frozenset[str] | None:
    """The files of the checkout at `root`, by their names there; None outside a checkout.

    Those of submodules are among them.
    """
    if committed(root) is None:
        return None
    found: set[str] = set()
    for name in names(root):
        path = root / name
        if is_checkout(path):
            found |= {f"{name}/{inner}" for inner in listed(path) or ()}
        elif path.is_file():
            found.add(name)
    return frozenset(found)


def names(root: Path) -> list[str]:
    """What git lists of the checkout at `root`: files, links, and folders of submodules."""
    listing = run(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return sorted({name.rstrip("/") for name in listing.split("\0")} - {""})


def is_checkout(folder: Path) -> bool:
    """Whether a folder is a checkout of its own: a submodule has a file there."""
    return (folder / _GIT).exists() and not folder.is_symlink()


@functools.cache
def factory() -> str:
    """The hash of this factory's modules, on which the outcome of every step depends."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        content = path.read_bytes()
        digest.update(b"%s\0%d\0" % (path.name.encode(), len(content)) + content)
    return digest.hexdigest()


def digest(root: Path, plan: str) -> str:
    """The hash of the sources at `root` and `plan`.

    Those of the factory count once, be it installed or part of the checkout.
    """
    found = _hash(compiled(root))
    found.update(plan.encode())
    return found.hexdigest()


def compiled(root: Path) -> Iterator[tuple[str, Path]]:
    """Each source of the project at `root` and of the factory, after its name there."""
    return chain(_files(root), () if root == HOME else _files(HOME, (CMAKE,)))


def _hash(files: Iterable[tuple[str, Path]]) -> hashlib._Hash:
    """The hash of files and their names, without those that are there twice."""
    contents: dict[bytes, None] = {}
    for name, path in files:
        content = path.read_bytes()
        contents[b"%s\0%d\0" % (name.encode(), len(content)) + content] = None
    found = hashlib.sha256()
    for one in contents:
        found.update(one)
    return found


def _files(top: Path, parts: Iterable[str] = PARTS) -> Iterator[tuple[str, Path]]:
    """Each file below a folder, after its name there."""
    for part in parts:
        path = top / part
        for file in [path, *sorted(path.rglob("*"))]:
            if file.is_file() and NO_SOURCES.isdisjoint(file.parts[len(top.parts) :]):
                yield file.relative_to(top).as_posix(), file


def _git(root: Path) -> tuple[str | None, bool | None]:
    """Commit and whether the tree differs from it; None for both outside a checkout of its own."""
    try:
        done = _ask(root, "rev-parse", "--show-toplevel", "HEAD")
    except OSError:
        return None, None
    top, _, revision = _text(done).strip().rpartition("\n")
    if done.returncode or Path(top).resolve() != root.resolve():
        return None, None
    return revision, bool(run(root, *_STATUS))


def run(root: Path, *arguments: str) -> str:
    """What a command of git prints on the checkout at `root`; CheckoutError where it fails."""
    done = _ask(root, *arguments)
    if done.returncode:
        raise _failed(root, arguments[0], done)
    return _text(done)


def _failed(root: Path, command: str, done: subprocess.CompletedProcess[bytes]) -> CheckoutError:
    return CheckoutError(
        f"{root}: expected `git {command}` to succeed, found `{_said(done)}`; repair the checkout"
    )


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    """What git said first."""
    return done.stderr.decode(errors="replace").strip().partition("\n")[0]


def _text(done: subprocess.CompletedProcess[bytes]) -> str:
    """What git printed, names decoded as Python decodes those of files."""
    return os.fsdecode(done.stdout)


def _ask(root: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Call git; CheckoutError where it cannot read the checkout that is at `root`."""
    git = ["git", "-C", str(root)]
    is_checkout = (root / ".git").exists()
    try:
        done = _call([*git, *arguments])
        if done.returncode == 0 or not is_checkout:
            return done
        refused = _call([*git, "rev-parse", "--git-dir"])
    except FileNotFoundError:
        if not is_checkout:
            raise
        raise CheckoutError(
            f"{root}: expected git for this checkout, found none; install it, or copy the files "
            "without .git to build them without a revision"
        ) from None
    if refused.returncode == 0:
        return done
    raise CheckoutError(
        f"{root}: expected a checkout that git reads, found `{_said(refused)}`; repair it, or, "
        "where it belongs to another user whom you trust: git config --global --add "
        f"safe.directory {root}"
    )


def _call(command: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    """Run a command of git on the checkout that it names, whatever the environment names."""
    environment = {key: value for key, value in os.environ.items() if key not in _OF_OTHERS}
    return subprocess.run(command, capture_output=True, env=environment)
