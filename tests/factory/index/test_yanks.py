"""yanked.toml: what is withdrawn stays listed, with its reason."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

import fake_wheels
import pytest
from fakes import manifest

from flashvar.errors import ConfigurationError
from flashvar_factory import index
from flashvar_factory.cli import main
from flashvar_factory.release import variants

WHEEL = "flashvar-0.1.0-py3-none-any.whl"


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    folder = tmp_path / "dist"
    fake_wheels.plain(folder, "0.1.0")
    fake_wheels.binary(folder, manifest("90a"))
    variants.write(folder, tmp_path / "variants", "flashvar")
    shutil.copy(tmp_path / "variants" / "flashvar-0.1.0-variants.json", folder)
    fake_wheels.plain(folder, "0.2.0")
    return folder


def yanked(dist: Path, text: str) -> dict[str, str]:
    """File -> reason, the same in both forms of the index."""
    file = dist.parent / "yanked.toml"
    file.write_text(text, encoding="utf-8")
    site = dist.parent / "site"
    index.write(dist, site, yanked=file)
    in_html, in_json = {}, {}
    for folder in (path for path in site.iterdir() if path.is_dir()):
        page = (folder / "index.html").read_text(encoding="utf-8")
        for reason, name in re.findall(r'data-yanked="([^"]*)">([^<]*)</a>', page):
            in_html[name] = html.unescape(reason)
        document = json.loads((folder / "index.v1.json").read_text(encoding="utf-8"))
        for row in document["files"]:
            if "yanked" in row:
                in_json[row["filename"]] = row["yanked"]
    assert in_html == in_json
    return in_html


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ('[flashvar]\n"0.1.0" = "wrong \\"scale\\" < 1"', {WHEEL: 'wrong "scale" < 1'}),
        (f'[flashvar]\n"{WHEEL}" = "cut off"', {WHEEL: "cut off"}),
        (
            '[Flashvar_SM90]\n"0.1.0" = "hangs"',
            {f"flashvar_sm90-0.1.0-py3-none-{fake_wheels.PLATFORM}.whl": "hangs"},
        ),
    ],
    ids=["nothing", "version", "file", "spelling"],
)
def test_yanked(text: str, expected: dict[str, str], dist: Path) -> None:
    assert yanked(dist, text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[flashvar-sm9]\n"0.1.0" = "x"', "unknown project .*did you mean 'flashvar-sm90'"),
        ('[flashvar]\n"0.1.0" = ""', r"yanked\.toml: flashvar\.0\.1\.0: expected a reason"),
        ('[flashvar]\n"0.1.0" = true', "expected a reason, found True"),
        ('flashvar = "0.1.0"', "expected a table"),
        ("[flashvar", "expected TOML"),
        (
            '[flashvar]\n"0.3.0" = "x"',
            r"found '0\.3\.0'; did you mean '0\.[12]\.0'.*--extra-wheels",
        ),
        ('[flashvar]\n"flashvar-0.1.0-variants.json" = "x"', "expected a version or a file"),
        ('[flashvar]\n"0.1.0" = "x"\n[Flashvar]\n"0.2.0" = "x"', "one table of flashvar, found"),
        ('[flashvar]\n"0.1.0" = "\\u001b[31mx"', "a reason without control characters"),
        ("[flashvar]", "expected a version or a file, and why it was withdrawn"),
    ],
)
def test_mistakes(text: str, message: str, dist: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        yanked(dist, text)


def test_a_release_lists_none_of_the_earlier(dist: Path) -> None:
    file = dist.parent / "yanked.toml"
    file.write_text('[flashvar]\n"0.0.1" = "x"', encoding="utf-8")
    assert index.write(dist, dist.parent / "site", yanked=file, whole=False)


def test_the_usual_file_is_taken(dist: Path) -> None:
    (dist.parent / "yanked.toml").write_text('[flashvar]\n"0.1.0" = "why"', encoding="utf-8")
    assert main(["--root", str(dist.parent), "index"]) == 0
    page = dist.parent / "build" / "index" / "flashvar" / "index.html"
    assert page.read_text(encoding="utf-8").count('data-yanked="why"') == 1


def test_what_is_no_file_is_not_passed_over(dist: Path) -> None:
    (dist.parent / "yanked.toml").mkdir()
    assert main(["--root", str(dist.parent), "index"]) == 2


def test_a_named_file_must_be_there(dist: Path) -> None:
    assert main(["--root", str(dist.parent), "index", "--yanked", "nowhere.toml"]) == 2
