"""Every reader of the factory on damaged input: a sentence, never a traceback, a hang or a flood.

The inputs are the same in every run; `--fuzzed 20000` makes more of them for each reader, and
`--fuzz-seed WORD` others. What a longer run found stays in FOUND.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import signal
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import fake_artifacts
import fakes
import pytest
from bounded import SECONDS, bounded
from fake_artifacts import Image, Wheel

from flashvar.binaries import manifest
from flashvar.errors import FlashvarError
from flashvar_factory import audit
from flashvar_factory.audit import expectations
from flashvar_factory.build import sbom
from flashvar_factory.config import schema, version
from flashvar_factory.index import entries, yanks
from flashvar_factory.inspect import (
    archive,
    core_metadata,
    cubin,
    dynamic,
    elf,
    fatbin,
    kernel_facts,
    ptx,
    sdist,
)
from flashvar_factory.release import checks, downloaded, gpu_records, gpu_runs, notes, published

ROOT = Path(__file__).parents[2]
CONFIG = schema.read(ROOT / "variants.toml")
NUMBERS = (0, 1, 7, 8, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
WORDS = (b"\0", b"\xff\xfe", b'"', b"\n\n", b"=", b",", b"..", b"[" * 3000, b"9" * 5000)

pytestmark = pytest.mark.usefixtures("auditwheel")

Read = Callable[[bytes, Path], object]


def mutated(content: bytes, chance: random.Random) -> bytes:
    """The content with one to four pieces of damage."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        kind = chance.randrange(8)
        if kind == 0 and data:
            data[at - 1] ^= 1 << chance.randrange(8)
        elif kind == 1:
            size = chance.choice((1, 2, 4, 8))
            number = chance.choice(NUMBERS) % (1 << 8 * size)
            data[at : at + size] = number.to_bytes(size, "little")
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            del data[at : at + chance.randint(1, 64)]
        elif kind == 4:
            data[at:at] = chance.choice(WORDS)
        elif kind == 5:
            data[at : at + chance.randint(1, 256)] = bytes(chance.randint(1, 256))
        elif kind == 6:
            start = chance.randrange(len(data) + 1)
            data[at:at] = data[start : start + chance.randint(1, 512)]
        else:
            data[at : at + 8] = chance.randbytes(8)
    return bytes(data)


def check(read: Read, content: bytes, folder: Path) -> None:
    """The reader answers, or refuses in words."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    said = ""
    try:
        read(content, folder)
    except FlashvarError as error:
        said = str(error)
    assert not said or "expected" in said or "unknown" in said
    assert len(said) < 12_000  # a damaged name of 5,000 digits may be said twice


@cache
def wheel() -> Wheel:
    return Wheel()


def _file(name: str, content: bytes, folder: Path) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def read_archive(content: bytes, folder: Path) -> object:
    return archive.read(_file("a-1.0-py3-none-any.whl", content, folder))


def read_wheel(content: bytes, folder: Path) -> object:
    path = _file("flashvar_sm80-0.1.0-py3-none-manylinux_2_28_x86_64.whl", content, folder)
    report = audit.audit(path, expectations.of(CONFIG))
    return report.text(), report.to_json()


def read_member(name: str) -> Read:
    """The audit of a wheel in which one file is damaged, and all that lists it is right."""

    def read(content: bytes, folder: Path) -> object:
        path = replace(wheel(), more={name: content}).write(folder)
        report = audit.audit(path, expectations.of(CONFIG))
        return report.text(), report.to_json()

    return read


def read_record(content: bytes, folder: Path) -> object:
    files = wheel().files()
    path = wheel().write(folder)
    listed = archive.read(path)
    assert files.keys() < listed.keys()
    members = {**listed, f"{wheel().info}/RECORD": content}
    path.write_bytes(plain_zip(members))
    return audit.audit(path).text()


def plain_zip(files: dict[str, bytes]) -> bytes:
    """An archive whose RECORD is as it is given."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as opened:
        for name, content in files.items():
            opened.writestr(name, content)
    return target.getvalue()


def read_library(content: bytes, folder: Path) -> object:
    del folder
    file = elf.parse(content, "lib.so")
    read = dynamic.read(file, "lib.so")
    return read, [fatbin.images(one.content, "lib.so") for one in file.named(".nv_fatbin")]


def read_fatbin(content: bytes, folder: Path) -> object:
    del folder
    found = []
    for image in fatbin.images(memoryview(content), "lib.so"):
        opened = image.opened()
        found.append(None if opened is None else cubin.read(opened, "lib.so"))
    return found


def read_toml(content: bytes, folder: Path) -> object:
    path = _file("variants.toml", content, folder)
    (folder / "src").is_dir() or (folder / "src").symlink_to(ROOT / "src")
    return schema.read(path)


def read_sbom(content: bytes, folder: Path) -> object:
    path = replace(wheel(), more={SBOM: content}).write(folder)
    return sbom.read(path)


def read_entry(content: bytes, folder: Path) -> object:
    del folder
    return entries.read(Path("flashvar_sm80-0.1.0-py3-none-any.whl"), content)


