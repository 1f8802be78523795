"""Packed sequences: each as if it were alone, by positions, by offsets, in several rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from small_models import CACHE, DECODERS, VOCABULARY, small_model
from transformers import AutoModelForCausalLM, DynamicCache, Llama4TextConfig, masking_utils

from flashvar.integrations import transformers as transformers
from flashvar.integrations.transformers.lazy_masks import LazyMask, attached
from flashvar.integrations.transformers.rows import rows_of, rows_of_positions
from flashvar.integrations.transformers.visibility import padding_visibility, visible

LENGTHS = (7, 1, 13, 3)
TOTAL = sum(LENGTHS)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers.register()
    monkeypatch.setenv("FLASHVAR_STRICT", "1")


def ids(rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(2, VOCABULARY, (rows, TOTAL), generator=generator)


def positions() -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS])[None]


def offsets(dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).to(dtype)


def alone(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [1, TOTAL, vocabulary] of each sequence in a batch of its own."""
    parts = tokens.split(LENGTHS, dim=1)
    return torch.cat([model(part, use_cache=False).logits for part in parts], dim=1)


def gradients(model: Any, logits: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(4))
    (logits * weights).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


PACKINGS: dict[str, dict[str, Any]] = {
    "positions": {"position_ids": positions(), "use_cache": False},
    # With a cache, transformers does not look at positions: the layers do.
    "positions-cached": {"position_ids": positions(), "use_cache": True},
    "offsets": {
        "position_ids": positions(),
        "cu_seq_lens_q": offsets(),
        "cu_seq_lens_k": offsets(),
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
        "use_cache": True,
    },
    "offsets-int64": {
        "position_ids": positions(),
        "cu_seq_lens_q": offsets(torch.int64),
        "max_length_q": torch.tensor(max(LENGTHS)),
        "use_cache": True,
    },
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", DECODERS)
def test_each_sequence_is_alone(name: str, packing: str) -> None:
    model = small_model(name, 12)
    expected = alone(model, ids())
    wanted = gradients(model, expected)
    model.set_attn_implementation("flashvar")
    found = model(ids(), **PACKINGS[packing]).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    largest = max(float(grad.abs().max()) for grad in wanted)
    for grad, want in zip(gradients(model, found), wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-3, atol=1e-6 * largest)


@pytest.mark.parametrize("cached", [True, False])
def test_chunks_of_packed_sequences(cached: bool) -> None:
    """The mask of chunks has the sequences in it, as the layers without chunks do."""
    configuration = Llama4TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        intermediate_size_mlp=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        attention_chunk_size=16,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration, attn_implementation="eager").eval()
    expected = alone(model, ids())
    model.set_attn_implementation("flashvar")
    found = model(ids(), position_ids=positions(), use_cache=cached).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("by_name", [True, False])
def test_chunks_are_told_sequences_beside_an_empty_cache(by_name: bool) -> None:
    config = Llama4TextConfig(attention_chunk_size=16)
    config._attn_implementation = "flashvar"
    given = {CACHE: DynamicCache(), "position_ids": positions(), "layer_idx": 0}
    call = partial(masking_utils._preprocess_mask_arguments, config, torch.zeros(1, TOTAL, 8), None)
    told = (call(**given) if by_name else call(*given.values()))[2]
    assert told is not None
    assert told.unique_consecutive(return_counts=True)[1].tolist() == list(LENGTHS)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_several_rows_of_packed_sequences(name: str) -> None:
    model = small_model(name, 12)
    expected = torch.cat([alone(model, row[None]) for row in ids(3)])
    model.set_attn_implementation("flashvar")
    given = {"position_ids": positions().expand(3, -1), "use_cache": False}
    torch.testing.assert_close(model(ids(3), **given).logits, expected, rtol=1e-4, atol=1e-4)


