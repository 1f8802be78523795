"""From variants.toml and words to builds; adding something is one line in that file."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
from matrix import CONFIG, TEXT

from flashvar.errors import ConfigurationError
from flashvar.machine import driver
from flashvar_factory.config import extras, schema, this_machine, version
from flashvar_factory.config.expand import Build, expand, select_all, select_dev
from flashvar_factory.config.schema import Config
from flashvar_factory.config.selection_arguments import parse

ROOT = Path(__file__).parents[3]
SHIPPED = schema.read(ROOT / "variants.toml")


def released(config: Config, words: str = "") -> tuple[Build, ...]:
    return expand(config, select_all(parse(words.split(), config), config))


def developed(words: str, *capabilities: this_machine.Capability) -> tuple[Build, ...]:
    return expand(CONFIG, select_dev(parse(words.split(), CONFIG), CONFIG, capabilities))


@pytest.mark.parametrize("config", [CONFIG, SHIPPED], ids=["these tests'", "the project's"])
def test_everything_is_every_architecture_by_every_value_of_every_axis(config: Config) -> None:
    builds = released(config)
    here = [
        name
        for name, target in config.targets.items()
        if this_machine.PROCESSOR in target.platforms
    ]
    assert [build.kind.name for build in builds] == here
    for build in builds:
        for op in config.default_ops:
            mine = [kernel.words for kernel in build.kernels if kernel.function == op]
            axes = [tuple(word.removeprefix("hdim") for word in words.values()) for words in mine]
            values = config.defaults[op]
            whole = itertools.product(
                *(map(str, values[axis.name]) for axis in config.ops[op].axes)
            )
            assert sorted(axes) == sorted(whole)
        assert build.code_kinds == ("sass",)


def test_kernel_axes_follow_the_order_of_the_op() -> None:
    kernel = released(CONFIG, "sm80 hdim=64 dtype=fp16")[0].kernels[0]
    assert kernel.axes == (("dtype", "fp16"), ("head_dim", 64))
    assert kernel.name == "attention_fwd_fp16_hdim64"


def test_dev_takes_its_defaults_without_a_device() -> None:
    (build,) = developed("")
    assert build.target.architecture.name == "sm_80"
    assert [kernel.name for kernel in build.kernels] == [
        "attention_fwd_bf16_hdim64",
        "attention_fwd_fp16_hdim64",
    ]


NATIVE = {
    "exact": ([(8, 9)], ["sm_89"]),
    "highest lower minor": ([(8, 8)], ["sm_86"]),
    "architecture-specific is exact": ([(9, 0)], ["sm_90"]),
    "two kinds of device": ([(9, 0), (8, 0)], ["sm_80", "sm_90"]),
    "one of two served": ([(12, 0), (8, 6)], ["sm_86"]),
}


@pytest.mark.parametrize(("capabilities", "names"), NATIVE.values(), ids=NATIVE)
def test_native(capabilities: list[this_machine.Capability], names: list[str]) -> None:
    builds = developed("arch=native", *capabilities)
    assert [build.target.architecture.name for build in builds] == names


def test_native_that_nothing_serves_lists_what_there_is() -> None:
    with pytest.raises(ConfigurationError, match=r"found compute capability 12\.0") as caught:
        developed("", (12, 0))
    assert "sm_80, sm_86, sm_89, sm_90" in str(caught.value)


LABELS = {
    "": "1.0",
    "hdim=64": "1.0+hdim64",
    "hdim=64,128": "1.0+hdim64.hdim128",
    "hdim=64 dtype=bf16": "1.0+bf16.hdim64",
    "hdim=all dtype=all op=all": "1.0",
    "hdim=256,192,128,96,64,32": "1.0",
    "hdim=72 dtype=bf16": "1.0+bf16.hdim72",
    "ptx=1": "1.0+ptx",
}


@pytest.mark.parametrize("words", LABELS)
def test_a_subset_carries_a_local_version_label(words: str) -> None:
    (build,) = released(CONFIG, f"sm89 {words}")
    assert version.of_build("1.0", build, CONFIG) == LABELS[words]


def test_values_that_are_another_op_s_defaults_carry_a_label_too() -> None:
    """All values of either op, but more than the first has by itself."""
    text = TEXT.replace("[ops.att", f"{TWO_OPS}[ops.att").replace('ops = ["', 'ops = ["add", "')
    config = schema.parse(text)
    (build,) = released(config, "sm80 hdim=32,64,96,128,192,256,512")
    assert version.of_build("1.0", build, config).startswith("1.0+hdim32.hdim64.")
    (build,) = released(config, "sm80 op=add")
    assert version.of_build("1.0", build, config) == "1.0+add"


TWO_OPS = """\
[ops.add.axes]
head_dim = { min = 8, max = 512, step = 8 }
[defaults.add]
head_dim = [512, 64]
"""
SAID = {
    "": (12, [512, 64]),
    "hdim=all": (12, [512, 64]),
    "hdim=64": (2, [64]),
    "hdim=512,72": (2, [72, 512]),
    "hdim=512": (0, [512]),
}


@pytest.mark.parametrize("words", SAID)
def test_each_op_has_its_own_values_and_limits(words: str) -> None:
    text = TEXT.replace("[ops.att", f"{TWO_OPS}[ops.att").replace('ops = ["', 'ops = ["add", "')
    (build,) = released(schema.parse(text), f"sm80 {words}")
    adds = [kernel.axis("head_dim") for kernel in build.kernels if kernel.function == "add"]
    assert (len(build.kernels) - len(adds), adds) == SAID[words]


def test_a_word_of_another_op_is_refused() -> None:
    text = TEXT.replace("[ops.att", f"{TWO_OPS}[ops.att").replace('ops = ["', 'ops = ["add", "')
    with pytest.raises(ConfigurationError, match="dtype=bf16: expected an axis of op=add"):
        parse(["op=add", "dtype=bf16"], schema.parse(text))


def test_a_value_that_sources_round_up_is_not_built() -> None:
    """Its functions would be those of another kernel, which the audit does not accept."""
    (build,) = released(SHIPPED, "sm80 hdim=32")
    functions = {kernel.function for kernel in build.kernels}
    found = {name for name in functions if name.startswith("gated_delta_rule")}
    assert found == {"gated_delta_rule_update"}


def test_version_without_its_line_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="__version__"):
        version.read(CONFIG, tmp_path)


def test_an_architecture_is_one_line() -> None:
    line = (
        'sm_87 = { code = "87", family = "sm80", shared_memory = 166912, '
        'distribution = "flashvar-sm87" }\n'
    )
    config = schema.parse(TEXT.replace("sm_89 = {", line + "sm_89 = {"))
    assert [build.distribution for build in released(config)].count("flashvar-sm87") == 1
    assert "sm87" in extras.extras(config, "1.0")
    (build,) = released(config, "sm87")
    assert len(build.kernels) == 12


def test_a_head_dim_is_one_line() -> None:
    config = schema.parse(TEXT.replace("96, 128, 192", "96, 112, 128, 192"))
    names = [kernel.name for build in released(config) for kernel in build.kernels]
    assert names.count("attention_fwd_bf16_hdim112") == 4
    assert parse(["hdim=112"], config).axes == {"head_dim": (112,)}


def test_no_cuda_driver_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(sys.modules["flashvar.machine.driver"].ctypes, "CDLL", refuse)
    driver._library.cache_clear()
    assert this_machine.capabilities() == ()
    driver._library.cache_clear()


def test_kernels_of_one_name_are_refused() -> None:
    """A choice of one axis may end like another choice, whose next axis begins like that."""
    text = TEXT.replace('["bf16", "fp16"]', '["a", "a_b"]').replace(
        "head_dim = [32", 'order = ["c", "b_c"]\nhead_dim = [32'
    )
    text = text.replace("head_dim = {", 'order = { choices = ["c", "b_c"] }\nhead_dim = {')
    with pytest.raises(ConfigurationError, match="attention_fwd_a_b_c_hdim32 for") as caught:
        released(schema.parse(text), "sm80")
    assert "'order': 'b_c'" in str(caught.value)
    assert "'dtype': 'a_b'" in str(caught.value)
