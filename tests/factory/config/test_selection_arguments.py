"""The words of a selection: short, checked, and with an error that lists what is valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from matrix import CONFIG

from flashvar.errors import ConfigurationError
from flashvar_factory.cli.selected import HELP
from flashvar_factory.config import names, schema
from flashvar_factory.config.selection_arguments import SelectionArguments, parse

ROOT = Path(__file__).parents[3]
SPOKEN = {
    "": SelectionArguments(),
    "hdim=64": SelectionArguments(axes={"head_dim": (64,)}),
    "head_dim=128,64": SelectionArguments(axes={"head_dim": (64, 128)}),
    "hdim=all": SelectionArguments(axes={"head_dim": ()}),
    "hdim=72,40": SelectionArguments(axes={"head_dim": (40, 72)}),
    "dtype=bf16 op=attention_fwd": SelectionArguments(
        ops=("attention_fwd",), axes={"dtype": ("bf16",)}
    ),
    "arch=native": SelectionArguments(targets=("native",)),
    "arch=sm_80,89": SelectionArguments(targets=("sm_80", "sm_89")),
    "sm89": SelectionArguments(targets=("sm_89",)),
    "flashvar-sm90": SelectionArguments(targets=("sm_90",)),
    "sm_80 sm_86": SelectionArguments(targets=("sm_80", "sm_86")),
    "sm80 hdim=64 sm90a,8.9": SelectionArguments(
        ("sm_80", "sm_90", "sm_89"), axes={"head_dim": (64,)}
    ),
    "arch=sm_80 89": SelectionArguments(targets=("sm_80", "sm_89")),
    "sm80, sm86": SelectionArguments(targets=("sm_80", "sm_86")),
    "jobs=2 80": SelectionArguments(targets=("sm_80",), jobs=2),
    "80 hdim=64": SelectionArguments(targets=("sm_80",), axes={"head_dim": (64,)}),
    "all": SelectionArguments(targets=tuple(CONFIG.targets)),
    "cache=sccache shard=2/3": SelectionArguments(cache="sccache", shard=(2, 3)),
    "ptx=1 jobs=3 toolkit=pypi": SelectionArguments(ptx=True, jobs=3, toolkit="pypi"),
}


def test_the_help_lists_every_key() -> None:
    assert set(names.SELECTION) - set(re.findall(r"\w+", HELP)) == set()


@pytest.mark.parametrize("text", SPOKEN)
def test_understood(text: str) -> None:
    assert parse(text.split(), CONFIG) == SPOKEN[text]


REFUSED = {
    f"jobs={'9' * 5000}": ["expected an integer above 0"],
    f"shard=1/{'9' * 5000}": ["expected i/n"],
    "hdmi=64": ["unknown key 'hdmi'", "did you mean 'hdim'", "dtype", "jobs"],
    "hdim=65": ["head_dim=65", "8 to 256 in steps of 8", "32, 64, 96", "did you mean '72'"],
    "hdim=63": ["did you mean '64'"],
    "hdim=1": ["did you mean '8'"],
    "hdim=065": ["did you mean '72'"],
    "hdim=6o4": ["did you mean '64'"],
    "hdim=al": ["did you mean 'all'"],
    "hdim 64": ["expected hdim=VALUE", "did you mean 'hdim=64'"],
    "HDIM=64": ["unknown key 'HDIM'", "did you mean 'hdim'"],
    "Head-Dim=64": ["unknown key 'Head-Dim'", "did you mean 'head_dim'"],
    "ARCH=sm80": ["did you mean 'arch'"],
    "hdim = 64": ["expected hdim=VALUE", "found no value", "did you mean 'hdim=64'"],
    "hdim =64": ["expected hdim=VALUE", "did you mean 'hdim=64'"],
    "hdim= 64": ["hdim=: expected a value after '=', found none", "did you mean 'hdim=64'"],
    "hdim= sm80": ["hdim=: expected a value after '=', found none"],
    "HDIM 64": ["HDIM: expected hdim=VALUE", "did you mean 'hdim=64'"],
    "hdim =": ["hdim: expected hdim=VALUE, found no value"],
    "hdim:64": ["hdim:64: expected hdim=VALUE, found a colon", "did you mean 'hdim=64'"],
    "hdim:": ["hdim:: expected hdim=VALUE, found a colon"],
    "HDIM:64,128 sm80": ["did you mean 'hdim=64,128'"],
    "sm80:64": ["unknown architecture 'sm80:64'"],
    "dtype=BF16": ["dtype=BF16", "did you mean 'bf16'"],
    "SM80": ["unknown architecture 'SM80'", "did you mean 'sm_80'"],
    "op=Attention_FWD": ["did you mean 'attention_fwd'"],
    "Native": ["did you mean 'native'"],
    "sm80 head_dim 64,128": ["did you mean 'head_dim=64,128'"],
    "jobs": ["expected jobs=VALUE", "found no value"],
    "hdim sm80": ["expected hdim=VALUE"],
    "hdim=64 128": ["128", "a value of hdim", "did you mean 'hdim=64,128'"],
    "hdim=64 80": ["80", "a value of hdim", "did you mean 'hdim=64,80'"],
    "hdim=64, 128": ["did you mean 'hdim=64,128'"],
    "dtype=bf16 fp16": ["did you mean 'dtype=bf16,fp16'"],
    "op=atention": ["expected attention, ", "attention_fwd", "did you mean 'attention'"],
    "op=attention_fwd attention": ["a value of op", "did you mean 'op=attention_fwd,attention'"],
    "op=attention_fwd attention_fwd": ["a value of op", "did you mean 'op="],
    "sm89 64,128": ["64,128", "a value of hdim", "did you mean 'hdim=64,128'"],
    "bf16": ["bf16", "a value of dtype", "did you mean 'dtype=bf16'"],
    "64,sm90": ["unknown architecture '64'"],
    "sm80 sm_80": ["once", "sm_80 again"],
    "all sm80": ["all sm80", "all alone"],
    "arch=all sm80": ["all alone"],
    ",": ["expected an architecture, found none"],
    "arch=sm80 arch=sm86": ["once, found it again"],
    "hdim=064": ["head_dim=064", "did you mean '64'"],
    "hdim=64,64": ["hdim=64,64", "once", "64 again"],
    "sm_80,flashvar-sm80": ["once", "sm_80 again"],
    "all,bogus": ["all,bogus", "all alone"],
    "dtype=bf16,all": ["dtype=bf16,all", "all alone"],
    "hdim=": ["hdim=", "expected a value"],
    "dtype=bf61": ["dtype=bf61", "did you mean 'bf16'"],
    "op=attention_fdw": ["did you mean 'attention_fwd'"],
    "arch=sm_79": ["unknown architecture 'sm_79'", "sm_80", "native", "all"],
    "sm98": ["unknown architecture 'sm98'"],
    "ptx=yes": ["ptx=yes", "0, 1"],
    "jobs=0": ["jobs=0", "above 0"],
    "jobs=many": ["jobs=many"],
    "toolkit=conda": ["toolkit=conda", "pypi"],
    "hdim=64 head_dim=32": ["once, found it again"],
    "cache=ccahce": ["cache=ccahce", "none, sccache, ccache"],
    "shard=3/2": ["shard=3/2", "from 1 to n"],
    "shard=0/2": ["shard=0/2"],
    "shard=1": ["shard=1", "e.g. 1/2"],
    "shard=1/2,2/2": ["shard=1/2,2/2"],
}


def test_an_op_is_all_of_its_functions() -> None:
    config = schema.read(ROOT / "variants.toml")
    attention = tuple(op for op in config.default_ops if op.startswith("attention_"))
    assert len(attention) == 2
    assert parse(["op=attention"], config).ops == attention
    assert parse(["op=merge_states_fwd,attention"], config).ops == (*attention, "merge_states_fwd")


def test_a_value_that_no_op_takes_with_the_others_is_an_error() -> None:
    config = schema.read(ROOT / "variants.toml")
    found = parse(["dtype=fp32,bf16", "hdim=64"], config).axes
    assert {name: set(values) for name, values in found.items()} == {
        "dtype": {"bf16", "fp32"},
        "head_dim": {64},
    }
    message = (
        "head_dim=64: expected an op that takes it together with dtype=fp32, found none: leave one "
        "of them out"
    )
    with pytest.raises(ConfigurationError, match=message):
        parse(["hdim=64,128", "dtype=fp32"], config)


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(text.split(), CONFIG)
    missing = [word for word in REFUSED[text] if word not in str(caught.value)]
    assert not missing, str(caught.value)


def test_limits_that_differ_name_their_ops() -> None:
    config = schema.read(ROOT / schema.FILE_NAME)
    with pytest.raises(ConfigurationError) as caught:
        parse(["hdim=70"], config)
    for limits in (
        "in steps of 64 (gated_delta_rule_fwd, gated_delta_rule_bwd); ",
        "in steps of 32 (gated_delta_rule_update), or 'all'",
    ):
        assert limits in str(caught.value)


@pytest.mark.parametrize("text", ["hdim=264", "hdim=264x128", "hdim=64x300"])
def test_what_nothing_serves_gets_no_advice(text: str) -> None:
    with pytest.raises(ConfigurationError, match="8 to 256") as caught:
        parse([text], CONFIG)
    assert "did you mean" not in str(caught.value)


def test_advice_serves_what_was_asked_for() -> None:
    (axis,) = [one for one in CONFIG.ops["attention_fwd"].axes if one.name == "head_dim"]
    for asked in range(1, 257):
        enough = axis.enough(str(asked))
        assert isinstance(enough, int)
        assert enough >= asked
        assert axis.accepts(enough)
        assert enough - asked < axis.integers.step
