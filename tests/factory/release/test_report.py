"""The report says what is released: the same as data, as text and as a page."""

from __future__ import annotations

import hashlib
import json
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import fakes
import pytest

from flashvar_factory.config import schema
from flashvar_factory.config.expand import expand, select_all
from flashvar_factory.config.selection_arguments import parse
from flashvar_factory.errors import ReleaseError
from flashvar_factory.release import members, page, publish, report
from flashvar_factory.release.pipeline import Release
from flashvar_factory.release.steps import Outcome
from flashvar_factory.toolchain.nvcc import Toolchain

ROOT = Path(__file__).parents[3]
CONFIG = schema.read(ROOT / "variants.toml")
NVCC = Toolchain(Path("/cuda/bin/nvcc"), "13.0.88", None, "PATH")
WHEEL = "flashvar_sm80-1.0-py3-none-manylinux_2_28_x86_64.whl"
SUMMARY = "no PTX <here> & sm_80 alone"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "wheels" / WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("flashvar_sm80/manifest.json", fakes.manifest("80").to_json())
    return path


def found(wheel: Path, words: str = "platform=x86_64") -> dict[str, Any]:
    builds = expand(CONFIG, select_all(parse(words.split(), CONFIG), CONFIG))
    release = Release(
        CONFIG,
        ROOT,
        wheel.parent.parent,
        "1.0",
        "c0ffee",
        tuple((build, NVCC) for build in builds),
        members.expected(CONFIG, builds, ROOT),
        {"x86_64": ()},
    )
    done = {
        "wheels/flashvar-sm80": Outcome("built", (wheel,)),
        "audit/flashvar-sm80": Outcome(SUMMARY, facts={"file": WHEEL, "sizes": {"sm_80": 7}}),
        "index/pages": Outcome("1 project"),
    }
    return report.document(release, done)


def test_document(wheel: Path) -> None:
    document = found(wheel)
    (file,) = document["files"]
    assert json.loads(json.dumps(document)) == document
    assert file["sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert (file["bytes"], file["kind"]) == (wheel.stat().st_size, "sm_80")
    assert file["results"] == {"audit": SUMMARY}
    assert file["kernels"] == [row.name for row in fakes.manifest("80").kernels]
    assert [step["name"] for step in document["steps"]][-1] == "index/pages"


def test_same_release_same_document(wheel: Path) -> None:
    assert found(wheel) == found(wheel)


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ("platform=x86_64", ["wheel of sm_90 for aarch64"]),
        ("sm90 platform=aarch64 hdim=64", ["wheel of sm_80 for", "other kernels of flashvar-sm90"]),
    ],
)
def test_what_was_not_asked_for_is_said(words: str, missing: list[str], wheel: Path) -> None:
    document = found(wheel, words)
    assert all(any(line.startswith(one) for line in document["missing"]) for one in missing)
    assert missing[0] in report.text(document).splitlines()[-1]
    assert missing[-1] in page.html(document)


def test_a_whole_release_says_so(wheel: Path) -> None:
    document = {**found(wheel), "missing": []}
    assert report.text(document).endswith("Every file of variants.toml is here and checked.\n")


def test_text_has_a_line_per_file_and_step(wheel: Path) -> None:
    document = found(wheel)
    lines = report.text(document).splitlines()
    (row,) = (line for line in lines if line.split()[1:2] == ["sm_80"])
    assert f"audit: {SUMMARY}" in row
    assert f"{document['files'][0]['sha256']}  {WHEEL}" in lines
    assert "index/pages: 1 project" in lines


class Texts(HTMLParser):
    """Every text of a page, and what was opened and not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href"}]
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_page_is_whole_and_needs_nothing_else(wheel: Path) -> None:
    document = found(wheel)
    parsed = Texts()
    parsed.feed(page.html(document))
    assert parsed.open == []
    assert parsed.addresses == []
    text = " ".join(parsed.texts)
    for word in (WHEEL, document["files"][0]["sha256"], f"audit: {SUMMARY}", "sm_80 (sass)"):
        assert word in text


def test_published_are_the_files_and_the_reports(wheel: Path, tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    reports = publish.publish(dist, [wheel], found(wheel))
    assert sorted(path.name for path in dist.iterdir()) == sorted([WHEEL, *publish.REPORTS])
    assert (dist / WHEEL).read_bytes() == wheel.read_bytes()
    assert [path.suffix for path in reports] == [".txt", ".json", ".html"]
    assert json.loads(reports[1].read_text(encoding="utf-8")) == found(wheel)


def test_other_bytes_than_were_proved_are_not_published(wheel: Path, tmp_path: Path) -> None:
    checked = found(wheel)
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(ReleaseError, match="as it was checked, found"):
        publish.publish(tmp_path / "dist", [wheel], checked)
    assert not list((tmp_path / "dist").iterdir())
