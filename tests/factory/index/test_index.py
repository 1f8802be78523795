"""The static index: pages that pip reads, from wheels that exist."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import fake_wheels
import pytest
from bounded import bounded

from flashvar_factory import index
from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import variant_metadata


class Anchors(HTMLParser):
    """Every anchor's attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.found and not self.found[-1][1]:
            self.found[-1] = (self.found[-1][0], data)


def anchors(page: Path) -> list[tuple[dict[str, str | None], str]]:
    parser = Anchors()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser.found


def metadata_hash(folder: Path, wheel: Path) -> str:
    """The hash of what is served beside a wheel, which is what is in it."""
    served = (folder / f"{wheel.name}.metadata").read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        assert archive.read(name) == served
    return hashlib.sha256(served).hexdigest()


def test_pages(tmp_path: Path) -> None:
    path = fake_wheels.bare(tmp_path / "dist", "flashvar_sm89", "1.0+hdim64", ">=3.10,<4")
    fake_wheels.bare(tmp_path / "dist", "flashvar", "1.0", None)
    assert index.write(tmp_path / "dist", tmp_path / "site") == ["flashvar", "flashvar-sm89"]
    assert [(a["href"], text) for a, text in anchors(tmp_path / "site" / "index.html")] == [
        ("flashvar/", "flashvar"),
        ("flashvar-sm89/", "flashvar-sm89"),
    ]
    page = tmp_path / "site" / "flashvar-sm89" / "index.html"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    address = f"flashvar_sm89-1.0%2Bhdim64-py3-none-any.whl#sha256={digest}"
    attributes = {
        "href": address,
        "data-requires-python": ">=3.10,<4",
        "data-core-metadata": f"sha256={metadata_hash(page.parent, path)}",
    }
    assert anchors(page) == [(attributes, path.name)]
    assert "data-requires-python=&quot;" not in page.read_text(encoding="utf-8")
    assert "&gt;=3.10,&lt;4" in page.read_text(encoding="utf-8")
    assert (page.parent / path.name).read_bytes() == path.read_bytes()


def test_several_versions_side_by_side(tmp_path: Path) -> None:
    for version in ("1.0", "1.1"):
        fake_wheels.bare(tmp_path / "dist", "flashvar", version)
    index.write(tmp_path / "dist", tmp_path / "site")
    texts = [text for _, text in anchors(tmp_path / "site" / "flashvar" / "index.html")]
    assert texts == ["flashvar-1.0-py3-none-any.whl", "flashvar-1.1-py3-none-any.whl"]


def test_the_same_as_json(tmp_path: Path) -> None:
    path = fake_wheels.bare(tmp_path / "dist", "flashvar_sm89", "1.0")
    fake_wheels.bare(tmp_path / "dist", "flashvar_sm89", "1.1", None)
    index.write(tmp_path / "dist", tmp_path / "site")
    root = json.loads((tmp_path / "site" / "index.v1.json").read_text(encoding="utf-8"))
    assert root == {"meta": {"api-version": "1.1"}, "projects": [{"name": "flashvar-sm89"}]}
    folder = tmp_path / "site" / "flashvar-sm89"
    project = json.loads((folder / "index.v1.json").read_text(encoding="utf-8"))
    assert project["name"] == "flashvar-sm89"
    assert project["versions"] == ["1.0", "1.1"]
    first, second = project["files"]
    assert first == {
        "filename": path.name,
        "url": path.name,
        "hashes": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
        "size": path.stat().st_size,
        "requires-python": ">=3.10",
        "core-metadata": {"sha256": metadata_hash(folder, path)},
    }
    assert "requires-python" not in second


def test_earlier_releases_and_variants_lie_beside(tmp_path: Path) -> None:
    fake_wheels.bare(tmp_path / "new", "flashvar", "1.1")
    old = fake_wheels.bare(tmp_path / "old", "flashvar", "1.0")
    fake_wheels.bare(tmp_path / "new", "flashvar", "1.0").write_bytes(
        old.read_bytes()
    )  # the same once more
    listed_variants = variant_metadata.document({"null": {}})
    (tmp_path / "old" / "flashvar-1.0-variants.json").write_text(listed_variants, encoding="utf-8")
    with tarfile.open(tmp_path / "new" / "flashvar-1.1.tar.gz", "w:gz") as archive:
        text = b"Metadata-Version: 2.1\nName: flashvar\nVersion: 1.1\nRequires-Python: >=3.10\n"
        member = tarfile.TarInfo("flashvar-1.1/PKG-INFO")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    index.write(tmp_path / "new", tmp_path / "site", extra=[tmp_path / "old"])
    listed = {text: found for found, text in anchors(tmp_path / "site" / "flashvar" / "index.html")}
    assert list(listed) == [
        "flashvar-1.0-py3-none-any.whl",
        "flashvar-1.0-variants.json",
        "flashvar-1.1-py3-none-any.whl",
        "flashvar-1.1.tar.gz",
    ]
    assert set(listed["flashvar-1.0-variants.json"]) == {"href"}
    assert set(listed["flashvar-1.1.tar.gz"]) == {"href", "data-requires-python"}


