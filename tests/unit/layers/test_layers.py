"""`flashvar.layers`: values by formulas of torch, padding, packing, states between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import flashvar
from flashvar.layers import (
    FusedRMSNormGated,
    GatedDeltaNet,
    RMSNorm,
    ShortConvolution,
    StateCache,
    norms,
)
from flashvar.layers.norms import L2Norm, l2norm

SIZES: dict[str, Any] = {"hidden_size": 24, "head_dim": 8, "num_heads": 2, "expand_v": 1.5}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"num_v_heads": 4, "conv_bias": True, "allow_neg_eigval": True},
    "no gate": {"use_gate": False, "conv_size": 3},
    "sigmoid gate": {"output_gate_activation": "sigmoid"},
    "no convolution": {"use_short_conv": False},
}
# As flash-linear-attention 0.6.0 makes them, of "groups".
SHAPES = {
    "A_log": (4,),
    "dt_bias": (4,),
    "q_proj.weight": (16, 24),
    "k_proj.weight": (16, 24),
    "v_proj.weight": (48, 24),
    "a_proj.weight": (4, 24),
    "b_proj.weight": (4, 24),
    "q_conv1d.weight": (16, 1, 4),
    "q_conv1d.bias": (16,),
    "k_conv1d.weight": (16, 1, 4),
    "k_conv1d.bias": (16,),
    "v_conv1d.weight": (48, 1, 4),
    "v_conv1d.bias": (48,),
    "g_proj.weight": (48, 24),
    "o_norm.weight": (12,),
    "o_proj.weight": (24, 48),
}


def made(name: str = "plain", **others: Any) -> GatedDeltaNet:
    torch.manual_seed(0)
    layer = GatedDeltaNet(**SIZES, **OPTIONS[name], **others).double()
    with torch.no_grad():
        layer.o_norm.weight.uniform_(0.5, 2)
        layer.A_log.sub_(2)
    return layer


def formula(layer: GatedDeltaNet, x: torch.Tensor) -> torch.Tensor:
    """One sequence [seqlen, hidden size], token by token."""
    rows = []
    for kind in "qkv":
        y = getattr(layer, f"{kind}_proj")(x)
        if layer.use_short_conv:
            conv = getattr(layer, f"{kind}_conv1d")
            width = conv.weight.shape[-1]
            past = functional.pad(y.T, (width - 1, 0))
            y = functional.conv1d(past, conv.weight, conv.bias, groups=y.shape[1]).T
        heads = layer.num_v_heads if kind == "v" else layer.num_heads
        rows.append(functional.silu(y).unflatten(-1, (heads, -1)))
    q, k, v = rows
    q, k = (
        (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(
            layer.num_v_heads // layer.num_heads, 1
        )
        for y in (q, k)
    )
    gate = -layer.A_log.exp() * functional.softplus(layer.a_proj(x) + layer.dt_bias)
    beta = layer.b_proj(x).sigmoid() * (2 if layer.allow_neg_eigval else 1)
    state = x.new_zeros(v.shape[1], q.shape[-1], v.shape[-1])
    outs = []
    for t in range(x.shape[0]):
        state = state * gate[t].exp()[:, None, None]
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]) * q.shape[-1] ** -0.5)
    out = torch.stack(outs)
    out = out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.o_norm.weight
    if layer.use_gate:
        g = layer.g_proj(x).unflatten(-1, out.shape[1:])
        sigmoid = OPTIONS["sigmoid gate"]["output_gate_activation"]
        assert isinstance(layer.o_norm, FusedRMSNormGated)
        out = out * (g.sigmoid() if layer.o_norm.activation == sigmoid else functional.silu(g))
    return layer.o_proj(out.flatten(1))


def alone(layer: GatedDeltaNet, parts: Any) -> list[torch.Tensor]:
    return [formula(layer, part) for part in parts]


@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(name: str) -> None:
    layer = made(name)
    x = torch.randn(2, 11, 24, dtype=torch.float64, requires_grad=True)
    out, none, cache = layer(x)
    assert none is None
    assert cache is None
    wanted = torch.stack(alone(layer, x))
    torch.testing.assert_close(out, wanted)
    leaves = [x, *layer.parameters()]
    grad = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(wanted, leaves, grad)
    )


def test_parameters() -> None:
    layer = made("groups")
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == SHAPES
    plain = GatedDeltaNet(**SIZES)
    assert plain.A_log.dtype == torch.float32
    assert (plain.A_log <= torch.tensor(16.0).log()).all()
    first = functional.softplus(plain.dt_bias)
    assert (first > 0.99e-4).all()
    assert (first < 0.101).all()
    kept = {name for name, p in plain.named_parameters() if hasattr(p, "_no_weight_decay")}
    assert kept == {"A_log", "dt_bias"}


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_left_out(side: str) -> None:
    layer = made()
    lengths = (7, 0, 3)
    x = torch.randn(3, 7, 24, dtype=torch.float64)
    mask = torch.zeros(3, 7, dtype=torch.int64)
    for row, length in zip(mask, lengths, strict=True):
        row[7 - length if side == "left" else 0 : 7 if side == "left" else length] = 1
    out, _, _ = layer(x, attention_mask=mask)
    for i, length in enumerate(lengths):
        kept = mask[i].bool()
        if length:
            torch.testing.assert_close(out[i, kept], formula(layer, x[i, kept]))
        assert (out[i, ~kept] == 0).all()


def test_packed_sequences_are_alone() -> None:
    layer = made("groups")
    x = torch.randn(1, 12, 24, dtype=torch.float64)
    ends = torch.tensor([0, 5, 5, 6, 12])
    out, _, _ = layer(x, cu_seqlens=ends)
    wanted = torch.cat(alone(layer, x[0].split((5, 1, 6))))
    torch.testing.assert_close(out[0], wanted)


@pytest.mark.parametrize("steps", [(6, 1, 1, 1), (1, 1, 7), (4, 5)], ids=str)
@pytest.mark.parametrize("name", ["plain", "groups", "no convolution"])
@torch.no_grad()
def test_states_between_calls(name: str, steps: tuple[int, ...]) -> None:
    layer = made(name, layer_idx=1)
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    cache = StateCache()
    parts = []
    for part in x.split(steps, 1):
        out, _, returned = layer(part, past_key_values=cache, use_cache=True)
        assert returned is cache
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), torch.stack(alone(layer, x)))
    assert len(cache) == 2
    assert cache.get_seq_length(1) == 9
    assert cache[1]["recurrent_state"].shape == (2, layer.num_v_heads, 12, 8)
    states = cache[1]["conv_state"]
    if layer.use_short_conv:
        assert [s.shape for s in states] == [(2, 16, 4), (2, 16, 4), (2, layer.value_dim, 4)]
    else:
        assert states is None
    cache.reset()
    assert len(cache) == cache.get_seq_length(1) == 0


@torch.no_grad()
def test_generation_with_padding() -> None:
    """Each step masks the last token alone of a mask of all of them."""
    layer = made(layer_idx=0)
    x = torch.randn(2, 8, 24, dtype=torch.float64)
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, :3] = 0
    cache = StateCache()
    parts = [layer(x[:, :5], mask[:, :5], cache, True)[0]]
    parts += [layer(x[:, t : t + 1], mask[:, : t + 1], cache, True)[0] for t in range(5, 8)]
    out = torch.cat(parts, 1)
    torch.testing.assert_close(out[0], formula(layer, x[0]))
    torch.testing.assert_close(out[1, 3:], formula(layer, x[1, 3:]))
    assert (out[1, :3] == 0).all()


@pytest.mark.filterwarnings("ignore:The CPU autocast")
def test_autocast_keeps_wide_parameters() -> None:
    layer = made().float()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(torch.randn(1, 5, 24))[0]
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.parametrize("tokens", [1, 5])
def test_short_convolution(tokens: int) -> None:
    layer = ShortConvolution(6, 4, bias=True).double()
    assert layer.state_size == 24
    x = torch.randn(2, tokens, 6, dtype=torch.float64)
    state = torch.randn(2, 6, 4, dtype=torch.float64)
    wanted, final = flashvar.causal_conv1d(
        x, layer.weight.squeeze(1), layer.bias, activation="silu", initial_state=state,
        return_final_state=True,
    )  # fmt: skip
    y, after = layer(x, cache=state, output_final_state=True)
    assert torch.equal(y, wanted)
    assert torch.equal(after, final)
    assert not torch.equal(state, final)
    with torch.no_grad():
        y, after = layer(x, cache=state, output_final_state=True)
    assert torch.equal(y, wanted)
    assert (after is state) is (tokens == 1)
    assert torch.equal(after, final)
    masked = layer(x, mask=torch.zeros(2, tokens))[0]
    assert torch.equal(masked, layer(torch.zeros_like(x))[0])


def without_activation(layer: ShortConvolution) -> None:
    layer.activation = None


def with_a_forward_of_its_own(layer: ShortConvolution) -> None:
    """As libraries do that load weights at each call."""
    convolve = layer.forward
    layer.forward = lambda x, **options: (2 * convolve(x, **options)[0], None)


def with_a_bias(layer: ShortConvolution) -> None:
    layer.bias = torch.nn.Parameter(torch.ones_like(layer.weight[:, 0, 0]))


def narrower(layer: ShortConvolution) -> None:
    layer.weight = torch.nn.Parameter(layer.weight[..., 1:].detach().clone())
    layer.kernel_size = (layer.weight.shape[-1],)


@pytest.mark.parametrize(
    "change", [without_activation, with_a_forward_of_its_own, with_a_bias, narrower]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_changed_convolutions_are_called(change: Any, compiled: bool) -> None:
    torch._dynamo.reset()
    layer, x = made(), torch.randn(2, 5, 24, dtype=torch.float64)
    unchanged = layer(x)[0]
    change(layer.v_conv1d)
    with_hook = layer.q_conv1d.register_forward_hook(lambda *_: None)
    expected = layer(x)[0]  # with a hook, all convolutions are called
    with_hook.remove()
    call = torch.compile(layer, backend="eager", fullgraph=True) if compiled else layer
    found = call(x)[0]
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, unchanged)


def test_hooks_of_the_convolutions_are_called() -> None:
    """Pruning is a hook: it makes the weight of each call."""
    from torch.nn.utils import prune

    layer, x = made(), torch.randn(1, 6, 24, dtype=torch.float64)
    prune.l1_unstructured(layer.k_conv1d, "weight", 0.5)
    with torch.no_grad():
        layer.k_conv1d.weight_orig.mul_(3)
    found = layer(x)[0]
    layer.k_conv1d(layer.k_proj(x))  # so that the formula reads the new weight
    torch.testing.assert_close(found[0], formula(layer, x[0]))


def test_a_cache_that_is_not_to_be_updated_stays() -> None:
    layer, x = made(layer_idx=0), torch.randn(1, 6, 24, dtype=torch.float64)
    cache = StateCache()
    with torch.no_grad():
        layer(x[:, :4], past_key_values=cache, use_cache=True)
        tried = layer(x[:, 4:5], past_key_values=cache)[0]
        again = layer(x[:, 4:5], past_key_values=cache, use_cache=True)[0]
    torch.testing.assert_close(again, tried, rtol=0, atol=0)
    assert cache.get_seq_length() == 5


def test_wide_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert GatedDeltaNet(**SIZES)(torch.randn(1, 3, 24))[0].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms(dtype: torch.dtype) -> None:
    x, g = torch.randn(2, 3, 5, 8).to(dtype).unbind()
    plain, biased = RMSNorm(8), RMSNorm(8, bias=True)
    wanted = functional.rms_norm(x.float(), (8,), eps=1e-5)
    assert plain(x).dtype == dtype
    torch.testing.assert_close(plain(x).float(), wanted.to(dtype).float())
    torch.testing.assert_close(biased(x), plain(x))
    gated = FusedRMSNormGated(8)(x, g)
    torch.testing.assert_close(
        gated.float(), (wanted * functional.silu(g.float())).to(dtype).float()
    )
    assert RMSNorm(8, elementwise_affine=False).weight is None


@pytest.mark.parametrize("shape", [(15, 8), (1, 3, 5, 8), (5, 3, 8)], ids=str)
def test_gates_of_the_same_rows(shape: tuple[int, ...]) -> None:
    x, g = torch.randn(2, 3, 5, 8).unbind()
    norm = FusedRMSNormGated(8)
    assert torch.equal(norm(x, g.view(shape)), norm(x, g))
    # One row is the gate of all.
    assert torch.equal(norm(x, g[:1, :1]), norm(x, g[:1, :1].expand_as(x)))


NO_NORMS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "channels": (lambda x: RMSNorm(8)(x[..., :1]), r"weight must be .*\(1,\), found \(8,\)"),
    "weight": (lambda x: norms.rms_norm(x, x, None), "weight must be of the size of the last"),
    "bias": (lambda x: norms.rms_norm(x, None, x[0, :1]), "bias must be of the size of the last"),
    "residual": (lambda x: norms.rms_norm(x, None, None, x[None]), "residual must have the shape"),
    "gate": (lambda x: norms.rms_norm_gated(x, x[None, :, :2], None, None), "gate must have the"),
    "integers": (lambda x: RMSNorm(8)(x.long()), "x must be .*, found torch.int64"),
    "complex": (lambda x: norms.l2norm(x.cfloat()), "x must be .*, found torch.complex64"),
    "result": (lambda x: norms.l2norm(x, output_dtype=torch.int8), "output_dtype must be .*int8"),
}


@pytest.mark.parametrize(("call", "words"), NO_NORMS.values(), ids=NO_NORMS)
def test_what_would_be_broadcast_or_rounded_is_refused(
    call: Callable[[torch.Tensor], Any], words: str
) -> None:
    with pytest.raises(flashvar.InvalidInputError, match=words):
        call(torch.randn(3, 8))


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "mode": ({"mode": "parallel"}, "mode must be 'chunk'"),
    "heads": ({"num_v_heads": 3}, "a multiple of num_heads, found 3 and 2"),
    "expand_v": ({"expand_v": 1.3}, "must be an integer, found 8 times 1.3"),
    **{
        f"expand_v {odd}": ({"expand_v": odd}, "expand_v must be a positive number, found")
        for odd in (float("nan"), float("inf"), -1, 0, True, "2", None)
    },
    "gate": ({"output_gate_activation": "gelu"}, "found 'gelu'"),
}


@pytest.mark.parametrize(("changed", "words"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(flashvar.InvalidInputError, match=words):
        GatedDeltaNet(**(SIZES | changed))


class KeyValueCache(list[Any]):
    """As transformers' caches of attention, which take keys and values by position."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int) -> None:
        """Store them."""


