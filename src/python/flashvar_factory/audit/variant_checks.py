"""Checks variant.json: an installer asks the providers that it names, and takes its properties."""

from __future__ import annotations

from collections.abc import Iterator

from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.facts import Wheel
from flashvar_factory.audit.finding import Finding
from flashvar_factory.audit.manifests import pairs
from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import json_text, variant_metadata


def variant(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """The document has the label of this wheel, the properties of its binary, and one provider."""
    del expected
    where, text = f"{wheel.info}/variant.json", wheel.metadata("variant.json")
    label = wheel.name.variant_label
    if label is None or text is None:
        if (label is None) != (text is None):
            label_is, found = ("no", "one") if label is None else ("a", "none")
            message = f"expected {label_is} variant.json, as the file name has {label_is} label"
            yield Finding("variant", where, f"{message}, found {found}")
        return
    try:
        found = json_text.parse(text.encode(), where)
    except PackagingError as error:
        yield Finding("variant", where, str(error).removeprefix(f"{where}: "))
        return
    held = [manifest for _, manifest in pairs(wheel)]
    right = held[0].kind.extra.replace("-", "_") if held else variant_metadata.NULL
    if label != right:
        message = f"expected the label {right} of what is in it, found {label}; rename the file"
        yield Finding("variant", wheel.path.name, message)
    wanted = variant_metadata.content(
        {label: variant_metadata.properties_of(held[0]) if held else {}}
    )
    for key in sorted(wanted.keys() | (found.keys() if isinstance(found, dict) else set())):
        value = found.get(key) if isinstance(found, dict) else None
        if value != wanted.get(key):
            yield Finding("variant", where, f"expected {key} {wanted.get(key)}, found {value}")
    if found == wanted and text != variant_metadata.text(wanted):
        message = "expected the text that the factory writes, found other spaces or another order"
        yield Finding("variant", where, message)
