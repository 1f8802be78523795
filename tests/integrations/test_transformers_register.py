"""Registering with transformers: what it changes, what it refuses, and what finds it."""

from __future__ import annotations

import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import inputs, output, small_model

import flashvar
from flashvar.compat.distribution import EmptyDistribution
from flashvar.errors import IntegrationError, InvalidInputError
from flashvar.integrations import transformers as transformers
from flashvar.machine import distributions

LENGTH = 12


@pytest.fixture(autouse=True)
def registered() -> None:
    transformers.register()


LIGHT = """
import flashvar.integrations.transformers, sys
assert 'torch' not in sys.modules and 'transformers' not in sys.modules
"""
UNREGISTERED = """
import flashvar.integrations.transformers, flashvar.integrations.transformers.attention
from transformers.modeling_utils import AttentionInterface
assert 'flashvar' not in AttentionInterface()
"""


@pytest.mark.parametrize("code", [LIGHT, UNREGISTERED], ids=["light", "unregistered"])
def test_nothing_is_registered_by_import(code: str, python_with_models: str) -> None:
    program = sys.executable if code == LIGHT else python_with_models
    environment = {**os.environ, "PYTHONPATH": str(Path(flashvar.__file__).parents[1])}
    done = subprocess.run(
        [program, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_second_registration_changes_nothing() -> None:
    from transformers.integrations import hub_kernels

    before = hub_kernels.load_and_register_attn_kernel
    transformers.register()
    transformers.register("another")
    assert hub_kernels.load_and_register_attn_kernel is before
    assert before("another") is before("flashvar")
    assert before("no kernel") is None


def test_missing_and_old_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = r"needs transformers 5\.6 or newer, found \S+ \(.+\): pip install .+5\.6'"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        with pytest.raises(IntegrationError, match=needed):
            transformers.register()
    old = SimpleNamespace(sdpa_mask=lambda batch_size, cache_position, kv_length: None)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", old)
    with pytest.raises(IntegrationError, match=needed):
        transformers.register()


def test_an_old_package_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", None)  # 4.40 has none
    old = EmptyDistribution("transformers", "transformers", "4.40.0")
    monkeypatch.setattr(distributions, "find", lambda package: old)
    with pytest.raises(ImportError, match=r"transformers 5\.6 or newer, found 4\.40\.0 \("):
        transformers.register()


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2", "", 3])
def test_names_of_others_are_refused(name: Any) -> None:
    from transformers.modeling_utils import AttentionInterface

    before = dict(AttentionInterface().items())
    with pytest.raises(InvalidInputError, match=r"name must be .*, found .*leave it out"):
        transformers.register(name)
    assert dict(AttentionInterface().items()) == before


def test_the_loader_of_kernels_takes_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the module had been downloaded: transformers' own function on our kernels."""
    from transformers.integrations import hub_kernels
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

    from flashvar.integrations.transformers import kernel as transformers_kernel

    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True, raising=False)
    monkeypatch.setattr(hub_kernels, "_kernels_available", True, raising=False)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *_, **__: transformers_kernel)
    model = small_model("llama", LENGTH)
    given, counts = inputs("llama", LENGTH, "left")
    expected = output(model, given)
    try:
        model.set_attn_implementation("flashvar/attention")
        functions, _ = lazy_import_flash_attention("flashvar/attention")
        assert functions[1] is transformers_kernel.flash_attn_varlen_func
        found = output(model, given)
    finally:
        lazy_import_flash_attention("flashvar")
    kept = counts != 0
    torch.testing.assert_close(found[kept], expected[kept], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("home", "function"),
    [
        ("masking_utils", "_preprocess_mask_arguments"),
        ("masking_utils", "is_flash_attention_requested"),
        ("modeling_utils.PreTrainedModel", "_check_and_adjust_attn_implementation"),
        ("modeling_utils.PreTrainedModel", "set_attn_implementation"),
        ("integrations.hub_kernels", "load_and_register_attn_kernel"),
    ],
)
def test_replaced_functions_take_their_arguments_by_name(home: str, function: str) -> None:
    """Gemma 3 calls the first one so, and users the method that sets the implementation."""
    transformers.register()
    replaced = getattr(pkgutil.resolve_name(f"transformers.{home}"), function)
    own = list(inspect.signature(replaced).parameters)
    ours = inspect.signature(replaced, follow_wrapped=False).parameters.values()
    named = [one.name for one in ours if one.kind is one.POSITIONAL_OR_KEYWORD]
    first = 1 if own[0] == "self" else 0
    assert replaced.__wrapped__
    assert named[first:] == own[first : len(named)]


def test_the_implementation_is_set_by_name() -> None:
    transformers.register()
    model = small_model("llama", 12)
    model.set_attn_implementation(attn_implementation="flashvar")
    assert model.config._attn_implementation == "flashvar"
