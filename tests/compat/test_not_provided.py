"""What FlashAttention has and the stand-in has not says so when it is imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from flashvar.compat import flash_attn as ours
from flashvar.compat.flash_attn import flash_attn_interface
from flashvar.compat.not_provided import NAMES_NOT_PROVIDED, NOT_PROVIDED
from flashvar.errors import NotProvidedError


@pytest.fixture
def installed() -> Iterator[None]:
    ours.install()
    yield
    ours.uninstall()


# Imports of packages on PyPI and GitHub.
IMPORTED = [
    "from flash_attn.ops.rms_norm import RMSNorm",
    "from flash_attn.ops.triton.layer_norm import RMSNorm, layer_norm_fn",
    "from flash_attn.ops.triton.cross_entropy import cross_entropy_loss",
    "from flash_attn.ops.activations import SwiGLUFunction",
    "from flash_attn.ops.layer_norm import dropout_add_layer_norm",
    "from flash_attn.ops.fused_dense import fused_mlp_func",
    "from flash_attn.losses.cross_entropy import CrossEntropyLoss",
    "from flash_attn.modules.mha import MHA, FlashSelfAttention",
    "from flash_attn.models.bert import BertModel",
    "from flash_attn.utils.benchmark import benchmark_forward",
    "from flash_attn.flash_attention import FlashAttention",
    "from flash_attn.flash_attn_triton import flash_attn_func",
    "from flash_attn.cute.interface import flash_attn_func",
    "from flash_attn_interface import flash_attn_func",
    "from flash_attn_3.flash_attn_interface import flash_attn_func",
    "import flash_attn_2_cuda",
    "import flash_attn.a_module_to_come",
    "from flash_attn import modules",
    "from flash_attn import losses, flash_attn_func",
    "from flash_attn import a_name_to_come",
    "from flash_attn.layers import patch_embed",
    "from flash_attn.ops import rms_norm",
    "from flash_attn.ops.triton import layer_norm, rotary",
    "from flash_attn.utils import generation",
]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("statement", IMPORTED)
def test_an_import_names_what_serves_it(statement: str) -> None:
    with pytest.raises(ImportError, match=r"^flash_attn.* is not in flashvar's.*: use ") as caught:
        exec(statement, {})
    assert isinstance(caught.value, ModuleNotFoundError)
    assert isinstance(caught.value, NotProvidedError)
    words = statement.replace(",", "").split()
    asked = words[1] if words[0] == "import" else f"{words[1]}.{words[3]}"
    assert asked.startswith(str(caught.value.name))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", NOT_PROVIDED)
def test_every_line_of_the_table_is_refused(name: str) -> None:
    with pytest.raises(NotProvidedError) as caught:
        importlib.import_module(name)
    assert NOT_PROVIDED[name] in str(caught.value)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("full", NAMES_NOT_PROVIDED)
def test_every_name_of_the_table_is_refused(full: str) -> None:
    module, _, name = full.rpartition(".")
    with pytest.raises(NotProvidedError, match=rf"^{full} is not") as caught:
        exec(f"from {module} import {name}", {})
    instead = NAMES_NOT_PROVIDED[full]
    assert str(caught.value).endswith(f"use {instead}")
    if not instead.startswith("torch."):
        assert hasattr(importlib.import_module(module), instead.split()[0])


def test_what_modules_say_they_have_is_there() -> None:
    """The documentation's table is made of it."""
    modules = [importlib.import_module(ours.__name__ + part) for part in ours._PARTS]
    named = {module: getattr(module, "__all__", []) for module in modules}
    assert sum(map(len, named.values())) > 40
    for module, names in named.items():
        assert [name for name in names if not hasattr(module, name)] == []


@pytest.mark.usefixtures("installed")
def test_a_question_finds_nothing_and_is_no_error() -> None:
    """FlashAttention 3 and 4 are looked for by packages that do without them."""
    for name in ("flash_attn_interface", "flash_attn_3", "flash_attn_2_cuda", "flash_attn.cute"):
        assert importlib.util.find_spec(name) is None
    assert importlib.util.find_spec("flash_attn.ops.triton.rotary") is not None


@pytest.mark.usefixtures("installed")
def test_others_are_found_and_missed_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'flash_attn_other'$"):
        importlib.import_module("flash_attn_other")
    there = ModuleType("flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", there)
    assert importlib.import_module("flash_attn_interface") is there
    assert not hasattr(flash_attn_interface, "another_name")


def test_nothing_is_refused_after_uninstall() -> None:
    ours.install()
    ours.uninstall()
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'flash_attn_interface'$"):
        importlib.import_module("flash_attn_interface")
