"""An installer that understands wheel variants picks the architecture; the others see none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import fake_wheels
import fakes
import pytest

from flashvar_factory import index
from flashvar_factory.build import sbom
from flashvar_factory.config import schema, this_machine, version
from flashvar_factory.config.schema import Config
from flashvar_factory.index import serve
from flashvar_factory.inspect import archive
from flashvar_factory.release import variants

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--isolated", "install", "--no-deps", "--quiet")
UV = (str(Path(sys.executable).with_name("uv")), "pip", "install", "--no-config", "--no-deps")
FLAG = ("--preview-features", "wheel-variants")
FORCE_SM = "NV_VARIANT_PROVIDER_FORCE_SM_ARCH"
FORCE_DRIVER = "NV_VARIANT_PROVIDER_FORCE_CUDA_DRIVER_VERSION"

# What flashvar itself says of the binaries in a folder, with nothing else on the path.
ASK = """
import json, sys
from flashvar.binaries import loader, registry
found = registry.installed()
print(json.dumps({
    "binaries": [[b.kind.name, b.folder.origin] for b in found.binaries],
    "refusals": [r.reason for r in found.rejected],
    "loaded": [type(loader.load(b)).__name__ for b in found.binaries],
}))
"""


@pytest.fixture(scope="module")
def released(
    dist: Path, projects: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The release's wheels, and for architectures that the sample lacks some without code."""
    folder = tmp_path_factory.mktemp("released")
    for path in dist.iterdir():
        (folder / path.name).symlink_to(path)
    every = schema.read(ROOT / "variants.toml")
    for name, target in every.targets.items():
        if name in projects or target.toolkit or this_machine.PROCESSOR not in target.platforms:
            continue
        code, of = target.architecture.code, version.read(every, ROOT)
        fake_wheels.binary(folder, fakes.manifest(code, version=of))
    return folder


@pytest.fixture(scope="module")
def made(released: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The variants of the release's wheels."""
    folder = tmp_path_factory.mktemp("variants")
    variants.write(released, folder, "flashvar")
    return folder


@pytest.fixture(scope="module")
def links(released: Path, made: Path) -> tuple[str, ...]:
    """The variants beside the plain wheels, as folders."""
    return ("--no-index", "--find-links", str(released), "--find-links", str(made))


def install(command: tuple[str, ...], target: Path, forced: dict[str, str]) -> None:
    names = ("PIP_", "UV_", "NV_VARIANT", "PYTHONPATH", "VIRTUAL_ENV")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(names)}
    environ |= {"PIP_CONFIG_FILE": os.devnull, "UV_CACHE_DIR": str(target / "cache"), **forced}
    python = ("--python", sys.executable) if command[0] == UV[0] else ()
    done = subprocess.run(
        [*command, *python, "--target", str(target / "site"), "flashvar"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def label(target: Path) -> str | None:
    """Which variant was installed; None for the plain wheel."""
    (info,) = (target / "site").glob("flashvar-*.dist-info")
    file = info / "variant.json"
    if not file.is_file():
        return None
    (found,) = json.loads(file.read_text(encoding="utf-8"))["variants"]
    return str(found)


@pytest.mark.parametrize(
    ("capability", "driver", "expected"),
    [
        ("8.0", "13.0", "sm80"),
        ("8.6", "13.0", "sm86"),
        ("8.7", "13.0", "sm86"),  # the highest lower minor
        ("8.9", "13.0", "sm89"),
        ("9.0", "13.0", "sm90"),
        ("9.0", "13.9", "sm90"),
        ("10.0", "13.0", "sm100"),
        ("12.0", "13.0", "sm120"),
        ("7.5", "13.0", "null"),
        ("8.0", "12.8", "null"),
        ("8.9", "12.8", "sm89_cu12"),
        ("9.0", "12.8", "null"),
    ],
)
def test_uv_picks(
    capability: str, driver: str, expected: str, links: tuple[str, ...], tmp_path: Path
) -> None:
    install((*UV, *FLAG, *links), tmp_path, {FORCE_SM: capability, FORCE_DRIVER: driver})
    assert label(tmp_path) == expected


@pytest.mark.skipif(bool(this_machine.capabilities()), reason="this machine has a CUDA device")
def test_uv_picks_null_without_a_gpu(links: tuple[str, ...], tmp_path: Path) -> None:
    install((*UV, *FLAG, *links), tmp_path, {})
    assert label(tmp_path) == "null"


@pytest.mark.parametrize("command", [PIP, UV], ids=["pip", "uv"])
def test_who_does_not_know_variants_takes_the_plain_wheel(
    command: tuple[str, ...], links: tuple[str, ...], tmp_path: Path
) -> None:
    install((*command, *links), tmp_path, {FORCE_SM: "9.0", FORCE_DRIVER: "13.0"})
    assert label(tmp_path) is None


@pytest.fixture(scope="module")
def addresses(
    released: Path, made: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """An index with the variants in it: served, and as files."""
    site = tmp_path_factory.mktemp("site") / "index"
    index.write(released, site, extra=[made])
    with serve.server(site, quiet=True) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield {"http": f"http://127.0.0.1:{server.server_port}/", "file": f"{site.as_uri()}/"}
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("way", ["http", "file"])
@pytest.mark.parametrize(
    ("command", "expected"),
    [((*UV, *FLAG), "sm89"), (UV, None), (PIP, None)],
    ids=["uv-variants", "uv", "pip"],
)
def test_from_the_index(
    command: tuple[str, ...],
    expected: str | None,
    way: str,
    addresses: dict[str, str],
    tmp_path: Path,
) -> None:
    command = (*command, "--index-url", addresses[way])
    install(command, tmp_path, {FORCE_SM: "8.9", FORCE_DRIVER: "13.0"})
    assert label(tmp_path) == expected


@pytest.mark.parametrize(
    ("capability", "expected"),
    [("8.9", ["sm_89"]), ("9.0", ["sm_90"]), ("7.5", [])],
)
def test_flashvar_finds_what_is_embedded(
    capability: str, expected: list[str], links: tuple[str, ...], tmp_path: Path
) -> None:
    install((*UV, *FLAG, *links), tmp_path, {FORCE_SM: capability, FORCE_DRIVER: "13.0"})
    environ = {key: value for key, value in os.environ.items() if not key.startswith("FLASHVAR_")}
    done = subprocess.run(
        [sys.executable, "-S", "-c", ASK],
        env={**environ, "PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["binaries"] == [[name, "embedded in flashvar"] for name in expected]
    assert said["refusals"] == []
    assert said["loaded"] == ["Library"] * len(expected)


def test_every_variant_brings_its_sbom(made: Path, configs: dict[str, Config]) -> None:
    labels = {config.targets[name].kind.extra.replace("-", "_") for name, config in configs.items()}
    found = {archive.parse_name(path.name).variant_label: path for path in made.glob("*.whl")}
    named = {label: list(sbom.read(found[label])) for label in ("null", *labels)}
    assert named.pop("null") == []
    assert named == {
        label: [f"flashvar-{str(label).replace('_', '-')}.cdx.json"] for label in named
    }
