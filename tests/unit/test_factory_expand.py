"""From variants.toml and words to builds; adding something is one line in that file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flashvar.errors import ConfigurationError
from flashvar_factory import extras, native, schema, version
from flashvar_factory.expand import Build, expand, select_all, select_dev
from flashvar_factory.schema import Config
from flashvar_factory.words import parse

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "variants.toml").read_text(encoding="utf-8")
CONFIG = schema.parse(TEXT)


def released(config: Config, words: str = "") -> tuple[Build, ...]:
    return expand(config, select_all(parse(words.split(), config), config))


def developed(words: str, *capabilities: native.Capability) -> tuple[Build, ...]:
    return expand(CONFIG, select_dev(parse(words.split(), CONFIG), CONFIG, capabilities))


def test_everything_is_four_architectures_by_six_head_dims_by_two_dtypes() -> None:
    builds = released(CONFIG)
    assert [build.architecture.name for build in builds] == ["sm_80", "sm_86", "sm_89", "sm_90"]
    for build in builds:
        axes = {(kernel.axis("head_dim"), kernel.axis("dtype")) for kernel in build.kernels}
        assert axes == {(d, t) for d in (32, 64, 96, 128, 192, 256) for t in ("bf16", "fp16")}
        assert len(build.kernels) == 12
        assert build.code_kinds == ("sass",)


def test_kernel_axes_follow_the_order_of_the_op() -> None:
    kernel = released(CONFIG, "sm80 hdim=64 dtype=fp16")[0].kernels[0]
    assert kernel.axes == (("dtype", "fp16"), ("head_dim", 64))
    assert kernel.name == "attention_fwd_fp16_hdim64"


def test_dev_takes_its_defaults_without_a_device() -> None:
    (build,) = developed("")
    assert build.architecture.name == "sm_80"
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
def test_native(capabilities: list[native.Capability], names: list[str]) -> None:
    builds = developed("arch=native", *capabilities)
    assert [build.architecture.name for build in builds] == names


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
    "ptx=1": "1.0+ptx",
}


@pytest.mark.parametrize("words", LABELS)
def test_a_subset_carries_a_local_version_label(words: str) -> None:
    (build,) = released(CONFIG, f"sm89 {words}")
    assert version.of_build("1.0", build, CONFIG) == LABELS[words]


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


def test_extras_are_one_per_architecture_and_all() -> None:
    found = extras.extras(CONFIG, "1.2.3")
    assert list(found) == ["sm80", "sm86", "sm89", "sm90", "all"]
    assert found["sm89"][0].startswith("flashvar-sm89==1.2.3; ")
    assert found["all"] == [requirement for name in list(found)[:4] for requirement in found[name]]


def test_no_cuda_driver_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(sys.modules["flashvar_factory.native"].ctypes, "CDLL", refuse)
    assert native.capabilities() == ()
