"""The files that measurements and GPU tests leave behind: JSON of which two runs can be diffed.

What is short stands on one line. A table, one of `rows` or `cases`, has a line a row, with the
names of its columns once, in `columns`; null and what a line lacks at its end are absent there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_TABLES: Final = ("rows", "cases")
_WIDTH: Final = 100


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document with at most one table, a list of dicts."""
    members = []
    for name, value in document.items():
        if name in _TABLES:
            filled = (key for row in value for key, cell in row.items() if cell is not None)
            columns = list(dict.fromkeys(filled))
            lines = ",\n".join(f"  {json.dumps(_cells(row, columns))}" for row in value)
            members.append(f'"columns": {_laid_out(columns, " ")}')
            members.append(f'"{name}": [\n{lines}\n ]')
        else:
            members.append(f"{json.dumps(name)}: {_laid_out(value, ' ')}")
    path.write_text("{\n " + ",\n ".join(members) + "\n}\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """The document that was written; its rows lack what was None.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such document.
    """
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError(f"expected an object, found {type(document).__name__}")
    columns = document.pop("columns", [])
    for name in _TABLES:
        if name in document:
            document[name] = [
                {key: cell for key, cell in zip(columns, row, strict=False) if cell is not None}
                for row in document[name]
            ]
    return document


def _cells(row: Mapping[str, Any], columns: list[str]) -> list[Any]:
    cells = [row.get(column) for column in columns]
    while cells and cells[-1] is None:
        cells.pop()
    return cells


def _laid_out(value: Any, indent: str) -> str:
    """JSON on one line where it fits, else a line for each member."""
    line = json.dumps(value)
    if not isinstance(value, dict | list | tuple) or len(indent) + len(line) <= _WIDTH:
        return line
    inner = f"{indent} "
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {_laid_out(one, inner)}" for key, one in value.items()]
        return f"{{\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}}}"
    return (
        f"[\n{inner}" + f",\n{inner}".join(_laid_out(one, inner) for one in value) + f"\n{indent}]"
    )
