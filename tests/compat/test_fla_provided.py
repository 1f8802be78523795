"""What flashvar's stand-in for flash-linear-attention has for other packages."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashvar.compat import fla as ours
from flashvar.compat.fla import delta_rule
from flashvar.errors import IntegrationError, NotProvidedError


@pytest.fixture(autouse=True)
def _provided() -> Iterator[None]:
    if importlib.util.find_spec("fla") is not None:
        pytest.skip("flash-linear-attention is installed")
    ours.provide()
    yield
    ours.uninstall()


IMPORTS = (
    "from fla import GatedDeltaNet",
    "from fla.layers.utils import get_unpad_data, index_first_axis, pad_input",
    "from fla.modules import FusedRMSNormGated, L2Norm, RMSNorm, ShortConvolution",
    "from fla.modules.causal_conv1d.ops import ShortConvolution, causal_conv1d",
    "from fla.modules.conv.causal_conv1d import causal_conv1d",
    "from fla.modules.conv.short_conv import ShortConvolution",
    "from fla.modules.convolution import causal_conv1d, causal_conv1d_update",
    "from fla.modules.fused_norm_gate import FusedRMSNormGated, rms_norm_gated",
    "from fla.modules.l2norm import l2_norm, l2norm",
    "from fla.modules.layernorm import RMSNorm, rms_norm",
    "from fla.modules.norm import FusedRMSNormGated, L2Norm, RMSNorm",
    "from fla.modules.norm.fused_norm_gate import FusedRMSNormGated, rms_norm_gated",
    "from fla.modules.norm.l2norm import l2_norm, l2norm",
    "from fla.modules.norm.layernorm import RMSNorm, rms_norm",
    "from fla.ops.delta_rule.chunk import chunk_delta_rule",
    "from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule",
    "from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule",
)


@pytest.mark.parametrize("statement", IMPORTS)
def test_what_others_import(statement: str) -> None:
    names: dict[str, Any] = {}
    exec(statement, names)
    assert all(one.__module__.startswith("flashvar.") for one in map(names.get, _names(statement)))


@pytest.mark.parametrize(
    ("statement", "asked"),
    [
        ("from fla.modules import RMSNorm, LayerNorm", "fla.modules"),
        ("from fla.ops import chunk_kda", "fla.ops"),
        ("from fla.ops.kda import chunk_kda", "fla.ops.kda"),
        ("import fla.models", "fla.models"),
    ],
)
def test_what_is_missing_says_whose_it_is(statement: str, asked: str) -> None:
    with pytest.raises(NotProvidedError, match="is not in flashvar's stand-in for fla") as caught:
        exec(statement, {})
    assert caught.value.name == asked
    assert not hasattr(importlib.import_module("fla.modules"), "LayerNorm")


def _names(statement: str) -> list[str]:
    return statement.split(" import ")[1].split(", ")


@pytest.mark.parametrize("name", ["install", "register"])
def test_nothing_is_replaced_in_a_stand_in(name: str) -> None:
    ops = importlib.import_module("fla.ops.gated_delta_rule")
    before = dict(vars(ops)), dict(vars(delta_rule))
    with pytest.raises(IntegrationError, match=rf"stand-in .* leave {name}\(\) out"):
        getattr(ours, name)()
    assert (vars(ops), vars(delta_rule)) == before


def test_padding_comes_off_and_on() -> None:
    utils = importlib.import_module("fla.layers.utils")
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1]])
    x = torch.randn(2, 4, 3)
    rows, ends, longest = utils.get_unpad_data(mask)
    assert (rows.tolist(), ends.tolist(), longest) == ([1, 2, 3, 7], [0, 3, 4], 3)
    packed = utils.index_first_axis(x.flatten(0, 1), rows)
    assert torch.equal(packed, x[mask.bool()])
    assert torch.equal(utils.pad_input(packed, rows, 2, 4), x * mask[..., None])
    options = {"hidden_states": packed, "indices": rows, "batch_size": 2, "seq_len": 4}
    assert torch.equal(utils.pad_input(**options), x * mask[..., None])


def test_sequences_that_are_named_twice() -> None:
    convolution = importlib.import_module("fla.modules.convolution")
    x, weight = torch.randn(1, 7, 6), torch.randn(6, 4)
    ends, names = torch.tensor([0, 3, 7]), torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    wanted, _ = convolution.causal_conv1d(x, weight, cu_seqlens=ends)
    for options in ({"cu_seqlens": ends, "seq_idx": names}, {"seq_idx": names}):
        for call in (convolution.causal_conv1d, convolution.fast_causal_conv1d_fn):
            found, state = call(x, weight, **options)
            torch.testing.assert_close(found, wanted)
            assert state is None
