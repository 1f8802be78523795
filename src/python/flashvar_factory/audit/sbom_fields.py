"""Lists the fields that an SBOM of this factory has; no check reads others, so they are errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

_HASH: Final = {"alg": None, "content": None}
_LICENSE: Final = {"expression": None, "license": {"name": None}}
_FILE: Final = {"bom-ref": None, "type": None, "name": None, "version": None, "hashes": [_HASH]}
_NAMED: Final = {**_FILE, "description": None, "licenses": [_LICENSE], "purl": None}
_ROOT: Final = {
    **{field: form for field, form in _NAMED.items() if field != "hashes"},
    "pedigree": {"commits": [{"uid": None}]},
    "properties": [{"name": None, "value": None}],
    "components": [_FILE],
}
# A list has one form for each of its entries; None is a text or a number.
DOCUMENT: Final = {
    "$schema": None,
    "bomFormat": None,
    "specVersion": None,
    "serialNumber": None,
    "version": None,
    "metadata": {"component": _ROOT, "timestamp": None},
    "components": [{**_NAMED, "scope": None}],
    "dependencies": [{"ref": None, "dependsOn": [None]}],
}


def strange(document: object) -> Iterator[str]:
    """The paths of what is in a document and not in `DOCUMENT`, or has another form."""
    yield from _strange(document, DOCUMENT, "")


def _strange(value: object, form: Any, where: str) -> Iterator[str]:
    if isinstance(form, Mapping) and isinstance(value, dict):
        for field, inner in value.items():
            path = f"{where}.{field}".lstrip(".")
            if field in form:
                yield from _strange(inner, form[field], path)
            else:
                yield path
    elif isinstance(form, list) and isinstance(value, list):
        for inner in value:
            yield from _strange(inner, form[0], where)
    elif form is not None or value is None or isinstance(value, dict | list):
        yield where