def test_what_is_gone_is_not_listed(tmp_path: Path) -> None:
    old = fake_wheels.bare(tmp_path / "dist", "flashvar", "1.0")
    index.write(tmp_path / "dist", tmp_path / "site")
    old.unlink()
    fake_wheels.bare(tmp_path / "dist", "flashvar_sm89", "1.1")
    assert index.write(tmp_path / "dist", tmp_path / "site") == ["flashvar-sm89"]
    assert not (tmp_path / "site" / "flashvar").exists()


def test_a_published_file_does_not_change(tmp_path: Path) -> None:
    fake_wheels.bare(tmp_path / "old", "flashvar", "1.0", ">=3.9")
    fake_wheels.bare(tmp_path / "new", "flashvar", "1.0")
    with pytest.raises(PackagingError, match="a version that was published once does not change"):
        index.write(tmp_path / "new", tmp_path / "site", extra=[tmp_path / "old"])


def test_nothing_but_an_index_is_replaced(tmp_path: Path) -> None:
    fake_wheels.bare(tmp_path / "dist", "flashvar", "1.0")
    with pytest.raises(PackagingError, match="which stays as it is"):
        index.write(tmp_path / "dist", tmp_path / "dist")
    assert len(list((tmp_path / "dist").iterdir())) == 1


@pytest.mark.parametrize("name", [".git/HEAD", "CNAME", "flashvar/notes.txt", "docs/a/index.html"])
def test_an_index_that_holds_other_files(name: str, tmp_path: Path) -> None:
    """As a checkout that a site is published from, which has its history in it."""
    fake_wheels.bare(tmp_path / "dist", "flashvar", "1.0")
    index.write(tmp_path / "dist", tmp_path / "site")
    file = tmp_path / "site" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("x", encoding="utf-8")
    with pytest.raises(PackagingError, match=r"found .*, which would be removed"):
        index.write(tmp_path / "dist", tmp_path / "site")
    assert file.is_file()


