"""A record of an op's tests stands for them where only that op's own sources changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_artifacts
import pytest

from flashvar_factory.config import schema
from flashvar_factory.release import gpu_records, own_sources
from flashvar_factory.release.gpu_records import RecordNeed, RecordResult, Since
from flashvar_factory.release.gpu_runs import Binary, GpuRun

ROOT = Path(__file__).parents[3]
MANIFEST = fake_artifacts.complete(schema.read(ROOT / schema.FILE_NAME), "sm_90")
NEED = RecordNeed("sm_90", ("CMakeLists.txt", "cmake", "src/cuda", "variants.toml"), (MANIFEST,))
OPS = ("attention", "causal_conv1d", "gated_delta_rule", "merge_states")
CONV = "src/cuda/causal_conv1d/sums.cuh"
MERGE = "src/cuda/merge_states/row.cuh"
OF_CONV = ("tests/gpu/test_causal_conv1d.py", "tests/gpu/test_causal_conv1d_update.py")
NEW = "tests/gpu/test_causal_conv1d_tiles.py"
TESTS = (*OF_CONV, "tests/gpu/test_merge_states.py", "tests/gpu/record.py")

BINARY = Binary(
    kind="sm_90",
    code_kinds=("sass", "ptx"),
    version="0.1.0+ptx",
    revision="whole",
    dirty=False,
    sources="1" * 64,
    toolkit=MANIFEST.toolkit.machine_code,
)
WHOLE = GpuRun(
    file="whole.json",
    device="H100",
    platform="linux_x86_64",
    kind="sm_90",
    forced=False,
    native=True,
    complete=True,
    chosen=(),
    seed=7,
    passed={"cuda": 24},
    tests={
        ("test_attention_bias.py", "cuda"): 5,
        ("test_causal_conv1d.py", "cuda"): 4,
        ("test_causal_conv1d.py", "other"): 3,
        ("test_causal_conv1d_random.py", "cuda"): 5,
        ("test_causal_conv1d_update.py", "cuda"): 2,
        ("test_gated_delta_rule.py", "cuda"): 2,
        ("test_merge_states.py", "cuda"): 3,
    },
    failed=0,
    added_up=True,
    binaries=(BINARY,),
)
PART = replace(
    WHOLE,
    file="part.json",
    chosen=OF_CONV,
    tests={row: count for row, count in WHOLE.tests.items() if "conv1d" in row[0]},
    binaries=(replace(BINARY, revision="part"),),
)
OF_MERGE = replace(
    PART,
    file="merge.json",
    chosen=("tests/gpu/test_merge_states.py",),
    tests={("test_merge_states.py", "cuda"): 3},
)


def since(*common: str, **own: tuple[str, ...]) -> Since:
    return Since(touched=True, by_op=own, common=common, tests=TESTS, tests_now=(*TESTS, NEW))


CHANGED = {"whole": since(causal_conv1d=(CONV,)), "part": since()}


def judge(*records: GpuRun, **changed: Since | None) -> RecordResult:
    return gpu_records.result(NEED, WHOLE, [WHOLE, *records], {**CHANGED, **changed})


def test_a_record_of_the_op_that_changed_is_enough() -> None:
    found = judge(PART)
    assert found.reason is None
    assert found.parts == (PART,)
    assert judge(PART, whole=since()).parts == ()


def test_a_file_of_tests_may_be_newer_than_the_binary() -> None:
    assert judge(replace(PART, chosen=(*OF_CONV, NEW))).reason is None
    assert judge(replace(PART, chosen=(NEW,))).reason is not None


@pytest.mark.parametrize(("ran", "counts"), [("own", False), ("ptx", True)])
def test_a_translated_run_is_none_of_the_machine_code(ran: str, counts: bool) -> None:
    need = replace(NEED, released=(replace(MANIFEST, ran=ran),))
    whole = replace(WHOLE, native=False, forced=True)
    reason = gpu_records.result(need, whole, [whole], {"whole": since()}).reason
    expected = "the driver translated its PTX, and variants.toml says ran = 'own'"
    assert reason == (None if counts else expected)


def test_random_cases_may_be_fewer() -> None:
    row = ("test_causal_conv1d_random.py", "cuda")
    assert judge(replace(PART, tests={**PART.tests, row: 3})).reason is None
    without = {other: count for other, count in PART.tests.items() if other != row}
    assert judge(replace(PART, tests=without)).reason is not None


def test_a_later_record_of_all_tests_stands_for_those_of_an_op() -> None:
    later = replace(WHOLE, file="later.json", binaries=PART.binaries)
    found = judge(later, part=since(merge_states=(MERGE,)))
    assert (found.reason, found.parts) == (None, (later,))


def test_every_op_that_changed_needs_a_record() -> None:
    both = since(causal_conv1d=(CONV,), merge_states=(MERGE,))
    found = judge(PART, whole=both)
    assert found.ops_to_rerun == ("merge_states",)
    assert found.reason == (
        f"{MERGE}, which only merge_states uses, changed after its commit: a record of the tests "
        "of merge_states is enough, found none"
    )
    assert judge(PART, OF_MERGE, whole=both).parts == (PART, OF_MERGE)


def test_nothing_but_records_of_ops_is_no_record() -> None:
    since = {"part": CHANGED["part"]}
    assert gpu_records.result(NEED, PART, [PART], since).reason == "it did not run all tests"


def without(file: str) -> dict[str, Any]:
    return {"tests": {row: count for row, count in PART.tests.items() if row[0] != file}}


REFUSED: dict[str, tuple[Mapping[str, Any], str]] = {
    "failures": ({"failed": 2}, "2 of its tests failed"),
    "shard": ({"complete": False}, "did not run all tests that were chosen"),
    "translated": ({"native": False}, "it ran otherwise than whole.json"),
    "platform": ({"platform": "linux_aarch64"}, "it ran otherwise than whole.json"),
    "fewer": (
        {"tests": {**PART.tests, ("test_causal_conv1d.py", "other"): 2}},
        "2 tests of test_causal_conv1d.py other passed, 3 before",
    ),
    "no file": (
        without("test_causal_conv1d_update.py"),
        "0 tests of test_causal_conv1d_update.py cuda passed, 2 before",
    ),
    "sum": ({"added_up": False}, "its counts differ"),
    "no binary": ({"binaries": ()}, "it names no binary"),
    "other binary": (
        {"binaries": (replace(PART.binaries[0], kind="sm_80"),)},
        "it names no binary",
    ),
    "no commit": ({"binaries": (replace(BINARY, revision=None),)}, "was not built from a commit"),
    "dirty": ({"binaries": (replace(BINARY, dirty=True),)}, "was not built from a commit"),
    "nvcc": (
        {"binaries": (replace(BINARY, revision="part", toolkit="12.9"),)},
        "was made by nvcc 12.9",
    ),
    "file not chosen": ({"chosen": OF_CONV[:1]}, f"{OF_CONV[1]} was not chosen"),
    "keyword": (
        {"chosen": ("-k forward", *OF_CONV)},
        "not just files of its commit or of HEAD, once each: -k",
    ),
    "one test": ({"chosen": (f"{OF_CONV[0]}::test_it", OF_CONV[1])}, f"{OF_CONV[0]} was not"),
    "one test more": ({"chosen": (*OF_CONV, f"{OF_CONV[0]}::test_it")}, "not just files"),
    "file twice": (
        {"chosen": (*OF_CONV, OF_CONV[0])},
        "not just files of its commit or of HEAD, once each",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_record_of_an_op_that_is_none(fault: str) -> None:
    changes, words = REFUSED[fault]
    found = judge(replace(PART, **changes))
    assert found.reason is not None
    assert f"found part.json: {words}" in found.reason or words in found.reason
    assert found.ops_to_rerun == ("causal_conv1d",)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (None, "commit part is not in this clone"),
        (since(causal_conv1d=(CONV,)), f"{CONV} changed after its commit part"),
        (since("src/cuda/core/math.cuh"), "src/cuda/core/math.cuh changed after its commit part"),
    ],
    ids=["unknown", "own", "common"],
)
def test_sources_changed_since_the_record_of_an_op(changed: Since | None, words: str) -> None:
    found = judge(PART, part=changed)
    assert found.reason is not None
    assert f"found part.json: {words}" in found.reason


def test_other_changes_make_a_record_stale() -> None:
    found = judge(PART, whole=since("variants.toml", causal_conv1d=(CONV,)))
    assert found.reason == "variants.toml changed after its commit whole"
    assert found.ops_to_rerun == ()


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("src/cuda/causal_conv1d/sums.cuh", "causal_conv1d"),
        ("src/cuda/sm80/attention/fwd.cuh", "attention"),
        ("src/cuda/sm90/attention/deeper/fwd.cuh", "attention"),
        ("src/cuda/abi/merge_states.h", "merge_states"),
        ("src/cuda/abi/gated_delta_rule_fwd.cc", "gated_delta_rule"),
        ("src/cuda/abi/attention.cc", None),
        ("src/cuda/abi/error.cc", None),
        ("src/cuda/abi/attention/x.h", None),
        ("src/cuda/attention.cuh", None),
        ("src/cuda/sm80/gemm.cuh", None),
        ("src/cuda/sm80/new/attention/fwd.cuh", None),
        ("src/cuda/attention/CMakeLists.txt", None),
        ("cmake/attention/x.cc", None),
    ],
)
def test_op_of_a_source(name: str, op: str | None) -> None:
    assert own_sources.owners([name], [], OPS).get(name) == op


def test_a_name_that_two_ops_begin_is_neithers() -> None:
    name = "src/cuda/abi/norm_rms_fwd.cc"
    assert own_sources.owners([name], [], ["norm", "norm_rms"]) == {}


SUMS = "src/cuda/causal_conv1d/sums.cuh"
TOKENS = "src/cuda/causal_conv1d/tokens.cuh"
ROW = "src/cuda/merge_states/row.cuh"


@pytest.mark.parametrize(
    ("file", "line", "own"),
    [
        (TOKENS, '#include "causal_conv1d/sums.cuh"', {SUMS, TOKENS, ROW}),
        (ROW, '#include "causal_conv1d/sums.cuh"', {ROW}),
        ("src/cuda/core/x.h", '#  include "../causal_conv1d/sums.cuh"', {ROW}),
        ("src/cuda/core/x.h", "#include <sums.cuh>", {ROW}),
        ("src/cuda/core/x.h", "#include_next <sums.cuh>", {ROW}),
        ("src/cuda/core/x.h", '#include "ums.cuh"', {SUMS, TOKENS, ROW}),
        ("src/cuda/core/x.h", "#include NAME", set()),
        (ROW, "#include NAME", {ROW}),
        ("cmake/x.cmake", "# include(x)", {SUMS, TOKENS, ROW}),
        ("cmake/x.cmake", 'file(WRITE x.cu "#include <causal_conv1d/sums.cuh>")', {ROW}),
    ],
)
def test_an_op_whose_files_others_include_has_none_of_its_own(
    file: str, line: str, own: set[str]
) -> None:
    included = own_sources.includes([(file, line)], OPS)
    assert set(own_sources.owners([SUMS, TOKENS, ROW], included, OPS)) == own


HEADER = "src/cuda/core/clusters.h"


@pytest.mark.parametrize(
    ("lines", "op"),
    [
        ([(SUMS, '#include "core/clusters.h"')], "causal_conv1d"),
        (
            [(SUMS, '#include "core/clusters.h"'), (TOKENS, "#include <clusters.h>")],
            "causal_conv1d",
        ),
        ([], None),
        ([(SUMS, '#include "core/clusters.h"'), (ROW, '#include "core/clusters.h"')], None),
        ([(SUMS, '#include "core/clusters.h"'), (ROW, "#include NAME")], None),
        ([(SUMS, '#include "core/clusters.h"'), ("src/cuda/core/x.h", "#include NAME")], None),
        ([("src/cuda/core/x.h", '#include "core/clusters.h"')], None),
        # Other code depends on the op's files, and so may depend on the header.
        ([(SUMS, '#include "core/clusters.h"'), (ROW, '#include "causal_conv1d/sums.cuh"')], None),
    ],
)
def test_a_header_that_one_op_alone_includes_is_its_own(
    lines: list[tuple[str, str]], op: str | None
) -> None:
    included = own_sources.includes(lines, OPS)
    for name, found in ((HEADER, op), (HEADER.replace(".h", ".cc"), None)):
        assert own_sources.owners([SUMS, TOKENS, ROW, name], included, OPS).get(name) == found


LAUNCHER = "src/cuda/sm90/attention/fwd_launch.cuh"


def test_a_launcher_of_another_op_is_an_include(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = [("src/cuda/core/x.h", '#include "core/y.h"')]
    monkeypatch.setattr(gpu_records.source, "lines", lambda *_: lines)
    monkeypatch.setattr(gpu_records.source, "files", lambda *_: [LAUNCHER])
    text = (ROOT / schema.FILE_NAME).read_text(encoding="utf-8")
    made = text.replace('launcher = "merge_states/fwd_launch"', 'launcher = "attention/fwd_launch"')
    assert made != text
    (tmp_path / "src").symlink_to(ROOT / "src")
    for name, content in {"as it is": text, "with another": made}.items():
        (tmp_path / schema.FILE_NAME).write_text(content, encoding="utf-8")
        assert bool(gpu_records.owners(tmp_path, NEED)) == (name == "as it is")


def test_files_that_are_gone_may_have_been_included(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [("src/cuda/core/x.h", '#include "gone.cuh"')]
    monkeypatch.setattr(gpu_records.source, "lines", lambda *_: lines)
    monkeypatch.setattr(gpu_records.source, "files", lambda *_: [CONV])
    assert gpu_records.owners(ROOT, NEED) == {CONV: "causal_conv1d"}
    assert gpu_records.owners(ROOT, NEED, ["src/cuda/causal_conv1d/gone.cuh"]) == {}


OLD, NEW_ONE, OTHER = "src/cuda/old/mma.cuh", "src/cuda/new/wgmma.cuh", "src/cuda/other/x.cuh"
CORE = "src/cuda/core/x.h"
FAMILIES = ("old", "new", "other")


@pytest.mark.parametrize(
    ("family", "lines", "others"),
    [
        ("new", [], {"old", "other"}),
        ("new", [(NEW_ONE, '#include "old/mma.cuh"')], {"other"}),
        ("old", [(NEW_ONE, '#include "old/mma.cuh"')], {"new", "other"}),
        ("old", [(CORE, '#include "new/wgmma.cuh"')], {"other"}),
        ("old", [(CORE, "#include <wgmma.cuh>")], {"other"}),
        ("old", [(OTHER, '#include "new/wgmma.cuh"')], {"new", "other"}),
        ("old", [(OLD, '#include "../other/x.cuh"'), (OTHER, '#include "wgmma.cuh"')], set()),
        ("old", [(OLD, "#include NAME")], set()),
        # "core/x.h" is found in src/cuda, where compilers search; that of "new" is not.
        ("old", [(OLD, '#include "core/x.h"')], {"new", "other"}),
        ("old", [(OLD, '#include "y.h"')], {"other"}),
    ],
)
def test_families_that_a_binary_does_not_include(
    family: str, lines: list[tuple[str, str]], others: set[str]
) -> None:
    names = [OLD, NEW_ONE, OTHER, CORE, "src/cuda/new/core/x.h", "src/cuda/new/y.h"]
    assert own_sources.other_families(names, lines, family, FAMILIES) == others


@pytest.mark.parametrize(
    ("name", "family"), [(OLD, "old"), ("src/cuda/old.cuh", None), ("cmake/old/x.cc", None)]
)
def test_family_of_a_source(name: str, family: str | None) -> None:
    assert own_sources.family_of(name, FAMILIES) == family


@pytest.mark.parametrize(
    ("lines", "family"),
    [
        ([(NEW_ONE, '#include "core/x.h"')], "new"),
        ([(NEW_ONE, '#include "core/x.h"'), (OLD, "#include <x.h>")], None),
        ([(NEW_ONE, '#include "core/x.h"'), ("src/cuda/core/y.h", '#include "x.h"')], None),
        ([(NEW_ONE, '#include "core/y.h"')], None),
    ],
)
def test_a_header_that_one_family_alone_includes_is_its_own(
    lines: list[tuple[str, str]], family: str | None
) -> None:
    found = own_sources.of_families([CORE, OLD, "src/cuda/core/x.cc"], lines, FAMILIES)
    assert found == {OLD: "old", **({CORE: family} if family else {})}


def test_wgmma_kernels_concern_no_binary_of_mma_sync() -> None:
    foreign = gpu_records.foreign_sources(ROOT, replace(NEED, name="sm_80"))
    assert "src/cuda/ptx/wgmma.cuh" in foreign
    assert "src/cuda/ptx/mma_sync.cuh" not in foreign
    folders = {name.split("/")[2] for name in foreign}
    assert folders <= {"sm90", "ptx", "core"}
    assert gpu_records.foreign_sources(ROOT, NEED) == set()
    assert gpu_records.foreign_sources(ROOT, replace(NEED, name="triton")) == set()


def test_a_change_of_another_family_leaves_a_record_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it changes the hash of all sources, which the record has."""
    need = replace(NEED, name="sm_80", released=())
    changed = ["src/cuda/sm90/gemm.cuh"]
    monkeypatch.setattr(gpu_records.source, "touched", lambda *_: changed)
    monkeypatch.setattr(gpu_records.source, "has_other_code", lambda *_: True)
    found = gpu_records._since(ROOT, need, "HEAD")
    assert found is not None
    assert (found.common, found.by_op, found.touched) == ((), {}, True)