@pytest.mark.parametrize("other", [KeyValueCache(), {}, object()], ids=type)
def test_caches_without_states_are_refused(other: Any) -> None:
    layer, x = made(layer_idx=0), torch.randn(1, 6, 24, dtype=torch.float64)
    words = f"past_key_values must be a StateCache or .* found {type(other).__name__}: pass a"
    with pytest.raises(flashvar.InvalidInputError, match=words):
        layer(x, past_key_values=other, use_cache=True)


def test_refusals_of_calls() -> None:
    layer = made()
    x = torch.randn(2, 4, 24, dtype=torch.float64)
    with pytest.raises(flashvar.ShapeError, match=r"found \(2, 4, 4\)"):
        layer(x, attention_mask=torch.ones(2, 4, 4))
    with pytest.raises(flashvar.InvalidInputError, match="layer_idx must be given"):
        layer(x, past_key_values=StateCache())
    with pytest.raises(flashvar.ShapeError, match=r"hidden_states must be .*, found \(4, 24\)"):
        layer(x[0])
    with pytest.raises(flashvar.InvalidInputError, match="found both"):
        ShortConvolution(6, 4)(
            torch.randn(1, 4, 6), mask=x[..., 0], cu_seqlens=torch.tensor([0, 4])
        )
    for mask in (torch.ones(2, 1), torch.ones(2, 3), torch.ones(4)):
        with pytest.raises(flashvar.ShapeError, match=r"mask must be .* that is \(2, 4\), found"):
            ShortConvolution(24, 4).double()(x, mask=mask)
    for refuses in (layer, ShortConvolution(24, 4).double()):
        with pytest.raises(
            flashvar.InvalidInputError, match="cp_context must be None, found object"
        ):
            refuses(x, cp_context=object())


