from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flashvar._version import __version__
from flashvar.binaries.extras import Extras, of_installed, read
from flashvar.installing import wheel_requirements
from flashvar_factory.config import extras, schema

CONFIG = schema.read(Path(__file__).parents[3] / "variants.toml")
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


def test_of_several_the_one_of_the_imported_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installer that was interrupted leaves the metadata of another version, or a part of it."""
    ours, others = tmp_path / "site", tmp_path / "others"
    for site, version, extra in ((ours, __version__, "sm80"), (others, "0.0.1", "sm90")):
        info = site / f"flashvar-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: flashvar\nVersion: {version}\nProvides-Extra: {extra}\n"
            f"Requires-Dist: flashvar-{extra}=={version}; extra == '{extra}'\n",
            encoding="utf-8",
        )
    remains = tmp_path / "remains"
    (remains / f"flashvar-{__version__}.dist-info").mkdir(parents=True)
    for path in ([remains, others, ours], [ours, others, remains]):
        monkeypatch.setattr(sys, "path", [*map(str, path), *sys.path])
        assert of_installed("linux_x86_64").here == {"sm80"}
        assert [str(one) for one in wheel_requirements.of_installed("linux_x86_64")] == [
            f"flashvar-sm80=={__version__}"
        ]
