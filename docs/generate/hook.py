"""What MkDocs does beside rendering pages.

* A line `<!-- generated: NAME -->` becomes what GENERATED[NAME] says of the sources: tables are
  never typed, and no generated file is committed. `<!-- drawing: NAME -->` becomes a drawing.
* CONTRIBUTING.md and CHANGELOG.md of the repository become pages.
* `*` in the navigation stands for the pages that are there.
* Marks behind the language of a fenced block, which say who runs it (tests/documented.py), are
  not shown.
* Inline code breaks between the words of a name (line_breaks.py); the search index has no breaks.
* A built page that would load anything from another host is an error, and so is a NAME that no
  page has: what was deleted by mistake would not be missed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src" / "python"), str(Path(__file__).parent)]

import context_parallel  # noqa: E402
import line_breaks  # noqa: E402
import op_rates  # noqa: E402
import pages  # noqa: E402
import pictures  # noqa: E402
import random_calls  # noqa: E402
import rates  # noqa: E402
import sentences  # noqa: E402
import support  # noqa: E402
import variants  # noqa: E402
from drawings import DRAWINGS  # noqa: E402

from flashvar.cli.speed import timed_ops  # noqa: E402

# Attention has tables of its own.
OTHER_OPS = [name for name in timed_ops() if name != "attention"]
# NAME -> a function of the repository's root that returns Markdown.
GENERATED = {
    "architectures": variants.architectures,
    "keys of variants.toml": variants.keys,
    "kernels of a wheel": variants.kernels,
    "what was run": support.what_was_run,
    "ops that ran": support.ops_that_ran,
    "versions": support.versions,
    "skipped cases": support.skipped,
    "context_parallel that ran": context_parallel.what_ran,
    "times of context_parallel": context_parallel.times,
    "drivers": support.drivers,
    "software": support.software,
    "forward": rates.forward,
    "backward": rates.backward,
    "ratios": rates.ratios,
    "host time": rates.host,
    "host time of integrations": rates.integrations,
    "cost in transformers": sentences.cost_in_transformers,
    "tiles for 99 KiB": sentences.tiles_for_99_kib,
    "builds": rates.builds,
    "models": rates.models,
    "random calls": random_calls.random_calls,
    "packed and grouped": rates.packed_and_grouped,
    "layers": rates.layers,
    "sizes": rates.sizes,
    "sizes of others": rates.sizes_of_others,
    "installing": rates.installing,
    **{f"rates of {name}": op_rates.of_op(name) for name in OTHER_OPS},
    "ratios of linear attention": op_rates.ratios_of_linear_attention,
    "pictures": pictures.pictures,
    "chart": pictures.chart,
    "integrations": pages.integrations,
    "modules of integrations": pages.modules_of_integrations,
    "modules of the stand-in": pages.stand_in,
    "command line": pages.command_line,
    "factory": pages.factory,
    "audit": pages.audit_checks,
    "exit codes": pages.exit_codes,
    "header": pages.header,
}
# Tables whose cells have sizes, which are not broken over lines.
UNBROKEN = {
    "models",
    "random calls",
    "packed and grouped",
    *(f"rates of {name}" for name in OTHER_OPS),
}
MARKER = re.compile(r"^<!-- (generated|drawing): (.+) -->$", re.MULTILINE)
SIZES = re.compile(r"(?<=\d) ([x/]) (?=\d)")  # such as 4 x 4,096, in tables of rates
MARKED_FENCE = re.compile(r"^( *```(?:python|sh|text)) .+$", re.MULTILINE)
ELSEWHERE = re.compile(
    r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//[^>]*>"""
    r"""|@import\s+(?:url\()?["']?(?:https?:)?//.*|url\(["']?(?:https?:)?//.*"""
)


_put_in: set[tuple[str, str]] = set()  # markers that pages of this build have: kind, NAME


def on_config(config: Any) -> Any:
    """Fill in the patterns of the navigation."""
    _put_in.clear()
    config["nav"] = _expanded(config["nav"], Path(config["docs_dir"]))
    return config


def _expanded(entries: list[Any], docs: Path) -> list[Any]:
    expanded: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            ((name, below),) = entry.items()
            expanded.append({name: below if isinstance(below, str) else _expanded(below, docs)})
        elif "*" in entry:
            found = sorted(str(path.relative_to(docs)) for path in docs.glob(entry))
            expanded += [name for name in found if name not in expanded]
        else:
            expanded.append(entry)
    return expanded


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are files of the repository's root."""
    for name, text in pages.of_the_root(ROOT).items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put in what is generated, and hide the marks of blocks."""

    def made(match: re.Match[str]) -> str:
        kind, name = match[1], match[2]
        known = GENERATED if kind == "generated" else DRAWINGS
        if name not in known:
            raise PluginError(
                f"{page.file.src_uri}: expected one of {', '.join(known)} to be {kind}, "
                f"found {name!r}"
            )
        _put_in.add((kind, name))
        if kind == "drawing":
            return str(DRAWINGS[name]())
        text = GENERATED[name](ROOT)
        return SIZES.sub(r"&nbsp;\1&nbsp;", text) if name in UNBROKEN else text

    return MARKED_FENCE.sub(r"\1", MARKER.sub(made, markdown))


def on_post_page(output: str, **_: Any) -> str:
    """Say where inline code breaks."""
    return line_breaks.in_code(output)


def on_post_build(config: Any) -> None:
    """Refuse what could not be read without a network, and generated text that no page has."""
    known = {("generated", name) for name in GENERATED} | {("drawing", name) for name in DRAWINGS}
    if missing := known - _put_in:
        markers = ", ".join(sorted(f"<!-- {kind}: {name} -->" for kind, name in missing))
        raise PluginError(
            f"expected each marker on a page, found none with {markers}: put it on one, or remove "
            "what makes its text"
        )
    for path in sorted(Path(config["site_dir"]).rglob("*")):
        if path.suffix in {".html", ".css", ".svg"}:
            found = ELSEWHERE.search(path.read_text(encoding="utf-8"))
            if found:
                raise PluginError(f"{path.name}: expected nothing of other hosts, found {found[0]}")
