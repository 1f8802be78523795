from __future__ import annotations

import pytest
from simulated import kernel

from flashvar.binaries.variant import Architecture, Kernel


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