def test_an_index_that_is_removed_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier index is removed behind the new one: an interrupt leaves one of them whole."""
    fake_wheels.bare(tmp_path / "dist", "flashvar", "1.0")
    index.write(tmp_path / "dist", tmp_path / "site")
    fake_wheels.bare(tmp_path / "dist", "flashvar", "1.1")
    remove = shutil.rmtree

    def interrupted(path: Path, **options: bool) -> None:
        if (path / index.PAGE).is_file():
            (path / index.PAGE).unlink()
            raise KeyboardInterrupt
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        index.write(tmp_path / "dist", tmp_path / "site")
    monkeypatch.undo()
    assert len(anchors(tmp_path / "site" / "flashvar" / index.PAGE)) == 2
    index.write(tmp_path / "dist", tmp_path / "site")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dist", "site"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    fake_wheels.bare(tmp_path / "dist", "flashvar", "1.0")
    with pytest.raises(PackagingError, match="expected a folder of wheels, found none"):
        index.write(tmp_path / "dist", tmp_path / "site", extra=[tmp_path / "nowhere"])


@pytest.mark.parametrize("name", ["flashvar_sm89-1.0", "flashvar-1.1", "flashvar-1.0.1"])
def test_metadata_agrees_with_the_name(name: str, tmp_path: Path) -> None:
    path = fake_wheels.bare(tmp_path / "dist", "flashvar", "1.0")
    path.rename(path.with_name(f"{name}-py3-none-any.whl"))
    with pytest.raises(PackagingError, match=r"expected the metadata to agree.* flashvar 1\.0"):
        index.write(tmp_path / "dist", tmp_path / "site")


def test_no_wheels(tmp_path: Path) -> None:
    with pytest.raises(PackagingError, match="expected wheels, found none"):
        index.write(tmp_path, tmp_path / "site")


def test_a_name_that_no_installer_takes(tmp_path: Path) -> None:
    path = fake_wheels.bare(tmp_path / "dist", "flashvar", "1.0")
    path.rename(path.with_name("flashvar-1.0-evil.whl"))
    with pytest.raises(PackagingError, match="expected the file name of a wheel"):
        index.write(tmp_path / "dist", tmp_path / "site")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("flashvar-1.0-variants.json", b"no JSON", "expected JSON"),
        ("flashvar-1.0-variants.json", b"[" * 100_000, "expected JSON"),
        ("flashvar-1.0-variants.json", b"[]", "expected a list of variants"),
        ("flashvar-1.0-variants.json", b"{}", "expected a list of variants"),
        ("flashvar-1.0-variants.json", b" " * 2_000_000, "expected at most 1,048,576 bytes"),
        ("a b-variants.json", b"{}", "expected the name <project>-<version>-variants.json"),
    ],
)
def test_a_list_of_variants_that_is_none(
    name: str, content: bytes, words: str, tmp_path: Path
) -> None:
    fake_wheels.bare(tmp_path / "dist", "flashvar", "1.0")
    (tmp_path / "dist" / name).write_bytes(content)
    with pytest.raises(PackagingError, match=words):
        index.write(tmp_path / "dist", tmp_path / "site")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "flashvar-1.0-py3-none-any.whl")
    with pytest.raises(PackagingError, match="expected a regular file, found something else"):
        index.write(tmp_path, tmp_path / "site")


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    fake_wheels.plain(tmp_path)
    with (tmp_path / "flashvar-9.0-py3-none-any.whl").open("wb") as opened:
        opened.truncate(1 << 34)
    with pytest.raises(PackagingError, match="expected at most 1,073,741,824 bytes, found 17,"):
        index.write(tmp_path, tmp_path / "site")


def test_not_a_wheel(tmp_path: Path) -> None:
    (tmp_path / "flashvar-1.0-py3-none-any.whl").write_bytes(b"PK broken")
    with pytest.raises(PackagingError, match="expected a whole zip archive") as refused:
        index.write(tmp_path, tmp_path / "site")
    assert str(refused.value).count(str(tmp_path)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["flashvar-1.0-py3-none-any.whl"]


def test_a_link_to_an_index_stays(tmp_path: Path) -> None:
    wheels = fake_wheels.plain(tmp_path / "dist").parent
    (tmp_path / "site").symlink_to(tmp_path / "published")
    for _ in range(2):
        index.write(wheels, tmp_path / "site")
    assert (tmp_path / "site").is_symlink()
    assert (tmp_path / "published" / index.PAGE).is_file()


def sdist(folder: Path, stem: str) -> None:
    """An sdist of flashvar 1.0, whose file and folder are called so."""
    text = b"Metadata-Version: 2.1\nName: flashvar\nVersion: 1.0\n"
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / f"{stem}.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo(f"{stem}/PKG-INFO")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))


@pytest.mark.parametrize(
    ("name", "version"),
    [("Flashvar_sm80", "1.0"), ("flashvar.sm80", "1.0"), ("flashvar_sm80", "1.0.0")],
)
def test_two_files_that_installers_take_for_one(name: str, version: str, tmp_path: Path) -> None:
    fake_wheels.bare(tmp_path / "dist", "flashvar_sm80", "1.0")
    fake_wheels.bare(tmp_path / "dist", name, version)
    with pytest.raises(PackagingError, match=r"one file of its version and tags, found .*-1\.0"):
        index.write(tmp_path / "dist", tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_two_sdists_that_installers_take_for_one(tmp_path: Path) -> None:
    fake_wheels.bare(tmp_path / "dist", "flashvar", "1.0")
    sdist(tmp_path / "dist", "flashvar-1.0")
    index.write(tmp_path / "dist", tmp_path / "site")
    sdist(tmp_path / "dist", "Flashvar-1.0")
    with pytest.raises(PackagingError, match="one file of its version and tags"):
        index.write(tmp_path / "dist", tmp_path / "site")


@pytest.mark.parametrize("stem", ["flashvar-1.0-more", "flashvar-1.0-\udcff"], ids=ascii)
def test_an_sdist_with_more_in_its_name(stem: str, tmp_path: Path) -> None:
    fake_wheels.bare(tmp_path / "dist", "flashvar", "1.0")
    sdist(tmp_path / "dist", stem)
    with pytest.raises(PackagingError, match=r"the metadata to agree|of no regular file"):
        index.write(tmp_path / "dist", tmp_path / "site")


@pytest.mark.parametrize("sign", ["\x1b", "\0", "\x0b", "\x85", "\u202e"], ids=ascii)
def test_metadata_with_control_characters(sign: str, tmp_path: Path) -> None:
    fake_wheels.bare(tmp_path / "dist", "flashvar", "1.0", f">=3.10\nSummary: a{sign}b")
    with pytest.raises(PackagingError, match="expected text without control characters"):
        index.write(tmp_path / "dist", tmp_path / "site")


def test_a_page_that_is_too_large_for_memory(tmp_path: Path) -> None:
    fake_wheels.bare(tmp_path / "dist", "flashvar", "1.0")
    (tmp_path / "site").mkdir()
    with (tmp_path / "site" / "index.html").open("wb") as opened:
        opened.truncate(1 << 36)
    with bounded(), pytest.raises(PackagingError, match="which stays as it is"):
        index.write(tmp_path / "dist", tmp_path / "site")
