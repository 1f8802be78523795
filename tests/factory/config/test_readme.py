"""README.md as an index shows it: no link leads nowhere there."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from flashvar.binaries import install_commands
from flashvar_factory.config import readme

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
URLS = {"Repository": "https://example.org/us/flashvar/"}
AT = "https://example.org/us/flashvar"
# What follows the words of a link, and is no address and no heading of the page.
RELATIVE = re.compile(r"\]\((?!#|https?://)[^)]*\)")


@pytest.mark.parametrize(
    ("written", "with_address", "without"),
    [
        ("[a](docs/a.md)", f"[a]({AT}/blob/v1.2/docs/a.md)", "a"),
        ("[a](docs/a.md#b)", f"[a]({AT}/blob/v1.2/docs/a.md#b)", "a"),
        ("[`a`, b](c.md).", f"[`a`, b]({AT}/blob/v1.2/c.md).", "`a`, b."),
        ("![a](a.png)", f"![a]({AT}/raw/v1.2/a.png)", ""),
        ("[a](#b)", "[a](#b)", "[a](#b)"),
        ("[a](https://b.org)", "[a](https://b.org)", "[a](https://b.org)"),
        ("`x[a](b)` [c](d)", f"`x[a](b)` [c]({AT}/blob/v1.2/d)", "`x[a](b)` c"),
        ("```python\nx[a](b)\n```\n", "```python\nx[a](b)\n```\n", "```python\nx[a](b)\n```\n"),
    ],
)
def test_a_link_gets_an_address(
    written: str, with_address: str, without: str, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text(written, encoding="utf-8")
    assert readme.text(tmp_path, URLS, "1.2") == with_address
    assert readme.text(tmp_path, {}, "1.2") == without


@pytest.mark.parametrize("urls", [URLS, {}], ids=["repository", "none"])
def test_no_relative_link_is_left(urls: dict[str, str]) -> None:
    assert RELATIVE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert RELATIVE.findall(readme.text(ROOT, urls, "1.2")) == []


@pytest.mark.skipif(find_spec("comrak") is None, reason="comrak, of the group `test`, is not here")
@pytest.mark.parametrize("urls", [URLS, {}], ids=["repository", "none"])
def test_pypi_renders_it_whole(urls: dict[str, str]) -> None:
    """Every heading, table and block is there, and links of the page lead to its headings."""
    from readme_renderer import markdown

    text = readme.text(ROOT, urls, "1.2")
    page = markdown.render(text)
    assert page is not None
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert page.count("<table>") == len(re.findall(r"^\|[-| ]+\|$", prose, re.MULTILINE)) > 3
    assert page.count("<pre") == text.count("\n```\n") > 3
    headings = re.findall(r'<h\d id="([^"]+)"', page)
    assert len(headings) == len(re.findall(r"^#+ ", prose, re.MULTILINE)) > 5
    leading = re.findall(r'(?:href|src)="([^"]+)"', page)
    elsewhere = {one for one in leading if not one.startswith("https://")}
    assert elsewhere == {f"#{heading}" for heading in headings}


@pytest.mark.parametrize("folder", [ROOT, ROOT / "packages" / "factory"], ids=["", "factory"])
def test_metadata_says_whose_it_is(folder: Path) -> None:
    """A release also says where its sources are."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["authors"]
    assert not install_commands.PUBLISHED or "Repository" in project.get("urls", {})
    if "readme" not in project["dynamic"]:
        text = (folder / project["readme"]).read_text(encoding="utf-8")
        assert RELATIVE.findall(text) == []
