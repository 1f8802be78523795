"""An axis whose kernels may have two integers: from variants.toml and words to C++ and manifest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matrix import TEXT

from flashvar.binaries.kinds import Kernel
from flashvar.errors import ConfigurationError
from flashvar_factory.build import configure
from flashvar_factory.config import schema, version
from flashvar_factory.config.axes import BuildAxis
from flashvar_factory.config.expand import Build, expand, select_all
from flashvar_factory.config.selection_arguments import parse
from flashvar_factory.toolchain.nvcc import Toolchain

ROOT = Path(__file__).parents[3]
PAIRS = TEXT.replace("step = 8 }", "step = 8, pairs = true }").replace(
    "192, 256]", '192, 256, "192x128"]'
)
CONFIG = schema.parse(PAIRS)
AXIS = BuildAxis("size", integers=range(8, 257, 8), pairs=True)


def build_of(words: str) -> Build:
    (build,) = expand(CONFIG, select_all(parse(words.split(), CONFIG), CONFIG))
    return build


def test_the_pair_is_one_more_value() -> None:
    names = [kernel.name for kernel in build_of("sm80").kernels]
    assert len(names) == 14
    assert names[6] == "attention_fwd_bf16_hdim192x128"
    assert CONFIG.axes["head_dim"][-1] == "192x128"


def test_a_kernel_has_both_integers() -> None:
    (kernel,) = build_of("sm80 hdim=192x128 dtype=bf16").kernels
    assert kernel.axes == (("dtype", "bf16"), ("head_dim", 192), ("head_dim_v", 128))
    assert kernel.words == {"dtype": "bf16", "head_dim": "hdim192x128"}


REFUSED_VALUES = ["192x192", "192x132", "264x128", "192x", "x128", "192X128", "0192x128", "1x2x3"]


@pytest.mark.parametrize("value", [*REFUSED_VALUES, "192", " 192x128"])
def test_what_is_no_pair_of_the_axis(value: str) -> None:
    assert not AXIS.accepts(value)
    with pytest.raises(ConfigurationError) as caught:
        schema.parse(PAIRS.replace('"192x128"', f'"{value}"'))
    for part in ("defaults.head_dim", '8 to 256 in steps of 8, or two different ones as "256x8"'):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "enough"),
    [
        ("190x128", "192x128"),
        ("65x64", "72x64"),
        ("66x65", 72),
        ("65", 72),
        ("264x128", None),
        ("64x300", None),
        ("sixty", None),
    ],
)
def test_what_holds_a_pair(asked: str, enough: int | str | None) -> None:
    assert AXIS.enough(asked) == enough


def test_the_second_may_be_the_larger() -> None:
    assert AXIS.accepts("64x256")
    assert AXIS.entries("64x256") == (("size", 64), ("size_v", 256))


def test_pairs_have_to_be_allowed() -> None:
    with pytest.raises(ConfigurationError, match=r"steps of 8, found '192x128'"):
        schema.parse(TEXT.replace("192, 256]", '192, 256, "192x128"]'))


KEYS = {
    "no truth": ("pairs = true", "pairs = 1", "head_dim.pairs: expected true or false, found 1"),
    "of choices": ('"fp16"] }', '"fp16"], pairs = true }', "dtype.pairs: unknown key"),
    "of one integer": ("min = 8, max = 256", "min = 8, max = 8", "at least two integers to pair"),
    "the second's own axis": (
        "[architectures]",
        "[ops.attention_fwd.axes.head_dim_v]\nmin = 8\nmax = 256\nstep = 8\n[architectures]",
        "head_dim_v: expected another name than that of the second integer of head_dim's pairs",
    ),
}


@pytest.mark.parametrize(("before", "after", "message"), KEYS.values(), ids=KEYS)
def test_mistakes_in_the_axis(before: str, after: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        schema.parse(PAIRS.replace(before, after, 1))
    assert message in str(caught.value)


def test_false_is_the_same_as_nothing() -> None:
    assert schema.parse(TEXT.replace("step = 8 }", "step = 8, pairs = false }")) == schema.parse(
        TEXT
    )


WORDS = {
    "hdim=192x128": ("192x128",),
    "hdim=256,192x128,192,64": (64, 192, "192x128", 256),
    "hdim=96x64,64x96": ("64x96", "96x64"),
}


@pytest.mark.parametrize("text", WORDS)
def test_words(text: str) -> None:
    assert parse([text], CONFIG).axes == {"head_dim": WORDS[text]}


@pytest.mark.parametrize("value", REFUSED_VALUES)
def test_words_that_are_refused(value: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse([f"hdim={value}"], CONFIG)
    assert f"head_dim={value}: expected an integer from 8 to 256" in str(caught.value)
    assert "192, 256, 192x128" in str(caught.value)


def test_a_misspelt_pair_has_a_neighbor() -> None:
    with pytest.raises(ConfigurationError, match="did you mean '192x128'"):
        parse(["hdim=192x127"], CONFIG)


LABELS = {
    "": "1.0",
    "hdim=192x128": "1.0+hdim192x128",
    "hdim=32,64,96,128,192,256": "1.0+hdim32.hdim64.hdim96.hdim128.hdim192.hdim256",
    "hdim=192": "1.0+hdim192",
    "dtype=fp16 hdim=192,192x128": "1.0+fp16.hdim192.hdim192x128",
}


@pytest.mark.parametrize("words", LABELS)
def test_version_label(words: str) -> None:
    assert version.of_build("1.0", build_of(f"sm89 {words}"), CONFIG) == LABELS[words]


def test_what_is_generated(tmp_path: Path) -> None:
    toolchain = Toolchain(Path("/cuda/bin/nvcc"), "13.0.88", None, "PATH")
    build = build_of("sm80 hdim=192,192x128 dtype=bf16")
    configure.configure(CONFIG, build, toolchain, root=ROOT, directory=tmp_path)
    name = "attention_fwd_bf16_hdim192x128"
    instance = (tmp_path / "instances" / f"{name}.cu").read_text(encoding="utf-8")
    assert "sm80::AttentionFwdLaunch<Target<80, 166912>, dtype::bf16, 192, 128>;" in instance
    assert f'Launch_{name}::facts("{name}")' in instance
    table = (tmp_path / "attention_fwd_kernels.inc").read_text(encoding="utf-8")
    assert f"{{&attention_fwd_bf16_hdim192, &{name}, nullptr}};" in table
    rows = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["kernels"]
    assert rows[1]["axes"] == {"dtype": "bf16", "head_dim": 192, "head_dim_v": 128}
    assert [Kernel(row["op"], tuple(row["axes"].items())) for row in rows] == list(build.kernels)
