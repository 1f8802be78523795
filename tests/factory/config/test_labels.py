"""Builds with different kernels have different version labels, whatever a project calls things."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from matrix import TEXT

from flashvar.errors import ConfigurationError
from flashvar_factory.config import schema, version
from flashvar_factory.config.expand import expand, select_all
from flashvar_factory.config.selection_arguments import parse

Axes = Mapping[str, list[str | int]]


def text_of(axes: Axes, *more_ops: str) -> str:
    """The tests' variants.toml with one op `scan` of these axes, and others without axes."""
    head, _, rest = TEXT.partition("[defaults]")
    declared = "\n".join(f"{name} = {declaration(values)}" for name, values in axes.items())
    defaults = "\n".join(f"{name} = {values!r}" for name, values in axes.items())
    others = "\n".join(f"[ops.{op}.axes]" for op in more_ops)
    ops = ["scan", *more_ops]
    _, _, architectures = rest.partition("[architectures]")
    architectures = architectures.replace("head_dim = [64]\n", "")
    return (
        f"{head}[defaults]\nops = {ops!r}\n{defaults}\n[ops.scan.axes]\n{declared}\n{others}\n"
        f"[architectures]{architectures}"
    )


def declaration(values: list[str | int]) -> str:
    """An axis that takes these values: choices, or every integer up to the largest."""
    if isinstance(values[0], str):
        return f"{{ choices = {values!r} }}"
    return f"{{ min = 1, max = {values[-1]}, step = 1 }}"


def label(config: schema.Config, words: str) -> str:
    (build,) = expand(config, select_all(parse(["sm80", *words.split()], config), config))
    return version.of_build("1.0", build, config).partition("+")[2]


CASES: dict[str, tuple[Axes, dict[str, str]]] = {
    "choices of two axes": (
        {"dtype": ["fp32", "fp16"], "weight_dtype": ["fp32", "complex64"]},
        {
            "dtype=fp32": "dtypefp32",
            "weight_dtype=fp32": "weightdtypefp32",
            "weight_dtype=complex64": "weightdtypecomplex64",
            "dtype=fp32 weight_dtype=fp32": "dtypefp32.weightdtypefp32",
        },
    ),
    "apart": (
        {"dtype": ["fp32", "fp16"], "mode": ["causal", "full"]},
        {"dtype=fp32": "fp32", "mode=full": "full"},
    ),
    "integers with one short name": (
        {"row_dim": [1, 2], "rank_dim": [1, 2]},
        {"row_dim=1": "rowdim1", "rank_dim=1": "rankdim1"},
    ),
    "a choice like an integer": (
        {"head_dim": [1, 2], "kind": ["hdim1", "other"]},
        {"hdim=1": "headdim1", "kind=hdim1": "kindhdim1"},
    ),
    "a choice like a function": (
        {"kind": ["scan", "other"]},
        {"kind=scan": "kindscan"},
    ),
    "a choice like PTX": (
        {"kind": ["ptx", "other"]},
        {"kind=ptx": "kindptx", "ptx=1": "ptx"},
    ),
}


@pytest.mark.parametrize(("axes", "labels"), CASES.values(), ids=CASES)
def test_a_label_has_one_meaning(axes: Axes, labels: dict[str, str]) -> None:
    config = schema.parse(text_of(axes))
    assert {words: label(config, words) for words in labels} == labels


@pytest.mark.parametrize("axes", [axes for axes, _ in CASES.values()], ids=CASES)
def test_no_two_selections_share_a_label(axes: Axes) -> None:
    config = schema.parse(text_of(axes))
    given = [["", *(f"{name}={value}" for value in values)] for name, values in axes.items()]
    words = [" ".join(filter(None, each)) for each in itertools.product(*given, ["", "ptx=1"])]
    assert len({label(config, each) for each in words}) == len(words)


@pytest.mark.parametrize(
    ("axes", "ops", "found"),
    [
        ({}, ["add_x", "addx"], "found addx for the function add_x and for the function addx"),
        ({}, ["ptx"], "found ptx for PTX and for the function ptx"),
        (
            {"k": [1, 11], "k1": [1, 2]},
            [],
            "found k1 for the axis k and for the axis k1",
        ),
        (
            {"tile_x": ["a", "b"], "tilex": ["a", "c"]},
            [],
            "found tilexa for the axis tile_x and for the axis tilex",
        ),
    ],
    ids=["functions", "a function like PTX", "integers behind integers", "axes"],
)
def test_names_that_no_label_tells_apart(axes: Axes, ops: list[str], found: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        schema.parse(text_of(axes, *ops))
    assert "variants.toml: ops: expected names that the labels of versions tell apart" in str(
        caught.value
    )
    assert found in str(caught.value)
