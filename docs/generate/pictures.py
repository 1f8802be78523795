"""The pictures of docs/pictures, in the order in which they are read, with what each shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from benchmarks import result_file
from rates import RESULTS, day_and_commit

_RECORDS: Final = Path("tests", "gpu", "results")  # of pictures that no benchmark draws
_SOURCE: Final = re.compile(r"<dc:source>([^<]+)")
_RECORD: Final = re.compile(r"\S+\.json")
# What a picture shows, by how the name of its file ends, in the order of the page.
_SHOWN: Final = {
    "forward": "The forward: rates by length, for each head dim and mask.",
    "backward": "The backward: rates by length, for each head dim and mask.",
    "causal": "Forward and backward with a causal mask: rates by length.",
    "best-peer": "flashvar's rate relative to that of the fastest other kernel.",
    "each-peer": "flashvar's rate relative to that of each other kernel.",
    "gated-delta-rule": "`gated_delta_rule`: rates, compared with other packages.",
    "gated-delta-rule-update": "`gated_delta_rule`, one token per sequence: bytes per second.",
    "host": "CPU time of one small call.",
    "train-gpt": "The loss of `examples/train_gpt.py` with each attention.",
    "sizes": "Bytes to download, for the wheels of flashvar and of others.",
}


def pictures(root: Path) -> str:
    """Every picture that was drawn from the records for these pages, linked to itself alone."""
    folder = root / "docs" / "pictures"
    found = {
        path: kind
        for kind in _SHOWN
        for path in sorted(folder.glob("*.png"))
        if path.stem == kind or path.stem.endswith(f"-{kind}")
    }
    if strange := set(folder.glob("*.png")) - set(found):
        names = ", ".join(sorted(path.name for path in strange))
        raise ValueError(f"expected pictures of {', '.join(_SHOWN)}, found {names}: name it there")
    return "\n\n".join(_picture(root, path, _SHOWN[kind]) for path, kind in found.items())


def chart(root: Path) -> str:
    """The one picture of the first page."""
    (path,) = (root / "docs" / "pictures").glob("*-causal.png")
    return _picture(
        root,
        path,
        "Rates of causal attention by length, forward and backward, compared with "
        "FlashAttention 4, vLLM's build of FlashAttention 3, cuDNN, FlashAttention 2, "
        "FlexAttention, xformers and SageAttention, which is approximate.",
    )


def _picture(root: Path, path: Path, shown: str) -> str:
    # Outlines stay sharp on every screen.
    outlines = path.with_suffix(".svg")
    target = f"pictures/{(outlines if outlines.exists() else path).name}"
    image = f"![{shown.replace('`', '')}]({target})"
    return f"{shown} {_measured(root, path)}\n\n[{image}]({target})"


def _measured(root: Path, path: Path) -> str:
    """The day and the commit of what a picture shows, and its records."""
    outlines = path.with_suffix(".svg")
    if not outlines.exists():
        record = _RECORDS / f"{path.stem}.json"
        if not (root / record).is_file():
            raise ValueError(f"{path.name}: expected its record {record}, found none")
        return f"No commit recorded (`{record}`)."
    source = _SOURCE.search(outlines.read_text(encoding="utf-8"))
    names = [] if source is None else _RECORD.findall(source[1])
    if not names:
        raise ValueError(f"{outlines.name}: expected the records it was drawn from, found none")
    return f"{'; '.join(_of_record(root, name) for name in names)}."


def _of_record(root: Path, name: str) -> str:
    return day_and_commit(name, result_file.read(root / RESULTS / name)["environment"])
