"""What flashvar does not serve in a model of transformers goes the model's own way."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import inputs, output, small_model
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    eager_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from flashvar.errors import BackendUnavailableError, DtypeError, ShapeError
from flashvar.integrations import fallback
from flashvar.integrations import transformers as transformers
from flashvar.integrations.transformers.attention import attention
from flashvar.integrations.transformers.lazy_masks import attached
from flashvar.integrations.transformers.mask import attention_mask, read

LENGTH = 12


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers.register()
    monkeypatch.setattr(fallback, "_logged", set())


def layer() -> Any:
    """A module as a model has it, with the eager attention of a file."""
    return small_model("llama", LENGTH).model.layers[0].self_attn


def tensors(length: int = LENGTH, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, 4, length, 32), (2, 2, length, 32), (2, 2, length, 32))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def test_weights_come_from_eager_after_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model("gemma2", LENGTH)
    given, _ = inputs("gemma2", LENGTH, "left")
    expected = model(**given, output_attentions=True)
    model.set_attn_implementation("flashvar")
    with caplog.at_level(logging.WARNING, "flashvar"):
        found = model(**given, output_attentions=True)
    kept = given["attention_mask"] != 0
    torch.testing.assert_close(found.logits[kept], expected.logits[kept], rtol=1e-4, atol=1e-4)
    for weights, want in zip(found.attentions, expected.attentions, strict=True):
        rows = kept[:, None].expand(weights.shape[:3])
        torch.testing.assert_close(weights[rows], want[rows], rtol=1e-4, atol=1e-4)
    assert [record.message for record in caplog.records] == [
        "Gemma2Attention: it keeps no attention weights; "
        "such calls take the model's eager attention"
    ]


def test_strict_mode_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    for name in ("output_attentions", "head_mask"):
        with pytest.raises(BackendUnavailableError, match=r"LlamaAttention: .*STRICT=1"):
            attention(layer(), *tensors(), None, **{name: torch.ones(4)})


def test_what_only_eager_does_needs_one() -> None:
    module = torch.nn.Identity()
    with pytest.raises(BackendUnavailableError, match=r"Identity has no eager.*output_attentions"):
        attention(module, *tensors(), None, output_attentions=True)


def test_a_named_backend_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from flashvar.selection.resolve import choose

    monkeypatch.setenv("FLASHVAR_BACKEND", "cuda")
    choose.cache_clear()
    q, k, v = tensors(LENGTH + 1)
    try:
        out, _ = attention(layer(), q, k, v, None)
    finally:
        choose.cache_clear()
    assert len(caplog.records) == 1
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_a_paged_cache_that_tells_no_lengths() -> None:
    class Older:
        def update(self, key_states: Any, value_states: Any, layer_idx: int) -> None: ...

    with pytest.raises(BackendUnavailableError, match=r"needs transformers 5\.23 or newer"):
        attention(layer(), *tensors(), None, cache=Older())


def test_masks_of_other_ranks_are_refused() -> None:
    with pytest.raises(
        ShapeError, match=r"attention_mask must have 2 .* found shape \(2, 12, 12\)"
    ):
        attention(layer(), *tensors(), torch.ones((2, LENGTH, LENGTH)))


def test_masks_of_pairs_in_integers_are_refused() -> None:
    """Added to the scores, ones and zeros would hide nothing."""
    seen = torch.ones((2, 1, LENGTH, LENGTH), dtype=torch.long).tril()
    with pytest.raises(DtypeError, match=r"must be bool, or .* found torch\.int64"):
        attention(layer(), *tensors(), seen)


@pytest.mark.parametrize("kind", ["bool", "float", "broadcast", "per head"])
def test_a_custom_mask_says_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Served as a bias: neither causal nor a window besides."""
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    generator = torch.Generator().manual_seed(6)
    seen = torch.rand((2, 1, LENGTH, LENGTH), generator=generator) > 0.4
    seen[..., 0] = True
    if kind == "broadcast":
        seen = seen[:1, :, :1]
    if kind == "per head":
        seen = seen.expand(-1, 4, -1, -1)
    lowest = torch.finfo(torch.float32).min
    mask = seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, lowest)
    q, k, v = tensors()
    # Keys that are yet to come, as in a static cache, which the mask does not reach.
    later = torch.full((2, 2, 3, 32), torch.nan)
    k_long, v_long = torch.cat((k, later), dim=2), torch.cat((v, later), dim=2)
    out, _ = attention(layer(), q, k_long, v_long, mask, sliding_window=3)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-4, atol=1e-4)


def test_functions_that_are_not_known_are_evaluated() -> None:
    from transformers.masking_utils import (
        and_masks,
        causal_mask_function,
        or_masks,
        sliding_window_causal_mask_function,
    )

    def same_parity(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query - key) % 2 == 0

    assert read(sliding_window_causal_mask_function(4)) == (True, (3, -1), None)
    assert read(or_masks(causal_mask_function, same_parity)) is None
    assert read(and_masks(causal_mask_function, same_parity)) is None
    padding = torch.ones((2, 6), dtype=torch.bool)
    padding[1, :2] = False
    mask = attention_mask(
        2, 6, 6, mask_function=and_masks(causal_mask_function, same_parity), attention_mask=padding
    )
    assert mask is not None
    place = torch.arange(6)
    distance = place[:, None] - place
    expected = (distance >= 0) & (distance % 2 == 0) & padding[:, None, None]
    assert torch.equal(mask == 0, expected)
    assert mask[~expected].eq(torch.finfo(torch.float32).min).all()


