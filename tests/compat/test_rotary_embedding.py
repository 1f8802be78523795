"""`flash_attn.layers.rotary.RotaryEmbedding` of the stand-in: its tables, and generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashvar.compat.flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
from flashvar.errors import InvalidInputError

ROWS = 12


def whole(module: RotaryEmbedding, qkv: torch.Tensor) -> torch.Tensor:
    out = module(qkv.clone())
    assert isinstance(out, torch.Tensor)
    return out


def test_tables_are_of_the_definition() -> None:
    module = RotaryEmbedding(8, base=100.0)
    qkv = torch.randn(2, ROWS, 3, 4, 16)
    out = module(given := qkv.clone())
    assert out is given
    frequencies = torch.tensor([100.0 ** (-i / 8) for i in range(0, 8, 2)], dtype=torch.float64)
    angles = torch.arange(ROWS, dtype=torch.float64)[:, None] * frequencies
    torch.testing.assert_close(module._cos_cached, angles.cos().float())
    torch.testing.assert_close(module._sin_cached, angles.sin().float())
    for i in range(2):
        part = apply_rotary_emb(qkv[:, :, i], angles.cos(), angles.sin())
        torch.testing.assert_close(out[:, :, i], part)
    assert torch.equal(out[:, :, 2], qkv[:, :, 2])
    assert not module.state_dict()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scale_base", [None, 4.0], ids=["plain", "xpos"])
def test_forms_agree(scale_base: float | None, interleaved: bool) -> None:
    module = RotaryEmbedding(16, interleaved=interleaved, scale_base=scale_base)
    qkv = torch.randn(2, ROWS, 3, 4, 16)
    expected = whole(module, qkv)
    grouped = module(qkv.clone().flatten(2, 3), num_heads_q=4)
    torch.testing.assert_close(grouped, expected.flatten(2, 3))
    q, kv = module(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone())
    torch.testing.assert_close(torch.cat((q[:, :, None], kv), 2), expected)


def scores(qkv: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bqhd,bkhd->bhqk", qkv[:, :, 0], qkv[:, :, 1])


@pytest.mark.parametrize("scale_base", [None, 4.0], ids=["plain", "xpos"])
def test_scores_are_of_distances(scale_base: float | None) -> None:
    one = torch.randn(1, 1, 3, 1, 16).expand(1, ROWS, 3, 1, 16)
    found = scores(whole(RotaryEmbedding(16, scale_base=scale_base), one))[0, 0]
    for distance in range(ROWS):
        diagonal = found.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.allclose(found[3, 0], found[4, 0])


@pytest.mark.parametrize("per_sequence", [False, True], ids=["one offset", "one each"])
@pytest.mark.parametrize("scale_base", [None, 4.0], ids=["plain", "xpos"])
def test_generation_with_a_cache(scale_base: float | None, per_sequence: bool) -> None:
    """Keys that were turned before the tables grew belong to queries that are turned after."""
    qkv = torch.randn(2, ROWS, 3, 4, 16)
    expected = scores(whole(RotaryEmbedding(16, scale_base=scale_base), qkv))
    module = RotaryEmbedding(16, scale_base=scale_base)
    parts = [whole(module, qkv[:, :5])]
    for row in range(5, ROWS):
        offset: Any = torch.tensor([row, row]) if per_sequence else row
        options = {"max_seqlen": row + 1} if per_sequence else {}
        parts.append(module(qkv[:, row : row + 1].clone(), seqlen_offset=offset, **options))
    torch.testing.assert_close(scores(torch.cat(parts, 1)), expected, atol=1e-4, rtol=1e-4)


def test_a_new_sequence_has_scales_around_its_middle() -> None:
    module = RotaryEmbedding(16, scale_base=4.0)
    whole(module, torch.randn(1, 4, 3, 1, 16))
    longer = torch.randn(1, 400, 3, 1, 16)
    torch.testing.assert_close(
        whole(module, longer), whole(RotaryEmbedding(16, scale_base=4.0), longer)
    )


def test_sequences_at_places_of_their_own() -> None:
    module = RotaryEmbedding(8)
    qkv = torch.randn(2, 3, 3, 4, 8)
    found = module(qkv.clone(), seqlen_offset=torch.tensor([0, 6]), max_seqlen=9)
    for i, start in enumerate((0, 6)):
        alone = module(qkv[i : i + 1].clone(), seqlen_offset=start)
        torch.testing.assert_close(found[i : i + 1], alone)


def test_an_offset_on_a_device_is_not_read_where_there_are_tables() -> None:
    """The host would wait for the device. A meta tensor has no value, so it cannot be read."""
    module = RotaryEmbedding(8, device="meta")
    qkv, offset = torch.empty(2, 5, 3, 2, 8, device="meta"), torch.tensor(4, device="meta")
    with pytest.raises(InvalidInputError, match="seqlen_offset must be a whole number"):
        module(qkv, seqlen_offset=offset)
    module(qkv, max_seqlen=9)
    assert module(qkv, seqlen_offset=offset) is qkv


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_of_a_16_bit_model_are_computed_in_32(dtype: torch.dtype) -> None:
    plain, module = RotaryEmbedding(64), RotaryEmbedding(64).to(dtype)
    assert module.inv_freq.dtype == dtype
    for one in (plain, module):
        one(torch.randn(1, 3000, 3, 1, 64).to(dtype))
        assert one._cos_cached is not None
        assert one._cos_cached.dtype == dtype
    assert torch.equal(plain._cos_cached, module._cos_cached)


def test_tables_follow_dtype_and_mode_and_are_kept() -> None:
    module = RotaryEmbedding(8)
    with torch.inference_mode():
        module(torch.randn(1, 5, 3, 1, 8))
    x = torch.randn(1, 5, 3, 1, 8, requires_grad=True)
    module(x * 1).sum().backward()
    assert x.grad is not None
    kept = module._cos_cached
    module(torch.randn(1, 4, 3, 1, 8))
    assert module._cos_cached is kept
    module(torch.randn(1, 4, 3, 1, 8).double())
    assert module._cos_cached is not None
    assert module._cos_cached.dtype == torch.float64


def test_changed_frequencies_count() -> None:
    module, other = RotaryEmbedding(8), RotaryEmbedding(8)
    module.inv_freq /= 2
    qkv = torch.randn(1, 5, 3, 1, 8)
    assert not torch.allclose(whole(module, qkv), whole(other, qkv))


def test_a_subclass_may_make_the_tables() -> None:
    """As remote code of models does, by the signature that FlashAttention's has."""

    class Dynamic(RotaryEmbedding):
        def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Any = None) -> None:
            self.inv_freq = self._compute_inv_freq(device=device) / 2
            super()._update_cos_sin_cache(seqlen, device=device, dtype=dtype)

    half = RotaryEmbedding(8)
    half.inv_freq /= 2
    qkv = torch.randn(1, 5, 3, 1, 8)
    torch.testing.assert_close(whole(Dynamic(8), qkv), whole(half, qkv))


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:Guards may run slower")
@pytest.mark.parametrize("scale_base", [None, 4.0], ids=["plain", "xpos"])
def test_compiled(scale_base: float | None) -> None:
    torch._dynamo.reset()
    module = RotaryEmbedding(8, scale_base=scale_base)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    qkv = torch.randn(1, 5, 3, 1, 8)
    for options in ({}, {"seqlen_offset": 3}):
        expected = RotaryEmbedding(8, scale_base=scale_base)(qkv.clone(), **options)
        torch.testing.assert_close(compiled(qkv.clone(), **options), expected)
        module._cos_cached = module._cos_k_cached = None


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_training_after_inference(backend: str) -> None:
    torch._dynamo.reset()
    module = RotaryEmbedding(8)
    compiled = torch.compile(lambda x: module(x * 1), fullgraph=True, backend=backend)
    with torch.inference_mode():
        compiled(torch.randn(1, 5, 3, 1, 8))
    for rows in (5, 5, 7):
        x = torch.randn(1, rows, 3, 1, 8, requires_grad=True)
        grad = torch.autograd.grad(compiled(x).square().sum(), x)[0]
        torch.testing.assert_close(grad, 2 * x)


