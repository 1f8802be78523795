from __future__ import annotations

from pathlib import Path

import pytest

from flashvar.binaries.extras import Extras, read
from flashvar_factory.config import extras, schema

CONFIG = schema.read(Path(__file__).parents[2] / "variants.toml")
STATED = extras.extras(CONFIG, "1.2.3")
REQUIREMENTS = [
    "torch>=2.8",
    *(f'{one} and extra == "{name}"' for name, found in STATED.items() for one in found),
]
EVERY = frozenset(target.kind.extra for target in CONFIG.targets.values())


@pytest.mark.parametrize(
    "platform", ["linux_x86_64", "linux_aarch64", "win_amd64", "linux_ppc64le"]
)
def test_metadata_of_a_release_says_what_is_had_where(platform: str) -> None:
    here = frozenset(
        target.kind.extra
        for target in CONFIG.targets.values()
        if platform in {f"linux_{machine}" for machine in target.platforms}
    )
    assert read(STATED, REQUIREMENTS, platform) == Extras(here, EVERY - here)


def test_an_extra_of_a_shared_wheel_is_no_binary_of_its_own() -> None:
    assert {"sm120", "sm121"} <= STATED.keys()
    assert STATED["sm121"] == STATED["sm120"]
    assert "sm121" not in EVERY


def test_extra_without_a_marker_is_for_every_platform() -> None:
    available = read(["sm70", "cli"], ["flashvar-sm70==1; extra == 'sm70'"], "linux_x86_64")
    assert available == Extras(frozenset({"sm70"}))
