"""The audit of real wheels: it agrees with NVIDIA's own tool, and catches every planted fault."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import fewer_ops
import pytest
from checkout import copied_sources

from flashvar.binaries import manifest
from flashvar_factory import audit
from flashvar_factory.audit import expectations
from flashvar_factory.config import schema
from flashvar_factory.config.expand import expand, select_all
from flashvar_factory.config.schema import Config, Target
from flashvar_factory.config.selection_arguments import SelectionArguments
from flashvar_factory.inspect import archive, elf, fatbin

Factory = Callable[..., "subprocess.CompletedProcess[str]"]
Files = dict[str, bytes]
Failing = Callable[..., tuple[int, set[str], str]]

ROOT = Path(__file__).parents[2]
CONFIG = schema.read(ROOT / "variants.toml")
# Those of this machine's processor.
HERE = {
    name: target
    for name, target in CONFIG.targets.items()
    if platform.machine() in target.platforms
}
LIBRARY = "flashvar_sm80/libflashvar_sm80.so"
MANIFEST = "flashvar_sm80/manifest.json"
# A kernel that compiles in two seconds.
WORDS = ("wheels", "op=merge_states_fwd", "dtype=bf16")

# The ABI of a binary around the device code of a real one; a fault is added at its end. WRAPPERS:
# what nvcc writes for each container of device code: magic and version, its address, no file.
SOURCE = """\
__asm__(".section .nv_fatbin,\\"a\\"\\ncontainers: .incbin \\"fatbin\\"\\n"
        ".section .nvFatBinSegment,\\"aw\\"\\n" WRAPPERS
        ".section .flashvar.kernels,\\"a\\"\\n.incbin \\"kernels\\"\\n.text\\n");
unsigned flashvar_abi_version(void) { return 2; }
const char* flashvar_build_info(void) { return BUILD_INFO; }
const char* flashvar_last_error(void) { return ""; }
int flashvar_merge_states_fwd(const void* params) { return params == 0; }
int flashvar_merge_states_bwd(const void* params) { return params == 0; }
"""
EXTRA_SYMBOL = "int flashvar_extra(void) { return 0; }\n"
# As the C++ of torch is called: c10::Error::what() const.
NEEDS_TORCH = """\
extern int torch(void) __asm__("_ZNK3c105Error4whatEv");
static int (*const volatile keep)(void) = torch;
static int use(void) { return keep(); }
static int (*const volatile use_it)(void) __attribute__((used)) = use;
"""
TORCH = """\
int torch(void) __asm__("_ZNK3c105Error4whatEv");
int torch(void) { return 0; }
"""
YOUNG_GLIBC = """\
extern int dlclose(void*);
static int (*const volatile keep)(void*) __attribute__((used)) = dlclose;
"""


class Built(NamedTuple):
    """The files of three real wheels of one kernel, by what is in them."""

    plain: Files  # sm_80
    other: Files  # sm_86
    ptx: Files  # sm_80, with PTX
    wheels: tuple[Path, Path, Path]
    tree: Path


@pytest.fixture(scope="module")
def built(factory: Factory, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built in a copy of the sources, so that the objects of whole wheels stay."""
    tree = copied_sources(tmp_path_factory.mktemp("project"), "merge_states")
    (tree / schema.FILE_NAME).write_text(fewer_ops.variants("merge_states"), encoding="utf-8")
    for output, words in (("sass", ["arch=sm_80,sm_86"]), ("ptx", ["arch=sm_80", "ptx=1"])):
        done = factory(tree, *WORDS, *words, "--output", str(tree / output))
        assert done.returncode == 0, done.stdout[-5000:]
    (plain,) = (tree / "sass").glob("flashvar_sm80-*.whl")
    (other,) = (tree / "sass").glob("flashvar_sm86-*.whl")
    (ptx,) = (tree / "ptx").glob("flashvar_sm80-*.whl")
    wheels = (plain, other, ptx)
    return Built(*(archive.read(wheel) for wheel in wheels), wheels, tree)