def read_sdist_entry(content: bytes, folder: Path) -> object:
    del folder
    return entries.read(Path("flashvar-0.1.0.tar.gz"), content)


def read_tar(content: bytes, folder: Path) -> object:
    """The same of an archive that was damaged before it was packed."""
    return read_sdist_entry(gzip.compress(content, 1), folder)


def packed_sdist() -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as opened:
        for name, content in (("PKG-INFO", METADATA), ("a.py", b"x = 1\n")):
            info = tarfile.TarInfo(f"flashvar-0.1.0/{name}")
            info.size = len(content)
            opened.addfile(info, io.BytesIO(content))
    return target.getvalue()


def read_record_of_a_run(content: bytes, folder: Path) -> object:
    """A damaged record is of another kind of run, or it is judged."""
    path = folder / gpu_runs.FOLDER / "fake.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    need = gpu_records.RecordNeed("sm_80", ("src/cuda",), (wheel().described,))
    return gpu_records.results(ROOT, need, gpu_runs.read(folder, CONFIG))


RUN = {
    "left_to_other_shards": 0,
    "forced_architecture": None,
    "system": {
        "devices": [{"name": "NVIDIA A100", "capability": [8, 0]}],
        "platform": "linux_x86_64",
        "interpreted": False,
    },
    "binaries": [
        {
            "architecture": "sm_80",
            "code_kinds": ["sass"],
            "version": "0.1.0",
            "source": {"revision": "HEAD", "dirty": False, "hash": "0" * 64},
            "toolkit": {"version": "13.0.88"},
        }
    ],
    "counts": {"passed": 2},
    "counts_by_file": {"test_a.py cuda": {"passed": 2}},
}
CHECKED = {
    "schema": 1,
    "project": "a",
    "version": "1.0",
    "revision": "0" * 40,
    "tag": "v1.0",
    "files": {"a-1.0.tar.gz": "0" * 64},
    "gpu_records": {},
}
LISTED = {"files": [{"filename": "a-1.0.tar.gz", "hashes": {"sha256": "0" * 64}}]}
METADATA = b"Metadata-Version: 2.4\nName: flashvar\nVersion: 0.1.0\nRequires-Dist: torch>=2.8\n\n"
YANKED = b'[flashvar]\n"0.1.0" = "wrong results"\n'
INFO = "flashvar_sm80-0.1.0.dist-info"
SBOM = f"{INFO}/sboms/flashvar-sm80.cdx.json"
FILES = wheel().files()
CUBIN = fake_artifacts.cubin(
    {"_Za": 8, "_Zb": 16}, code="80", toolkit="13.0.88", registers=8, threads=128
)
RECORDS = fake_artifacts.record("a", fakes.kernel(dtype="bf16", head_dim=64)) * 2


def _packed() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return wheel().write(Path(folder)).read_bytes()


READERS: dict[str, tuple[bytes, Read]] = {
    "archive": (_packed(), read_archive),
    "wheel": (_packed(), read_wheel),
    "RECORD": (b"a,sha256=x,1\n" * 20, read_record),
    "ELF": (FILES["flashvar_sm80/libflashvar_sm80.so"], read_library),
    "library": (
        FILES["flashvar_sm80/libflashvar_sm80.so"],
        read_member("flashvar_sm80/libflashvar_sm80.so"),
    ),
    "fatbin": (
        fake_artifacts.fatbin(Image("80", CUBIN))
        + fake_artifacts.fatbin(Image("90a", CUBIN, 2, None)),
        read_fatbin,
    ),
    "cubin": (CUBIN, lambda content, folder: cubin.read(memoryview(content), "a.cubin")),
    "kernel records": (RECORDS, lambda content, folder: kernel_facts.parse(content, "lib.so")),
    "manifest": (
        FILES["flashvar_sm80/manifest.json"],
        lambda content, folder: manifest.parse(content.decode(errors="replace")),
    ),
    "manifest in a wheel": (
        FILES["flashvar_sm80/manifest.json"],
        read_member("flashvar_sm80/manifest.json"),
    ),
    "METADATA": (METADATA, lambda content, folder: core_metadata.read(content, "METADATA")),
    "METADATA in a wheel": (FILES[f"{INFO}/METADATA"], read_member(f"{INFO}/METADATA")),
    "WHEEL": (FILES[f"{INFO}/WHEEL"], read_member(f"{INFO}/WHEEL")),
    "entry points": (FILES[f"{INFO}/entry_points.txt"], read_member(f"{INFO}/entry_points.txt")),
    "variant.json": (
        json.dumps({"variants": {"sm80": {"nvidia": {"sm_arch": ["80_real"]}}}}).encode(),
        read_member(f"{INFO}/variant.json"),
    ),
    "SBOM in a wheel": (FILES[SBOM], read_member(SBOM)),
    "SBOM": (FILES[SBOM], read_sbom),
    "variants.toml": ((ROOT / "variants.toml").read_bytes(), read_toml),
    "yanked.toml": (
        YANKED,
        lambda content, folder: yanks.read(_file("yanked.toml", content, folder), ["flashvar"]),
    ),
    "index of a wheel": (_packed(), read_entry),
    "index of an sdist": (packed_sdist(), read_sdist_entry),
    "tar of an sdist": (gzip.decompress(packed_sdist()), read_tar),
    "sdist": (
        packed_sdist(),
        lambda content, folder: sdist.read(_file("flashvar-0.1.0.tar.gz", content, folder)),
    ),
}

