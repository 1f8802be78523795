from __future__ import annotations

import pytest
from fakes import kernel

from flashvar.binaries.kinds import Architecture, BinaryKind, Kernel


@pytest.mark.parametrize(
    ("text", "name", "code", "extra"),
    [
        ("sm_90", "sm_90", "90", "sm90"),
        ("90a", "sm_90", "90a", "sm90"),
        ("sm_90a", "sm_90", "90a", "sm90"),
        ("sm89", "sm_89", "89", "sm89"),
        ("120", "sm_120", "120", "sm120"),
        ("8.9", "sm_89", "89", "sm89"),
        ("12.0", "sm_120", "120", "sm120"),
    ],
)
def test_architecture_spellings(text: str, name: str, code: str, extra: str) -> None:
    architecture = Architecture.parse(text)
    assert (architecture.name, architecture.code, architecture.extra) == (name, code, extra)


@pytest.mark.parametrize("code", ["89", "90a", "120"])
def test_what_people_say_is_understood(code: str) -> None:
    architecture = Architecture.parse(code)
    assert {Architecture.parse(one).name for one in architecture.spellings} == {architecture.name}
    assert len(set(architecture.spellings)) == (7 if architecture.specific else 4)


def test_last_digit_is_the_minor() -> None:
    assert Architecture.parse("sm_121").capability == (12, 1)


@pytest.mark.parametrize(
    "text", ["", "9", "sm_", "sm_9.0", "90b", "hopper", " 90", "090", "SM_90", "8.10"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected an architecture"):
        Architecture.parse(text)


def test_architectures_sort_by_number_not_by_text() -> None:
    codes = ["120", "90a", "86", "100", "80"]
    assert [a.code for a in sorted(map(Architecture.parse, codes))] == [
        "80",
        "86",
        "90a",
        "100",
        "120",
    ]


@pytest.mark.parametrize(
    ("axes", "name"),
    [
        ((("dtype", "bf16"), ("head_dim", 64)), "op_bf16_hdim64"),
        ((("dtype", "fp16"),), "op_fp16"),
        ((("page_size", 16), ("mode", "paged")), "op_page_size16_paged"),
        ((), "op"),
        ((("dtype", "bf16"), ("head_dim", 192), ("head_dim_v", 128)), "op_bf16_hdim192x128"),
        ((("size", 2), ("size_v", 1), ("step", 3)), "op_size2x1_step3"),
        ((("size", 2), ("step", 3), ("size_v", 1)), "op_size2_step3_size_v1"),
        ((("size", 2), ("size_v", "b")), "op_size2_b"),
    ],
)
def test_kernel_names(axes: tuple[tuple[str, str | int], ...], name: str) -> None:
    assert Kernel("op", axes).name == name


@pytest.mark.parametrize(
    ("code", "capability", "runs"),
    [
        ("80", (8, 0), True),
        ("80", (8, 9), True),
        ("86", (8, 0), False),
        ("80", (9, 0), False),
        ("90a", (9, 0), True),
        ("90a", (9, 1), False),
    ],
)
def test_code_runs_on_higher_minors_of_its_major(
    code: str, capability: tuple[int, int], runs: bool
) -> None:
    assert Architecture.parse(code).runs_on(capability) is runs


def test_kernel_axis_is_looked_up_by_name() -> None:
    kernel = Kernel("op", (("dtype", "bf16"), ("head_dim", 64)))
    assert kernel.axis("head_dim") == 64
    with pytest.raises(KeyError):
        kernel.axis("mode")


@pytest.mark.parametrize(
    ("axes", "values"),
    [
        ((("head_dim", 192), ("head_dim_v", 128)), {"head_dim": "192x128"}),
        (
            (("head_dim", 192), ("page", 16), ("head_dim_v", 128)),
            {"head_dim": "192", "page": "16", "head_dim_v": "128"},
        ),
        ((("mode", "a"), ("mode_v", 2)), {"mode": "a", "mode_v": "2"}),
    ],
)
def test_kernels_and_their_rows_read_pairs_alike(
    axes: tuple[tuple[str, str | int], ...], values: dict[str, str]
) -> None:
    """The integers of a pair follow each other."""
    assert Kernel("decode", axes).values == values
    held = kernel("decode", **dict(axes)).values
    texts = {k: "x".join(map(str, v)) if isinstance(v, tuple) else str(v) for k, v in held.items()}
    assert texts == values


@pytest.mark.parametrize(
    ("code", "runs", "not_on"),
    [
        ("87", [(8, 7)], [(8, 6), (8, 9), (8, 0)]),
        ("80", [(8, 0), (8, 6), (8, 9)], [(8, 7), (9, 0)]),
        ("86", [(8, 6), (8, 9)], [(8, 7), (8, 0)]),
        ("100", [(10, 0), (10, 3)], [(10, 1), (12, 0)]),
        ("110", [(11, 0)], [(10, 0), (11, 1)]),
        ("120", [(12, 0), (12, 1)], [(11, 0)]),
    ],
)
def test_code_for_tegra_and_other_code_do_not_mix(
    code: str, runs: list[tuple[int, int]], not_on: list[tuple[int, int]]
) -> None:
    architecture = Architecture.parse(code)
    assert [one for one in runs if not architecture.runs_on(one)] == []
    assert [one for one in not_on if architecture.runs_on(one)] == []


@pytest.mark.parametrize("text", ["sm_89-cu12", "sm89-cu12", "8.9-cu12", "89-cu12"])
def test_a_kind_is_an_architecture_and_a_cuda(text: str) -> None:
    kind = BinaryKind.parse(text)
    assert kind == BinaryKind(Architecture(8, 9), 12)
    assert (kind.name, kind.extra) == ("sm_89-cu12", "sm89-cu12")
    assert text in kind.spellings
    assert kind < BinaryKind.parse("sm_89") < BinaryKind.parse("sm_90-cu12")


@pytest.mark.parametrize("text", ["sm_89-cu", "sm_89-12", "cu12", "sm_89-cu12-cu12", "sm_89-cu0"])
def test_what_is_no_kind(text: str) -> None:
    with pytest.raises(ValueError, match="expected an architecture"):
        BinaryKind.parse(text)


@pytest.mark.parametrize(
    ("name", "driver", "loads"),
    [
        ("sm_89", (13, 0), True),
        ("sm_89", (12, 9), False),
        ("sm_89-cu12", (12, 0), True),
        ("sm_89-cu12", (13, 2), True),
        ("sm_89-cu12", (11, 8), False),
        ("sm_89-cu12", None, False),
    ],
)
def test_a_driver_loads_what_is_not_newer(
    name: str, driver: tuple[int, int] | None, loads: bool
) -> None:
    assert BinaryKind.parse(name).runs_with(driver) is loads