def test_gradients_in_evaluation_after_inference() -> None:
    module = RotaryEmbedding(8).eval()
    with torch.inference_mode():
        module(torch.randn(1, 5, 3, 1, 8))
    x = torch.randn(1, 5, 3, 1, 8, requires_grad=True)
    module(x * 1).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x)


def faked(module: RotaryEmbedding, qkv: torch.Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        module(mode.from_tensor(qkv))


def exported(module: RotaryEmbedding, qkv: torch.Tensor) -> None:
    class Caller(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return module(x * 1)

    torch.export.export(Caller(), (qkv,), strict=False)


def with_other_frequencies(module: RotaryEmbedding, qkv: torch.Tensor) -> None:
    torch.func.functional_call(module, {"inv_freq": module.inv_freq * 2}, (qkv.clone(),))


@pytest.mark.parametrize("call", [faked, exported, with_other_frequencies])
def test_tables_of_such_calls_are_not_kept(call: Callable[..., None]) -> None:
    module, qkv = RotaryEmbedding(8), torch.randn(1, 5, 3, 1, 8)
    call(module, qkv)
    torch.testing.assert_close(whole(module, qkv), whole(RotaryEmbedding(8), qkv))


def test_other_frequencies_count_although_tables_are_kept() -> None:
    module, half, qkv = RotaryEmbedding(8), RotaryEmbedding(8), torch.randn(1, 5, 3, 1, 8)
    half.inv_freq /= 2
    whole(module, qkv)
    given = {"inv_freq": half.inv_freq}
    found = torch.func.functional_call(module, given, (qkv.clone(),))
    torch.testing.assert_close(found, whole(half, qkv))


def test_frequencies_after_the_meta_device() -> None:
    with torch.device("meta"):
        module = RotaryEmbedding(8, scale_base=4.0)
    qkv = torch.randn(1, 5, 3, 1, 8)
    found = whole(module.to_empty(device="cpu"), qkv)
    torch.testing.assert_close(found, whole(RotaryEmbedding(8, scale_base=4.0), qkv))


@pytest.mark.parametrize("scale_base", [None, 4.0], ids=["plain", "xpos"])
def test_a_module_that_was_pickled_with_flash_attention(scale_base: float | None) -> None:
    module, qkv = RotaryEmbedding(8, scale_base=scale_base), torch.randn(1, 5, 3, 1, 8)
    expected = whole(module, qkv)
    for name in ("_frequencies", "_can_be_saved", "_center", "_continued"):
        module.__dict__.pop(name, None)
    torch.testing.assert_close(whole(module, qkv), expected)