READERS |= {
    "PTX": (
        fake_artifacts.ptx().content,
        lambda content, folder: ptx.read(memoryview(content), "lib.so"),
    ),
    "list of hashes": (
        f"{'0' * 64}  a.whl\n{'1' * 64} *b.whl\n".encode(),
        lambda content, folder: downloaded.listed(_file("SHA256SUMS", content, folder)),
    ),
    "version file": (
        b'__version__ = "1.0"\n',
        lambda content, folder: version.read(
            CONFIG, _file(CONFIG.project.version_file, content, folder).parents[3]
        ),
    ),
    "changelog": (
        b"# Changes\n\n## 1.0 - 2026-01-31\n\n* More.\n",
        lambda content, folder: notes.changes(_file("CHANGELOG.md", content, folder).parent, "1.0"),
    ),
    "GPU record": (json.dumps(RUN).encode(), read_record_of_a_run),
    "hashes of a release": (
        json.dumps(CHECKED).encode(),
        lambda content, folder: checks.read(_file("release.json", content, folder)),
    ),
    "answer of an index": (
        json.dumps(LISTED).encode(),
        lambda content, folder: published.parse(content, "https://127.0.0.1/simple/a/"),
    ),
}

# Slow readers get fewer inputs; the time of all of them is that of a few seconds.
COST = {"SBOM": 20, "GPU record": 20, "wheel": 2, "RECORD": 2, "library": 2}


@pytest.mark.parametrize("name", READERS)
def test_damaged_input_is_refused_in_words(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    content, read = READERS[name]
    read_or_refused(read, content, tmp_path)
    chance = random.Random(f"{request.config.getoption('--fuzz-seed')} {name}")
    count = max(3, int(request.config.getoption("--fuzzed")) // COST.get(name, 1))
    with bounded():
        for number in range(count):
            damaged = mutated(content, chance)
            try:
                check(read, damaged, tmp_path)
            except Exception:
                (tmp_path / "damaged").write_bytes(damaged)
                print(f"input {number} is in {tmp_path / 'damaged'}")
                raise


def read_or_refused(read: Read, content: bytes, folder: Path) -> None:
    with bounded():
        began = time.monotonic()
        check(read, content, folder)
        assert time.monotonic() - began < SECONDS


def long(text: bytes) -> bytes:
    """variants.toml, where this is longer than a file name may be."""
    whole = (ROOT / "variants.toml").read_bytes()
    assert text in whole
    return whole.replace(text, text[:-1] + b"9" * 5000 + text[-1:])


FOUND: dict[str, tuple[str, bytes]] = {
    "long launcher": ("variants.toml", long(b'"attention/bwd_launch"')),
    "long family": ("variants.toml", long(b'family = "sm80"')),
    "long version file": ("variants.toml", long(b'"src/python/flashvar/_version.py"')),
    "long smoke test": ("variants.toml", long(b'smoke = "tests/smoke_installed.py"')),
    "long reason": ("yanked.toml", b'[flashvar]\n"0.1.0" = "' + b"9" * 5000 + b'"\n'),
    "long pair": ("variants.toml", long(b'"192x128"')),
    "deep arrays": ("variants.toml", b"a = " + b"[" * 5000),
    "deep tables": ("variants.toml", b"a = " + b"{a=" * 5000),
    "large integer": ("variants.toml", b"schema = " + b"9" * 5000),
    "deep yanks": ("yanked.toml", b"a = " + b"[" * 5000),
    "deep JSON": ("manifest", b"[" * 100_000),
    "deep GPU record": ("GPU record", b"[" * 100_000),
    "NUL in a commit": ("GPU record", json.dumps(RUN).replace("HEAD", r"\u0000").encode()),
    "commit that is a number": ("GPU record", json.dumps(RUN).replace('"HEAD"', "7").encode()),
    "deep hashes": ("hashes of a release", b"[" * 100_000),
    "hashes of a list": ("hashes of a release", b'{"tag": "v1", "files": [1]}'),
    "deep answer": ("answer of an index", b"[" * 100_000),
    "deep SBOM": ("SBOM", b"[" * 100_000),
    "container of zeros": ("fatbin", fatbin.START + bytes(8) + fatbin.START + bytes(72)),
    "no input": ("sdist", b""),
    "gzip that ends in a name": ("sdist", b"\x1f\x8b\x08\x08" + bytes(6)),
    "gzip that ends in a comment": ("index of an sdist", b"\x1f\x8b\x08\x10" + bytes(6)),
}


@pytest.mark.parametrize(("name", "content"), FOUND.values(), ids=FOUND)
def test_what_was_found(name: str, content: bytes, tmp_path: Path) -> None:
    read_or_refused(READERS[name][1], content, tmp_path)
