"""The project with few of its ops: the host's sources of all of them take eight seconds to compile.

Ops are named by groups, which are folders of src/cuda: `attention`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from flashvar_factory.config import schema

ROOT: Final = Path(__file__).parents[2]
TEXT: Final = (ROOT / schema.FILE_NAME).read_text(encoding="utf-8")
GROUPS: Final = {name.rpartition("_")[0] for name in schema.parse(TEXT).ops}
HAVE_HEAD_DIMS: Final = {"attention", "gated_delta_rule"}


def variants(*groups: str) -> str:
    """variants.toml with these ops alone, all of the same dtypes and head dims."""
    tables = re.split(r"^(?=\[)", TEXT, flags=re.MULTILINE)
    other = re.compile(rf"\[defaults\.|\[ops\.(?!(?:{'|'.join(groups)})_)")
    text = "".join(table for table in tables if not other.match(table))
    if not HAVE_HEAD_DIMS.intersection(groups):
        text = re.sub(r"^head_dim = .*\n|, largest = {.*?}", "", text, flags=re.MULTILINE)
    return with_defaults(text, re.findall(r"^\[ops\.(\w+)\]", text, re.MULTILINE))


def with_defaults(text: str, ops: list[str]) -> str:
    """The same with these ops where none are named."""
    return re.sub(r"^ops = \[.*?\]", f"ops = {json.dumps(ops)}", text, flags=re.M | re.S)


def other_sources(*groups: str) -> tuple[str, ...]:
    """The host's sources of other ops, which a project with these ops is without."""
    others = tuple(GROUPS - {*groups})
    files = (ROOT / "src" / "cuda" / "abi").glob("*.cc")
    return tuple(str(file.relative_to(ROOT)) for file in files if file.name.startswith(others))
