"""The readers of ELF files and of device code, on files whose every byte is known."""

from __future__ import annotations

import sys
from pathlib import Path

import fake_artifacts
import fake_elf
import pytest
from fake_artifacts import Image, Library
from fake_elf import CUDA, X86_64, Section

from flashvar_factory.audit import platform_tag
from flashvar_factory.audit.platform_tag import Version
from flashvar_factory.errors import BuildError, ToolchainError
from flashvar_factory.inspect import cubin, dynamic, elf, fatbin
from flashvar_factory.inspect.archive import Name
from flashvar_factory.inspect.dynamic import Undefined


def read(*images: Image) -> list[fatbin.Image]:
    return fatbin.images(memoryview(fake_artifacts.fatbin(*images)), "lib.so")


@pytest.mark.parametrize("code", ["80", "90", "90a", "100f", "120"])
def test_architecture(code: str) -> None:
    (image,) = read(Image(code, b"x"))
    assert (image.kind, image.code) == ("sass", code)


@pytest.mark.parametrize("compression", ["zstd", None])
def test_image_is_opened(compression: str | None) -> None:
    content = bytes(range(256)) * 20
    (image,) = read(Image("80", content, compression=compression))
    assert image.compression == compression
    assert image.opened_bytes == len(content)
    assert image.opened() == content
    assert (len(image.stored) < len(content)) == (compression is not None)


def test_lz4_stays_closed() -> None:
    (image,) = read(Image("80", b"not really lz4", compression="lz4"))
    assert image.compression == "lz4"
    assert image.opened() is None


def test_kinds_and_containers_in_a_row() -> None:
    first = fake_artifacts.fatbin(Image("80", b"machine code"), fake_artifacts.ptx())
    second = fake_artifacts.fatbin(Image("90a", b"machine code"))
    found = fatbin.images(memoryview(first + bytes(16) + second + bytes(4)), "lib.so")
    assert [(image.kind, image.code) for image in found] == [
        ("sass", "80"),
        ("ptx", "80"),
        ("sass", "90a"),
    ]


@pytest.mark.parametrize("keep", [3, 15, 40, 79, 100])
def test_device_code_cut_short(keep: int) -> None:
    whole = memoryview(fake_artifacts.fatbin(Image("80", b"x" * 64, compression=None)))
    with pytest.raises(BuildError, match="cut short"):
        fatbin.images(whole[:keep], "lib.so")


def test_something_else_where_device_code_should_be() -> None:
    with pytest.raises(BuildError, match=r"expected device code at byte 0 .* found 0x01010101"):
        fatbin.images(memoryview(b"\1" * 64), "lib.so")


def test_damaged_compression() -> None:
    content = bytearray(fake_artifacts.fatbin(Image("80", b"x" * 1000)))
    content[80:84] = b"\0\0\0\0"
    (image,) = fatbin.images(memoryview(content), "lib.so")
    with pytest.raises(BuildError, match="expected device code compressed by zstd"):
        image.opened()


def test_without_the_library_that_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    (image,) = read(Image("80", b"x"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ToolchainError, match="pip install auditwheel zstandard"):
        image.opened()


def test_without_what_knows_platform_tags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "auditwheel", None)
    name = Name("x", "1", "py3-none-any", None)
    with pytest.raises(ToolchainError, match="pip install auditwheel zstandard"):
        platform_tag.ask(tmp_path / "x.whl", name)


@pytest.mark.parametrize("abi", [7, 8], ids=lambda abi: f"ABI {abi}")
@pytest.mark.parametrize("number", [75, 90, 120])
def test_cubin(number: int, abi: int) -> None:
    content = memoryview(fake_artifacts.cubin({"_Zb": 640, "_Za" + "x" * 500: 768}, number, abi))
    held = cubin.read(content, "x")
    assert held.number == number
    assert [one[:2] for one in held.functions] == [("_Za" + "x" * 500, 768), ("_Zb", 640)]


def test_what_a_cubin_states_of_its_kernels() -> None:
    content = fake_artifacts.cubin(
        {"_Za": 640}, 90, code="90a", toolkit="13.0.88", registers=200, stack=16, threads=384
    )
    found = cubin.read(memoryview(content), "x")
    assert (found.code, found.toolkit, found.stack) == ("90a", "13.0.88", 16)
    assert found.functions == (cubin.Function("_Za", 640, 200, 384),)


def test_a_library_is_no_cubin() -> None:
    with pytest.raises(BuildError, match="expected a cubin, found an ELF file for machine 62"):
        cubin.read(memoryview(fake_elf.elf(X86_64, [])), "x")


def test_reserved_memory_is_described_for_the_second_assembler() -> None:
    # ptxas for 11.0 writes bytes into a section whose kind has none in a plain cubin.
    described = Section(".nv.merc.nv.shared.reserved.0", 0x70000015, b"\1" * 128, 0, 1 << 28)
    flags = 0x6000004 | 110 << 8
    read = cubin.read(memoryview(fake_elf.elf(CUDA, [described], flags, 8)), "x")
    assert read.number == 110
    plain = described._replace(name=".nv.shared.reserved.0", flags=0)
    with pytest.raises(BuildError, match="expected a cubin of sections alone"):
        cubin.read(memoryview(fake_elf.elf(CUDA, [plain], flags, 8)), "x")


def test_dynamic_facts() -> None:
    built = Library(
        exported=("flashvar_b", "flashvar_a"),
        fatbin=b"",
        kernels=(),
        needed=("libc.so.6", "libtorch.so"),
        run_path="/opt/lib",
        undefined=(("malloc", "GLIBC_2.2.5"), ("dlopen", "GLIBC_2.34"), ("PyErr_Clear", None)),
    ).build()
    found = dynamic.read(elf.parse(built, "lib.so"), "lib.so")
    assert found.machine == "x86_64"
    assert found.needed == ("libc.so.6", "libtorch.so")
    assert found.run_paths == ("/opt/lib",)
    assert found.exported == ("flashvar_a", "flashvar_b")
    assert found.undefined == (
        Undefined("malloc", False, "GLIBC_2.2.5"),
        Undefined("dlopen", False, "GLIBC_2.34"),
        Undefined("PyErr_Clear", False, None),
    )


def test_nothing_dynamic() -> None:
    found = dynamic.read(elf.parse(fake_elf.elf(183, []), "x"), "x")
    assert found == dynamic.Dynamic("aarch64", None, (), (), (), False, (), (), (), ())


def test_damaged_dynamic_tables() -> None:
    table = Section(".dynsym", 11, b"\xff" * 24, 1)
    broken = fake_elf.elf(62, [Section(".dynstr", 3, b"\0"), table])
    with pytest.raises(BuildError, match="expected whole dynamic tables"):
        dynamic.read(elf.parse(broken, "x"), "x")


@pytest.mark.parametrize(
    ("tag", "version"),
    [
        ("manylinux_2_28_x86_64", (2, 28)),
        ("manylinux2014_aarch64", (2, 17)),
        ("manylinux1_x86_64", (2, 5)),
        ("linux_x86_64", None),
        ("any", None),
        ("musllinux_1_2_x86_64", None),
    ],
)
def test_glibc_of_a_tag(tag: str, version: Version | None) -> None:
    assert platform_tag.glibc_of_tag(tag) == version


@pytest.mark.parametrize(
    ("symbol", "version"),
    [("GLIBC_2.34", (2, 34)), ("GLIBC_2.2.5", (2, 2)), ("GCC_3.0", None), (None, None)],
)
def test_glibc_of_a_symbol(symbol: str | None, version: Version | None) -> None:
    assert platform_tag.glibc_of_symbol(symbol) == version