@pytest.mark.parametrize("name", ["seq_idx", "cu_seq_lens_q"])
def test_packed_sequences_of_another_name_are_not_computed_as_one(name: str) -> None:
    layer, x = made(), torch.randn(1, 4, 24, dtype=torch.float64)
    ends = torch.tensor([0, 1, 4])
    packing = {name: torch.tensor([[0, 1, 1, 1]]) if name == "seq_idx" else ends}
    with pytest.raises(flashvar.InvalidInputError, match=f"found {name} alone: pass their off"):
        layer(x, **packing)
    both, _, _ = layer(x, cu_seqlens=ends, **packing)
    assert torch.equal(both, layer(x, cu_seqlens=ends)[0])


def test_short_convolution_of_named_sequences() -> None:
    layer = ShortConvolution(6, 4, bias=True).double()
    x = torch.randn(1, 7, 6, dtype=torch.float64)
    y, state = layer(x, seq_idx=torch.tensor([[0, 0, 0, 1, 1, 1, 1]]))
    assert state is None
    expected, _ = layer(x, cu_seqlens=torch.tensor([0, 3, 7]))
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("residual", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_fp32", [False, True])
def test_norms_of_a_sum(in_fp32: bool, residual: torch.dtype | None) -> None:
    """The sum is normalized before it is rounded, and returned in the dtype of the residual."""
    x, g = torch.randn(2, 5, 8).bfloat16(), torch.randn(2, 5, 8).bfloat16()
    other = None if residual is None else torch.randn(2, 5, 8).to(residual)
    total = x.float() if other is None else x.float() + other
    wanted = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    options = {"residual": other, "prenorm": True, "residual_in_fp32": in_fp32}
    for found, expected in (
        (RMSNorm(8)(x, **options), wanted),
        (FusedRMSNormGated(8)(x, g, **options), wanted * torch.nn.functional.silu(g.float())),
    ):
        y, after = found
        assert y.dtype == x.dtype
        torch.testing.assert_close(y, expected.bfloat16())
        kept = residual or (torch.float32 if in_fp32 else x.dtype)
        assert after.dtype == kept
        assert torch.equal(after, total.to(kept))
    assert torch.equal(RMSNorm(8)(x, other), RMSNorm(8)(x, **options)[0])


def test_l2_norm() -> None:
    x = torch.randn(3, 8).bfloat16()
    wanted = x.float() / (x.float().square().sum(-1, keepdim=True) + 0.5).sqrt()
    torch.testing.assert_close(L2Norm(0.5)(x), wanted.bfloat16())
    torch.testing.assert_close(l2norm(x, 0.5, torch.float32), wanted)


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("ends", [[0, 1, 2, 3], [0, 2, 2, 3]], ids=["steps", "an empty one"])
def test_packed_decoding_updates_the_cache(ends: list[int], final: bool) -> None:
    layer = ShortConvolution(6, 4)
    x, cache = torch.randn(1, 3, 6), torch.randn(3, 6, 4)
    before, offsets = cache.clone(), torch.tensor(ends)
    options = {"output_final_state": True, "cu_seqlens": offsets}
    wanted, after = layer(x, cache=cache, **options)
    assert torch.equal(cache, before)  # autograd may read it
    with torch.no_grad():
        y, state = layer(x, cache=cache, **options | {"output_final_state": final})
    assert torch.equal(y, wanted)
    assert torch.equal(cache, after if ends == [0, 1, 2, 3] else before)
    assert torch.equal(state, after) if final else state is None


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("given", [False, True], ids=["zeros", "cache"])
@torch.no_grad()
def test_a_step_of_a_short_convolution(given: bool, packed: bool) -> None:
    layer = ShortConvolution(6, 4, bias=True)
    x, residual, cache = torch.randn(3, 1, 6), torch.randn(3, 1, 6), torch.randn(3, 6, 4)
    before = cache.clone() if given else None
    wanted, after = layer(x, residual, cache=before, output_final_state=True)
    tokens = [one.transpose(0, 1) if packed else one for one in (x, residual)]
    ends = torch.arange(4, dtype=torch.int32) if packed else None
    y, final = layer.step(*tokens, cache if given else None, True, cu_seqlens=ends)
    torch.testing.assert_close(y, wanted.view(tokens[0].shape))
    assert torch.equal(final, after)
    assert (final is cache) is given
    assert layer.step(*tokens, None, cu_seqlens=ends)[1] is None
