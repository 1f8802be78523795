"""The C ABI of a real library, called without a GPU: what it refuses, and in which words."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from documented import ROOT, blocks

from flashvar.binaries import manifest as manifests

SIZE, ABI = 368, 2
OK, INVALID_ARGUMENT, NO_KERNEL, CUDA_ERROR = range(4)
# Offsets of fields in flashvar_attention_fwd_params (src/cuda/abi/*layout_check.cc).
STRUCT_SIZE, ABI_VERSION, DEVICE, WORKSPACE, WORKSPACE_SIZE = 0, 4, 8, 24, 32
Q, K, V, OUT = (40 + 32 * i for i in range(4))
# Of its problem, which begins at 176.
BATCH, SEQLEN_Q, TOTAL_Q, HEADS_Q, HEADS_KV, HEAD_DIM, HEAD_DIM_V = (
    176,
    184,
    200,
    216,
    220,
    224,
    228,
)
DTYPE, FLAGS, SCALE, SOFTCAP, WINDOW_LEFT, DROPOUT_P, BIAS_DTYPE = 232, 236, 240, 244, 248, 256, 260
CU_SEQLENS_Q, BIAS = 264, 312
POINTER = 4096  # is never followed

Change = Callable[[bytearray], object]


def put(layout: str, offset: int, value: float) -> Change:
    return lambda params: struct.pack_into(layout, params, offset, value)


def all_of(*changes: Change) -> Change:
    return lambda params: [change(params) for change in changes]


def params() -> bytearray:
    """One query and one key, with one head of 64; no pointer is followed."""
    made = bytearray(SIZE)
    for layout, offset, value in (
        *(("<I", STRUCT_SIZE, SIZE), ("<I", ABI_VERSION, ABI)),
        *(("<q", BATCH + 8 * i, 1) for i in range(3)),
        *(("<i", HEADS_Q, 1), ("<i", HEADS_KV, 1), ("<i", HEAD_DIM, 64), ("<f", SCALE, 1.0)),
        *(("<Q", tensor, POINTER) for tensor in (Q, K, V, OUT)),
    ):
        put(layout, offset, value)(made)
    return made


@pytest.fixture(scope="module")
def library(unpacked: Path) -> ctypes.CDLL:
    path = next(unpacked.glob("flashvar_sm*/*.so"))
    handle = ctypes.CDLL(str(path))
    handle.flashvar_last_error.restype = ctypes.c_char_p
    return handle


def call(library: ctypes.CDLL, given: bytes | None) -> tuple[int, str]:
    status = library.flashvar_attention_fwd(given)
    return status, library.flashvar_last_error().decode()


def explained(library: ctypes.CDLL, given: bytearray, size: int = 256) -> str:
    text = ctypes.create_string_buffer(b"?" * size, size)
    status = library.flashvar_attention_fwd_explain(bytes(given), text, ctypes.c_uint64(size))
    assert status == OK, library.flashvar_last_error()
    return text.value.decode()


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        pytest.param(put("<I", ABI_VERSION, 1), INVALID_ARGUMENT, "found ABI 1", id="ABI"),
        pytest.param(put("<I", STRUCT_SIZE, 336), INVALID_ARGUMENT, "(336 bytes)", id="short"),
        pytest.param(put("<q", BATCH, -1), INVALID_ARGUMENT, "found batch -1", id="batch"),
        pytest.param(put("<q", SEQLEN_Q, 2**40), INVALID_ARGUMENT, "0 to 1073740800", id="seqlen"),
        pytest.param(put("<i", HEADS_Q, 0), INVALID_ARGUMENT, "found 0 and 1", id="heads"),
        pytest.param(put("<i", HEADS_KV, 2), INVALID_ARGUMENT, "found 1 and 2", id="group"),
        pytest.param(
            put("<i", HEAD_DIM, 12), INVALID_ARGUMENT, "found 12 and 12 for values", id="head dim"
        ),
        pytest.param(
            put("<f", SCALE, float("nan")), INVALID_ARGUMENT, "must be finite", id="scale"
        ),
        pytest.param(
            put("<i", HEAD_DIM, 264), NO_KERNEL, "head_dim 264 / 264; this", id="no kernel"
        ),
        pytest.param(put("<i", HEAD_DIM_V, 264), NO_KERNEL, "head_dim 64 / 264; this", id="values"),
        pytest.param(put("<i", HEAD_DIM_V, -8), INVALID_ARGUMENT, "64 and -8 for", id="value dim"),
        pytest.param(put("<I", FLAGS, 16), INVALID_ARGUMENT, "found 0x10", id="flags"),
        pytest.param(
            all_of(put("<Q", CU_SEQLENS_Q, POINTER), put("<q", TOTAL_Q, -1)),
            *(INVALID_ARGUMENT, "found total_q -1"),
            id="packed rows",
        ),
        pytest.param(
            all_of(put("<Q", CU_SEQLENS_Q, POINTER), put("<Q", BIAS, POINTER)),
            *(INVALID_ARGUMENT, "bias must be NULL with cu_seqlens_q"),
            id="packed bias",
        ),
        pytest.param(put("<I", BIAS_DTYPE, 2), INVALID_ARGUMENT, "found 2", id="bias dtype"),
        pytest.param(put("<f", DROPOUT_P, 0.5), INVALID_ARGUMENT, "0.5 without rng", id="no rng"),
        pytest.param(put("<f", DROPOUT_P, 1.0), INVALID_ARGUMENT, "below 1", id="dropout"),
        pytest.param(put("<f", SOFTCAP, -1.0), INVALID_ARGUMENT, "found -1", id="softcap"),
        pytest.param(
            all_of(put("<I", FLAGS, 2), put("<i", WINDOW_LEFT, -3)),
            *(INVALID_ARGUMENT, "found -3 and 0"),
            id="window",
        ),
        pytest.param(put("<I", DTYPE, 9), NO_KERNEL, "for dtype 9", id="no dtype"),
        pytest.param(put("<i", DEVICE, 64), INVALID_ARGUMENT, "found 64", id="device"),
        pytest.param(
            put("<Q", WORKSPACE, POINTER + 8),
            *(INVALID_ARGUMENT, "workspace must have 0 bytes, aligned to 256"),
            id="workspace",
        ),
    ],
)
def test_bad_parameters_are_refused_in_words(
    change: Change, status: int, words: str, library: ctypes.CDLL
) -> None:
    changed = params()
    change(changed)
    found, message = call(library, bytes(changed))
    assert found == status
    assert words in message


def test_null_is_refused(library: ctypes.CDLL) -> None:
    assert call(library, None)[0] == INVALID_ARGUMENT


@pytest.mark.parametrize("offset", [BATCH, SEQLEN_Q], ids=["batch", "queries"])
def test_nothing_to_write_needs_no_device(offset: int, library: ctypes.CDLL) -> None:
    empty = params()
    put("<q", offset, 0)(empty)
    assert call(library, bytes(empty))[0] == OK


def test_no_packed_rows_need_no_device(library: ctypes.CDLL) -> None:
    empty = params()
    put("<Q", CU_SEQLENS_Q, POINTER)(empty)
    assert call(library, bytes(empty))[0] == OK


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_size_of_the_workspace_needs_no_device(varlen: bool, library: ctypes.CDLL) -> None:
    given, size = params(), ctypes.c_uint64(1)
    if varlen:
        put("<Q", CU_SEQLENS_Q, POINTER)(given)
        put("<q", TOTAL_Q, 1)(given)
    ask = library.flashvar_attention_fwd_workspace
    assert ask(bytes(given), ctypes.byref(size)) == OK
    # The tile scheduler of the wgmma kernels has a counter.
    one_family = "every call" in rules(library)
    assert size.value == (0 if one_family or not varlen else 256)


def rules(library: ctypes.CDLL) -> list[str]:
    manifest = manifests.read(Path(library._name).with_name(manifests.FILE_NAME))
    return [rule.when for rule in manifest.kernels[0].rules]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("<Q", Q, POINTER + 2), "q: its address is 2 bytes beyond a multiple of 16"),
        (put("<Q", OUT, POINTER + 2), "out: its address is 2 bytes beyond a multiple of 16"),
        (put("<q", K + 24, 65), "k: its heads stride, 65, is no multiple of 8"),
        (put("<q", V + 16, 68), "v: its sequence stride, 68, is no multiple of 8"),
        (put("<q", Q + 8, 4), "q: its batch stride, 4, is no multiple of 8"),
    ],
    ids=["address", "last address", "heads", "sequence", "batch"],
)
def test_explains_what_is_not_aligned(change: Change, words: str, library: ctypes.CDLL) -> None:
    given = params()
    change(given)
    assert explained(library, given).startswith("mma.sync: ")
    assert explained(library, given).endswith(words)


def test_explains_a_plain_call(library: ctypes.CDLL) -> None:
    given = params()
    told = explained(library, given)
    assert re.fullmatch("(wgmma|mma\\.sync): .+", told)
    assert explained(library, given, 8) == told[:7]
    assert explained(library, given, 1) == ""


def test_explains_no_call_that_it_refuses(library: ctypes.CDLL) -> None:
    given = params()
    put("<i", HEADS_Q, 0)(given)
    text = ctypes.create_string_buffer(8)
    ask = library.flashvar_attention_fwd_explain
    assert ask(bytes(given), text, ctypes.c_uint64(8)) == INVALID_ARGUMENT


@pytest.mark.parametrize(("tail", "status"), [(0, OK), (1, INVALID_ARGUMENT)], ids=["0", "asks"])
def test_newer_caller_may_ask_for_nothing_new(tail: int, status: int, library: ctypes.CDLL) -> None:
    newer = params()
    put("<q", BATCH, 0)(newer)
    put("<I", STRUCT_SIZE, SIZE + 8)(newer)
    found, message = call(library, bytes(newer) + bytes([0] * 7 + [tail]))
    assert found == status
    assert status == OK or f"must be 0, found 1 in byte {SIZE + 7}" in message


def test_a_machine_without_a_driver_is_told_so(library: ctypes.CDLL) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        status, message = call(library, bytes(params()))
        assert status == CUDA_ERROR
        assert "no usable NVIDIA driver" in message
    else:
        pytest.skip("this machine has a driver, and the pointers of this call lead nowhere")


def test_the_call_of_the_page(unpacked: Path, tmp_path: Path) -> None:
    """The C of docs/abi.md, compiled and linked: no batch is served, less than none is not."""
    (block,) = (one for one in blocks(ROOT / "docs" / "abi.md") if one.language == "c")
    (tmp_path / "page.c").write_text(block.text, encoding="utf-8")
    library = next(unpacked.glob("flashvar_sm*/*.so"))
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler is not None
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    files = [str(tmp_path / "page.c"), str(library), f"-Wl,-rpath,{library.parent}"]
    include = ["-I", str(ROOT / "src" / "cuda" / "abi")]
    made = tmp_path / "page.so"
    subprocess.run([compiler, *flags, *include, *files, "-o", str(made)], check=True)
    page, none = ctypes.CDLL(str(made)), ctypes.c_void_p()

    def sizes(batch: int, length: int) -> tuple[ctypes.c_int64, ctypes.c_int64, ctypes.c_int32]:
        return ctypes.c_int64(batch), ctypes.c_int64(length), ctypes.c_int32(1)

    def attend(batch: int) -> int:
        return int(page.attend(*[none] * 4, *sizes(batch, 64), none, ctypes.c_uint64(0), none))

    def workspace(batch: int, length: int) -> tuple[int, int]:
        found = ctypes.c_uint64(7)
        return page.attend_workspace(*sizes(batch, length), ctypes.byref(found)), found.value

    assert (attend(0), attend(-1)) == (0, 1)
    assert workspace(-1, 64)[0] == 1
    assert workspace(500, 64) == (0, 0)
    # A single head leaves most of a device idle, unless its keys are divided.
    status, needed = workspace(1, 8192)
    assert status == 0
    assert needed > 0