def test_positions_that_a_batch_shares_are_those_of_eager() -> None:
    """With a cache, transformers looks at positions nowhere; neither do we, but for one row."""
    model = small_model("llama", 12)
    given = {"position_ids": positions(), "use_cache": True}
    expected = model(ids(2), **given).logits
    model.set_attn_implementation("flashvar")
    torch.testing.assert_close(model(ids(2), **given).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_mask_is_obeyed_whatever_the_positions_say(name: str, cached: bool) -> None:
    model = small_model(name, 12)
    given = {
        "position_ids": positions(),
        "attention_mask": torch.ones((1, TOTAL), dtype=torch.long),
        "use_cache": cached,
    }
    expected = model(ids(), **given).logits
    model.set_attn_implementation("flashvar")
    torch.testing.assert_close(model(ids(), **given).logits, expected, rtol=1e-4, atol=1e-4)


def test_inference_mode_finds_positions_too() -> None:
    model = small_model("llama", 12)
    with torch.inference_mode():
        expected = alone(model, ids())
        model.set_attn_implementation("flashvar")
        found = model(ids(), position_ids=positions(), use_cache=True).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_positions_that_change_in_place_are_looked_at_again() -> None:
    model = small_model("llama", 12)
    model.set_attn_implementation("flashvar")
    given = positions()
    with torch.no_grad():
        packed = model(ids(), position_ids=given).logits
        given.copy_(torch.arange(TOTAL))
        found = model(ids(), position_ids=given).logits
        expected = model(ids()).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(packed, found, atol=1e-2)


def test_rows_of_numbers() -> None:
    numbers = torch.tensor([[0, 1, 1, 2, 0], [0, 0, 0, 0, 0], [2, 2, 2, 2, 2]])
    rows = rows_of(numbers)
    assert rows is not None
    assert rows.offsets_q.tolist() == [0, 2, 3, 8]
    assert rows.longest_q == 5
    assert rows.indices_q is not None
    assert rows.indices_q.tolist() == [1, 2, 3, 10, 11, 12, 13, 14]
    assert rows_of(torch.ones((3, 4))) is None
    empty = rows_of(torch.zeros((2, 3)))
    assert empty is not None
    assert (empty.offsets_q.tolist(), empty.longest_q) == ([0], 0)
    assert rows_of_positions(torch.arange(5)[None] + 2) is None


def test_padding_in_the_middle() -> None:
    """Causal rows close up; with a window, whose distances that changes, keys are hidden."""
    numbers = torch.tensor([[1, 0, 1, 1, 1]])
    closed = padding_visibility(numbers, 5, True, (-1, -1))
    assert closed.rows is not None
    assert closed.rows.offsets_q.tolist() == [0, 4]
    hidden = padding_visibility(numbers, 5, True, (1, -1))
    assert hidden.rows is None
    assert hidden.bias is not None
    assert hidden.bias.flatten().tolist() == [0, -torch.inf, 0, 0, 0]


@pytest.mark.parametrize("change", ["copied", "read", "written"])
def test_masks_on_their_way_to_a_layer(change: str) -> None:
    """Copied as for another device, the visibility stays; once written into, values count alone."""
    model = small_model("llama", 12)
    mask = torch.ones((1, TOTAL), dtype=torch.long)
    mask[:, :5] = 0
    seen: list[Any] = []

    def alter(_: Any, args: Any, given: dict[str, Any]) -> Any:
        altered = given["attention_mask"]
        if change == "copied":
            altered = altered.to(torch.float64).to(torch.float32).clone()
        elif change == "read":
            assert float(altered.sum()) < 0
        else:
            # The first query that is no padding alone.
            altered[:, :, 5:, 6:] = torch.finfo(torch.float32).min
        seen.append((isinstance(altered, LazyMask), attached(altered)))
        return args, {**given, "attention_mask": altered}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(alter, with_kwargs=True)
    expected = model(ids(), attention_mask=mask, use_cache=False).logits
    seen.clear()
    model.set_attn_implementation("flashvar")
    found = model(ids(), attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(found[:, 5:], expected[:, 5:], rtol=1e-4, atol=1e-4)
    assert len(seen) == 2
    assert all(ours for ours, _ in seen)
    assert all((visibility is None) == (change == "written") for _, visibility in seen)


def test_visible_says_what_rows_say() -> None:
    rows = rows_of_positions(positions())
    visibility = padding_visibility(torch.ones((1, TOTAL)), TOTAL, True, (2, -1))._replace(
        rows=rows
    )
    seen = visible(visibility, 1, TOTAL, torch.device("cpu"))[0, 0]
    place, entry = positions()[0], torch.arange(len(LENGTHS)).repeat_interleave(offsets().diff())
    distance = place[:, None] - place
    expected = (entry[:, None] == entry) & (distance >= 0) & (distance <= 2)
    assert torch.equal(seen, expected)