@pytest.fixture
def compiled(built: Built, tmp_path: Path) -> Callable[[str], bytes]:
    """`compiled(text)` is a library with real device code and the C of a fault."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")

    def compile_library(text: str) -> bytes:
        (tmp_path / "real.so").write_bytes(built.plain[LIBRARY])
        for file, section in (("fatbin", ".nv_fatbin"), ("kernels", ".flashvar.kernels")):
            (tmp_path / file).write_bytes(elf.section(tmp_path / "real.so", section) or b"")
        (tmp_path / "torch.c").write_text(TORCH, encoding="utf-8")
        info = re.search(rb'\{"architecture": [^}]*\}', built.plain[LIBRARY])
        assert info is not None
        section = memoryview((tmp_path / "fatbin").read_bytes())
        wrappers = [
            f".long 0x466243b1, 1\n.quad containers + {start}, 0\n"
            for start in fatbin.places(section, "fatbin")
        ]
        define = f"#define BUILD_INFO {json.dumps(info[0].decode())}\n"
        define += f"#define WRAPPERS {json.dumps(''.join(wrappers))}\n"
        (tmp_path / "library.c").write_text(define + SOURCE + text, encoding="utf-8")
        for command in (
            "-o libtorch.so -Wl,-soname,libtorch.so torch.c",
            "-o library.so library.c -Wl,--as-needed -L. -ltorch -ldl "
            "-Wl,-soname,libflashvar_sm80.so -Wl,-z,relro,-z,now -Wl,--build-id=none -s",
        ):
            arguments = [compiler, "-shared", "-fPIC", "-O1", *command.split()]
            subprocess.run(arguments, cwd=tmp_path, check=True)
        return (tmp_path / "library.so").read_bytes()

    return compile_library


def described(files: Files) -> Files:
    """The files with a manifest of the library as it is, so that nothing else is wrong."""
    document, library = json.loads(files[MANIFEST]), files[LIBRARY]
    document["library"]["bytes"] = len(library)
    before = document["library"]["sha256"]
    document["library"]["sha256"] = hashlib.sha256(library).hexdigest()
    (sbom,) = (name for name in files if name.endswith(".cdx.json"))
    bill = files[sbom].replace(before.encode(), document["library"]["sha256"].encode())
    return {**files, MANIFEST: written(document), sbom: bill}


def written(document: dict[str, Any]) -> bytes:
    """The manifest as the factory writes it."""
    return manifest.parse(json.dumps(document)).to_json().encode()


def pack(built: Built, files: Files, folder: Path) -> Path:
    """A wheel of these files, called as the real one."""
    path = folder / built.wheels[0].name
    (info,) = {name.partition("/")[0] for name in files if ".dist-info/" in name}
    archive.write(path, files, info)
    return path


@pytest.fixture(scope="module")
def failing(factory: Factory, built: Built) -> Failing:
    """`failing(wheel)` gives exit code, the checks that found a fault, and all that they said."""

    def audited(path: Path, *options: str) -> tuple[int, set[str], str]:
        done = factory(built.tree, "audit", str(path), "--json", *options)
        document, end = json.JSONDecoder().raw_decode(done.stdout)
        (report,) = document
        said = "\n".join(finding["message"] for finding in report["findings"])
        assert report["passed"] == (not report["findings"])
        assert ("found errors" in done.stdout[end:]) == (done.returncode != 0)
        return done.returncode, {finding["check"] for finding in report["findings"]}, said

    return audited


@pytest.mark.parametrize("number", [0, 1, 2], ids=["sm_80", "sm_86", "sm_80 and PTX"])
def test_nothing_against_a_real_wheel(number: int, built: Built, failing: Failing) -> None:
    assert failing(built.wheels[number]) == (0, set(), "")


@pytest.mark.parametrize("target", HERE.values(), ids=HERE)
def test_nothing_against_a_release(target: Target, dist: Path, configs: dict[str, Config]) -> None:
    config = configs[target.kind.name]
    (wheel,) = dist.glob(f"{target.distribution.replace('-', '_')}-*.whl")
    report = audit.audit(wheel, expectations.of(config))
    assert report.findings == ()
    assert report.architectures == (f"sm_{target.architecture.code}",)
    spent = {(key.function, key.axes) for key in report.ledger if key.kind == fatbin.SASS}
    (build,) = expand(config, select_all(SelectionArguments(targets=(target.kind.name,)), config))
    assert spent == {(kernel.function, kernel.axes) for kernel in build.kernels}


def test_nothing_against_the_harness(
    built: Built, compiled: Callable[[str], bytes], failing: Failing, tmp_path: Path
) -> None:
    files = described({**built.plain, LIBRARY: compiled("")})
    assert failing(pack(built, files, tmp_path)) == (0, set(), "")


def test_another_architecture(built: Built, failing: Failing, tmp_path: Path) -> None:
    other = built.other[LIBRARY.replace("80", "86")]
    files = described({**built.plain, LIBRARY: other})
    code, checks, said = failing(pack(built, files, tmp_path))
    assert (code, checks) == (6, {"architecture", "derived", "dynamic_section"})
    assert "expected machine code for sm_80 alone, found 1 images for sm_86" in said


def test_ptx(built: Built, failing: Failing, tmp_path: Path) -> None:
    files = described({**built.plain, LIBRARY: built.ptx[LIBRARY]})
    code, checks, said = failing(pack(built, files, tmp_path))
    assert (code, checks) == (6, {"derived", "ptx"})
    assert "expected no PTX, as the manifest says, found 1 images of it" in said


COMPILED = {
    "extra symbol": (
        EXTRA_SYMBOL,
        {"exports"},
        "expected no exported symbols but the ABI's, found flashvar_extra",
    ),
    "libtorch": (
        NEEDS_TORCH,
        {"dependencies", "platform"},
        "expected only the libraries of the C runtime, found libtorch.so, of torch",
    ),
    "glibc 2.34": (
        YOUNG_GLIBC,
        {"platform"},
        "found manylinux_2_34_x86_64 by auditwheel: dlclose of GLIBC_2.34; link against the stubs",
    ),
}


@pytest.mark.parametrize(("text", "wanted", "sentence"), COMPILED.values(), ids=COMPILED)
def test_what_a_linker_lets_in(
    text: str,
    wanted: set[str],
    sentence: str,
    built: Built,
    compiled: Callable[[str], bytes],
    failing: Failing,
    tmp_path: Path,
) -> None:
    library = compiled(text)
    if "GLIBC_2.34" in sentence and b"GLIBC_2.34\0" not in library:
        pytest.skip("the C library of this machine is older than 2.34")
    files = described({**built.plain, LIBRARY: library})
    code, checks, said = failing(pack(built, files, tmp_path))
    assert (code, checks) == (6, wanted)
    assert sentence in said


def test_tampered_record(built: Built, failing: Failing, tmp_path: Path) -> None:
    path = pack(built, built.plain, tmp_path)
    files = archive.read(path)
    files[LIBRARY] = files[LIBRARY][:-1] + b"\1"
    with zipfile.ZipFile(path, "w") as opened:
        for name, content in files.items():
            member = zipfile.ZipInfo(name)
            member.external_attr = 0o100644 << 16
            opened.writestr(member, content)
    code, checks, said = failing(path)
    assert (code, checks) == (6, {"record", "manifest", "sbom"})
    assert "the file was changed after the wheel was made" in said


def test_kernel_that_is_not_there(built: Built, failing: Failing, tmp_path: Path) -> None:
    document = json.loads(built.plain[MANIFEST])
    (row,) = document["kernels"]
    ghost = {**row, "dtype": "fp16", "name": "merge_states_fwd_fp16", "functions": ["_Zghost"]}
    document["kernels"].append(ghost)
    files = {**built.plain, MANIFEST: written(document)}
    code, checks, said = failing(pack(built, files, tmp_path))
    assert (code, checks) == (6, {"derived", "kernels"})
    assert "expected merge_states_fwd_fp16 in the library, as the manifest says" in said
    assert "expected the device functions of merge_states_fwd_fp16, found no _Zghost" in said


def test_over_budget(built: Built, failing: Failing) -> None:
    code, checks, said = failing(built.wheels[0], "--budget", "10000")
    assert (code, checks) == (6, {"budget"})
    assert "expected at most 10,000 bytes, found" in said


def test_truncated_zip(built: Built, failing: Failing, tmp_path: Path) -> None:
    path = tmp_path / built.wheels[0].name
    path.write_bytes(built.wheels[0].read_bytes()[:-100])
    code, checks, said = failing(path)
    assert (code, checks) == (6, {"archive"})
    assert "expected a whole zip archive" in said


def test_zip_that_leaves_its_folder(built: Built, failing: Failing, tmp_path: Path) -> None:
    path = pack(built, {**built.plain, "../outside": b""}, tmp_path)
    code, checks, said = failing(path)
    assert (code, checks) == (6, {"archive"})
    assert "expected a file with a portable path and mode, found a path with '..'" in said
    assert not (tmp_path / "outside").exists()


@pytest.fixture(scope="module")
def cuobjdump() -> Path:
    return Path(pytest.importorskip("triton").__file__).parent / "backends/nvidia/bin/cuobjdump"


def ask(*command: Path | str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


@pytest.mark.parametrize("number", [0, 1, 2], ids=["sm_80", "sm_86", "sm_80 and PTX"])
def test_cuobjdump_sees_the_same(
    number: int, built: Built, cuobjdump: Path, tmp_path: Path
) -> None:
    (library,) = audit.audit(built.wheels[number]).wheel.libraries
    file = tmp_path / "library.so"
    file.write_bytes(archive.read(built.wheels[number])[library.path])
    listed = re.findall(r"\.(sm_\w+)\.(cubin|ptx)$", ask(cuobjdump, "-lelf", file), re.MULTILINE)
    listed += re.findall(r"\.(sm_\w+)\.(cubin|ptx)$", ask(cuobjdump, "-lptx", file), re.MULTILINE)
    words = {fatbin.SASS: "cubin", fatbin.PTX: "ptx"}
    found = [(f"sm_{image.code}", words[image.kind]) for image in library.images]
    assert sorted(found) == sorted(listed)
    assert len(found) == (2 if number == 2 else 1)
    # Index, offset and size of a section, and at the end of the line its name.
    row = r"^\s+\w+\s+\w+\s+(\w+)\s.*PROGBITS.*\s\.text\.(\S+)$"
    code = {
        (name, int(size, 16))
        for size, name in re.findall(row, ask(cuobjdump, "-elf", file), re.MULTILINE)
    }
    assert code
    held = (function for image in library.images for function in image.functions or ())
    assert {(function.name, function.size) for function in held} == code