def test_functions_of_another_version_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.masking_utils import sliding_window_causal_mask_function

    from flashvar.integrations.transformers import mask as transformers_mask

    def renamed(cells: dict[str, Any]) -> Any:
        return cells["a name of the future"]

    monkeypatch.setitem(transformers_mask._MAKERS, "sliding_window_overlay", renamed)
    mask = attention_mask(1, 4, 4, mask_function=sliding_window_causal_mask_function(2))
    assert mask is not None
    place = torch.arange(4)
    distance = place[:, None] - place
    assert torch.equal(mask[0, 0] == 0, (distance >= 0) & (distance < 2))


KINDS = {
    "causal": (causal_mask_function, 7),
    "bidirectional": (bidirectional_mask_function, 7),
    "window": (sliding_window_causal_mask_function(3), 7),
    "window to both sides": (sliding_window_bidirectional_mask_function(2), 7),
    "chunks": (chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)), 7),
    "a step": (causal_mask_function, 1),
    "cross": (bidirectional_mask_function, 3),
}


@pytest.mark.parametrize("offset", ["number", "tensor"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_that_somebody_reads_is_eagers(
    kind: str, padding: str, mode: Any, offset: str
) -> None:
    """Never None, and from then on its values count."""
    function, queries = KINDS[kind]
    told: dict[str, Any] = {"batch_size": 2, "q_length": queries, "kv_length": 7}
    told |= {"mask_function": function, "attention_mask": None}
    if padding != "none":
        told["attention_mask"] = torch.ones((2, 7), dtype=torch.bool)
        told["attention_mask"][1, slice(2) if padding == "left" else slice(5, None)] = False
    place = 7 - queries
    with mode():
        found = attention_mask(
            **told, q_offset=torch.tensor(place) if offset == "tensor" else place
        )
        expected = eager_mask(**told, q_offset=place)
        assert isinstance(found, torch.Tensor)
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert torch.equal(found + 0, expected)
        found[..., 0] = 1
        assert attached(found) is None
        assert float(found.max()) == 1


def test_a_window_on_fewer_queries_than_keys() -> None:
    """Not causal: place by place, not from the last ones."""
    from transformers.masking_utils import sliding_window_bidirectional_mask_function

    mask = attention_mask(1, 3, 6, mask_function=sliding_window_bidirectional_mask_function(1))
    assert mask is not None
    distance = torch.arange(3)[:, None] - torch.arange(6)
    assert torch.equal(mask[0, 0] == 0, distance.abs() <= 1)


def test_padding_gives_finite_outputs_and_gradients() -> None:
    model = small_model("mistral", LENGTH)
    model.set_attn_implementation("flashvar")
    given, _ = inputs("mistral", LENGTH, "left")
    given["attention_mask"][1] = 0  # nothing but padding
    found = output(model, given)
    found.square().sum().backward()
    assert found.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_sinks() -> None:
    """Keys without values, in dense and padded batches, with their gradients."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    module = SimpleNamespace(num_key_value_groups=2, training=False, is_causal=True)
    module.sinks = torch.randn(4, generator=torch.Generator().manual_seed(7), requires_grad=True)
    inner = [tensor.requires_grad_() for tensor in tensors()]
    hidden = torch.ones((LENGTH, LENGTH), dtype=torch.bool).triu(1)
    for first in (0, 4):
        padding = torch.ones((2, LENGTH), dtype=torch.bool)
        padding[1, :first] = False
        mask = torch.zeros((2, 1, LENGTH, LENGTH)).masked_fill(hidden, -1e30)
        mask = mask.masked_fill(~padding[:, None, None], -1e30)
        expected, _ = eager_attention_forward(module, *inner, mask, scaling=0.3)
        ours = padding if first else None
        found, _ = attention(module, *inner, ours, scaling=0.3, s_aux=module.sinks)
        torch.testing.assert_close(found[padding], expected[padding], rtol=1e-4, atol=1e-5)
        for got, want in zip(
            torch.autograd.grad(found[padding].square().sum(), [*inner, module.sinks]),
            torch.autograd.grad(expected[padding].square().sum(), [*inner, module.sinks]),
            strict=True,
        ):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_sinks_on_the_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    class Layer(torch.nn.Module):
        num_key_value_groups, is_causal = 2, True
        sinks = torch.randn(4, generator=torch.Generator().manual_seed(8))

    # Where the layer's class is, as in a file of transformers.
    here = sys.modules[Layer.__module__]
    monkeypatch.setattr(here, "eager_attention_forward", eager_attention_forward, raising=False)
    module, given = Layer().eval(), {"scaling": 0.3, "s_aux": Layer.sinks}
    expected, nothing = attention(module, *tensors(), None, **given)
    found, weights = attention(module, *tensors(), None, **given, output_attentions=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert nothing is None
    assert weights is not None
    assert weights.shape == (2, 4, LENGTH, LENGTH)


def test_mixed_dtypes_are_those_of_the_values() -> None:
    """As where a model normalizes queries and keys in float32."""
    q, k, v = tensors()
    out, _ = attention(layer(), q, k, v.bfloat16(), None)
    assert out.dtype == torch.bfloat16
    expected, _ = attention(layer(), q.bfloat16(), k.bfloat16(), v.bfloat16(), None)
    assert torch.equal(out, expected)


def test_strided_rows_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    given = tensors()
    strided = [tensor.mT.contiguous().mT for tensor in given]
    found, _ = attention(layer(), *strided, None)
    assert torch.equal(found, attention(layer(), *given, None)[0])


def test_autocast() -> None:
    q, k, v = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = attention(layer(), q, k, v, None)
    assert out.dtype == torch.bfloat16
