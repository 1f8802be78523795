"""Writes a static package index (PEP 503, 592, 691, 714) of the wheels in folders."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from flashvar_factory.errors import PackagingError
from flashvar_factory.index import pages, simple_json, yanks
from flashvar_factory.index.entries import Entry, identity, project_of, read
from flashvar_factory.index.yanks import Yanks
from flashvar_factory.inspect import zip_file

PATTERNS: Final = ("*.whl", "*.tar.gz", "*-variants.json")
PAGE: Final = "index.html"
_METADATA: Final = ".metadata"  # behind the name of a wheel
_HEAD: Final = 4096  # bytes of a page, in which its mark is


def write(
    wheels: Path,
    site: Path,
    *,
    extra: Sequence[Path] = (),
    yanked: Path | None = None,
    whole: bool = True,
) -> list[str]:
    """Make `site` anew from every file of `wheels` and `extra`; the names of the projects.

    `extra` are folders of earlier releases or of wheel variants, `yanked` is a yanked.toml. Files
    are copied. The site is what `pip install --index-url` takes, over HTTP or as a file:// address.
    Beside each page lies the same as JSON, for servers that send its content type. Of an index that
    is `whole`, everything that `yanked` names has to be there.
    """
    files = _files([wheels, *extra])
    if not any(file.suffix == ".whl" for file in files.values()):
        raise PackagingError(f"{wheels}: expected wheels, found none; nox -s wheels -- all")
    site = Path(os.path.realpath(site))  # a link to it stays
    _check_replaceable(site)
    withdrawn = yanks.read(yanked, map(project_of, files)) if yanked is not None else {}
    fresh = site.with_name(f".{site.name}.partial")
    with _claimed(fresh):
        try:
            projects = _copied(files, fresh, withdrawn)
            if yanked is not None and whole:
                yanks.require_used(withdrawn, projects, yanked.name)
            _write_pages(fresh, projects)
            _replace(site, fresh)
        except BaseException:  # an interrupt too
            shutil.rmtree(fresh, ignore_errors=True)
            raise
    return sorted(projects)


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Make an empty folder, which this process alone fills; PackagingError where another does.

    What a process left there that was killed is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    claim = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not folder.exists() or not os.path.samestat(os.fstat(claim), folder.stat()):
            raise BlockingIOError  # it became the index meanwhile
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield
    except BlockingIOError:
        raise PackagingError(
            f"{folder}: expected no other command that writes this index, found one; wait for its "
            "end"
        ) from None
    finally:
        os.close(claim)


def _replace(site: Path, fresh: Path) -> None:
    """Put a new index in the place of an earlier one, which is removed last."""
    earlier = site.with_name(f".{site.name}.earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    try:
        if site.exists():
            site.replace(earlier)
        fresh.replace(site)
    except BaseException:
        if earlier.exists() and not site.exists():
            earlier.replace(site)
        raise
    shutil.rmtree(earlier, ignore_errors=True)


def _copied(files: Mapping[str, Path], site: Path, withdrawn: Yanks) -> dict[str, list[Entry]]:
    """Copy the files into `site`, each with its metadata beside it; the entries by project."""
    projects: dict[str, list[Entry]] = defaultdict(list)
    seen: dict[object, str] = {}
    for name, file in files.items():
        project = project_of(name)
        folder = site / project
        folder.mkdir(parents=True, exist_ok=True)
        content = file.read_bytes()
        (folder / name).write_bytes(content)
        entry = read(file, content)
        same = project, identity(entry)
        if entry.version is not None and (other := seen.setdefault(same, name)) != name:
            raise PackagingError(
                f"{file}: expected one file of its version and tags, found {other} too, and "
                "installers take either; remove one"
            )
        if entry.metadata is not None:
            (folder / f"{name}{_METADATA}").write_bytes(entry.metadata)
        projects[project].append(entry._replace(yanked=yanks.reason(withdrawn, project, entry)))
    return projects


def _files(folders: Sequence[Path]) -> dict[str, Path]:
    """Every file to list, by its name: one file may lie in two folders, two files may not."""
    found: dict[str, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise PackagingError(
                f"{folder}: expected a folder of wheels, found none; nox -s wheels -- all"
            )
        for file in sorted(file for pattern in PATTERNS for file in folder.glob(pattern)):
            if not file.is_file():  # a named pipe would be waited for
                raise PackagingError(f"{file}: expected a regular file, found something else")
            if file.stat().st_size > zip_file.FILE_BYTES:
                raise PackagingError(
                    f"{file}: expected at most {zip_file.FILE_BYTES:,} bytes, found "
                    f"{file.stat().st_size:,}"
                )
            other = found.setdefault(file.name, file)
            if other != file and other.read_bytes() != file.read_bytes():
                raise PackagingError(
                    f"{file}: expected the same bytes as {other}, found others; a version that "
                    "was published once does not change: give the newer one its own version"
                )
    return {name: found[name] for name in sorted(found)}


def _check_replaceable(site: Path) -> None:
    """Refuse to remove anything but an index."""
    if not site.exists() or (site.is_dir() and not any(site.iterdir())):
        return
    page = site / PAGE
    head = b""
    if page.is_file():
        with page.open("rb") as opened:
            head = opened.read(_HEAD)
    if pages.MARK.encode() not in head:
        raise PackagingError(
            f"{site}: expected an index of an earlier run or an empty folder, found something "
            "else, which stays as it is; name another --output"
        )
    for path in sorted(site.iterdir()):
        # Such as the history and the settings of a site that is published from a checkout.
        for other in [path] if path.is_symlink() or not path.is_dir() else sorted(path.iterdir()):
            if not _is_of_index(other.relative_to(site)) or not other.is_file():
                raise PackagingError(
                    f"{site}: expected nothing in it but an index of an earlier run, found "
                    f"{other.relative_to(site)}, which would be removed; write the index into a "
                    "folder of its own, and copy it from there"
                )


def _is_of_index(path: Path) -> bool:
    """Whether an index may have a file of this name."""
    if path.name in (PAGE, simple_json.FILE_NAME):
        return True
    name = Path(path.name.removesuffix(_METADATA))
    return len(path.parts) == 2 and any(map(name.match, PATTERNS))


def _write_pages(site: Path, projects: Mapping[str, Sequence[Entry]]) -> None:
    texts = {PAGE: pages.root(projects), simple_json.FILE_NAME: simple_json.root(projects)}
    for name, entries in projects.items():
        texts[f"{name}/{PAGE}"] = pages.project(name, entries)
        texts[f"{name}/{simple_json.FILE_NAME}"] = simple_json.project(name, entries)
    for file, text in texts.items():
        (site / file).write_text(text, encoding="utf-8")
