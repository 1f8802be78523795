"""The metadata of wheel variants, variant.json, as PEP 825 and PEP 850 have it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from types import MappingProxyType
from typing import Any, Final

from flashvar.binaries.manifest import Manifest
from flashvar_factory.errors import PackagingError

NAMESPACE: Final = "nvidia"
NULL: Final = "null"  # the label of the wheel without a binary
# Installers answer this plugin themselves: nothing is downloaded.
PROVIDER: Final = MappingProxyType(
    {
        "plugin-api": "nvidia_variant_provider.plugin:NvidiaVariantPlugin",
        "requires": ["nvidia-variant-provider>=0.0.1"],
    }
)
SCHEMA_FILE: Final = "variant-metadata.schema.json"
SCHEMA_URL: Final = "https://variants-schema.wheelnext.dev/peps/850/v0.2.0.json"

Properties = Mapping[str, Sequence[str]]  # feature -> values


def properties_of(manifest: Manifest) -> Properties:
    """The properties of the variant that holds this binary."""
    architecture = manifest.architecture
    return {
        "cuda_version_lower_bound": [".".join(map(str, manifest.minimum_driver.cuda))],
        "sm_arch": [f"{architecture.major}{architecture.minor}_real"],
    }


def document(variants: Mapping[str, Properties]) -> str:
    """`variant.json` of one label, or the list of all of them; checked against the schema."""
    found = content(variants)
    check(found)
    return text(found)


def text(found: Mapping[str, Any]) -> str:
    """The document of this content."""
    return json.dumps(found, indent=2) + "\n"


def content(variants: Mapping[str, Properties]) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "$schema": SCHEMA_URL,
        "default-priorities": {"namespace": [NAMESPACE]},
        "providers": {NAMESPACE: dict(PROVIDER)},
        "variants": {
            label: {NAMESPACE: dict(properties)} if properties else {}
            for label, properties in sorted(variants.items())
        },
    }


def check(content: Mapping[str, Any]) -> None:
    """PackagingError where variant metadata is not what its schema says."""
    import jsonschema

    schema = json.loads((resources.files("flashvar_factory") / "data" / SCHEMA_FILE).read_bytes())
    errors = sorted(jsonschema.Draft202012Validator(schema).iter_errors(content), key=str)
    if errors:
        raise PackagingError(f"{SCHEMA_FILE}: {errors[0].json_path}: {errors[0].message}")
