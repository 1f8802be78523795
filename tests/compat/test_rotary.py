"""`flash_attn.layers.rotary` and `flash_attn.ops.triton.rotary` of the stand-in."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from flashvar.compat.flash_attn.layers import rotary
from flashvar.compat.flash_attn.layers.rotary import (
    ApplyRotaryEmb,
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
    rotate_half,
)
from flashvar.compat.flash_attn.ops.triton.rotary import apply_rotary
from flashvar.errors import DtypeError, InvalidInputError, LayoutError, ShapeError
from flashvar.ops.rotary.rotation import checked

BOTH = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
ANGLES = torch.linspace(0, 6, 45).view(9, 5)
COS, SIN = ANGLES.cos(), ANGLES.sin()


def turned(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """[..., rows, heads, head_dim] turned as complex numbers by [..., rows, pairs]."""
    pairs = angles.shape[-1]
    part = x[..., : 2 * pairs]
    both = part.unflatten(-1, (pairs, 2)) if interleaved else part.unflatten(-1, (2, pairs)).mT
    numbers = torch.view_as_complex(both.contiguous())
    numbers = numbers * torch.polar(torch.ones_like(angles), angles)[..., None, :]
    result = torch.view_as_real(numbers)
    result = result if interleaved else result.mT
    return torch.cat((result.flatten(-2), x[..., 2 * pairs :]), -1)


def made(*sizes: int, **options: Any) -> torch.Tensor:
    return torch.randn(*sizes, **options)


SIGNATURES = {
    "apply_rotary_emb": "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, "
    "cu_seqlens=None, max_seqlen=None",
    "apply_rotary_emb_qkv_": "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, "
    "seqlen_offsets=0, num_heads_q=None",
    "apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
    "apply_rotary_emb_torch": "x, cos, sin, interleaved=False",
    "rotate_half": "x, interleaved=False",
    "apply_rotary": "x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, "
    "interleaved=False, inplace=False, conjugate=False",
    "RotaryEmbedding": "dim, base=10000.0, interleaved=False, scale_base=None, device=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature_is_theirs(name: str) -> None:
    parameters = inspect.signature(getattr(rotary, name)).parameters.values()
    plain = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert ", ".join(plain) == SIGNATURES[name]


@BOTH
@pytest.mark.parametrize("pairs", [5, 3])
@pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])
def test_positions(inplace: bool, pairs: int, interleaved: bool) -> None:
    x, angles = made(2, 5, 3, 12), ANGLES[:, :pairs]
    cos, sin = angles.cos(), angles.sin()
    starts = torch.tensor([4, 1])
    expected = turned(x, torch.stack([angles[4:9], angles[1:6]]), interleaved)
    for offsets in (starts, starts.int()):
        given = x.clone()
        found = apply_rotary_emb(given, cos, sin, interleaved, inplace, offsets)
        torch.testing.assert_close(found, expected)
        assert (found is given) == inplace
        assert torch.equal(given, x) or inplace
    found = apply_rotary_emb(x.clone(), cos, sin, interleaved, inplace, 2)
    torch.testing.assert_close(found, turned(x, angles[2:7], interleaved))
    cu = torch.tensor([0, 5, 10], dtype=torch.int32)
    packed = x.flatten(0, 1)
    found = apply_rotary_emb(packed, cos, sin, interleaved, inplace, starts, cu, 5)
    torch.testing.assert_close(found.unflatten(0, (2, 5)), expected)


@BOTH
def test_back_again(interleaved: bool) -> None:
    x = made(2, 5, 3, 12)
    there = apply_rotary(x, COS, SIN, 3, interleaved=interleaved)
    again = apply_rotary(there, COS, SIN, 3, interleaved=interleaved, conjugate=True)
    torch.testing.assert_close(again, x)
    assert not torch.allclose(there, x)


def test_packed_rows_of_no_sequence_stay() -> None:
    x, cu = made(9, 2, 10), torch.tensor([2, 4, 4, 7])
    out = apply_rotary_emb(x, COS, SIN, cu_seqlens=cu)
    torch.testing.assert_close(out[2:4], turned(x[2:4], ANGLES[:2], False))
    torch.testing.assert_close(out[4:7], turned(x[4:7], ANGLES[:3], False))
    assert torch.equal(out[:2], x[:2])
    assert torch.equal(out[7:], x[7:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16])
def test_it_is_computed_in_32_bits(dtype: torch.dtype, table: torch.dtype) -> None:
    x, cos, sin = made(2, 5, 3, 12).to(dtype), COS.to(table), SIN.to(table)
    found = apply_rotary_emb(x, cos, sin)
    expected = apply_rotary_emb_torch(x.double(), cos[:5].double(), sin[:5].double())
    assert found.dtype == dtype
    step = torch.finfo(dtype).eps
    assert ((found.double() - expected).abs() <= 0.51 * step * expected.abs() + 1e-6).all()


@BOTH
def test_qkv_of_one_head_count_and_of_groups(interleaved: bool) -> None:
    qkv = made(2, 5, 3, 4, 12)
    expected = turned(qkv[:, :, :2].flatten(2, 3), ANGLES[1:6], interleaved).unflatten(2, (2, 4))
    for given in (qkv.clone(), qkv.transpose(2, 3).contiguous().transpose(2, 3)):
        assert apply_rotary_emb_qkv_(given, COS, SIN, None, None, interleaved, 1) is given
        torch.testing.assert_close(given[:, :, :2], expected)
        assert torch.equal(given[:, :, 2], qkv[:, :, 2])
    grouped = made(2, 5, 8, 12)
    given = grouped.clone()
    apply_rotary_emb_qkv_(given, COS, SIN, SIN, COS, interleaved, num_heads_q=4)
    torch.testing.assert_close(given[:, :, :4], turned(grouped[:, :, :4], ANGLES[:5], interleaved))
    other = apply_rotary_emb(grouped[:, :, 4:6], SIN, COS, interleaved)
    torch.testing.assert_close(given[:, :, 4:6], other)
    assert torch.equal(given[:, :, 6:], grouped[:, :, 6:])


@BOTH
def test_kv(interleaved: bool) -> None:
    kv = made(2, 5, 2, 4, 12)
    given = kv.clone()
    assert apply_rotary_emb_kv_(given, COS, SIN, interleaved, 2) is given
    torch.testing.assert_close(given[:, :, 0], turned(kv[:, :, 0], ANGLES[2:7], interleaved))
    assert torch.equal(given[:, :, 1], kv[:, :, 1])


@BOTH
def test_rotate_half_and_tables_of_each_entry(interleaved: bool) -> None:
    x, angles = made(2, 5, 3, 12), torch.stack((ANGLES[:5], ANGLES[4:]))
    found = apply_rotary_emb_torch(x, angles.cos(), angles.sin(), interleaved)
    torch.testing.assert_close(found, turned(x, angles, interleaved))
    quarter = torch.full((5, 6), torch.pi / 2)
    torch.testing.assert_close(rotate_half(x, interleaved), turned(x, quarter, interleaved))


def test_the_functions_have_the_names_of_classes() -> None:
    x = made(2, 5, 3, 12)
    assert torch.equal(ApplyRotaryEmb.apply(x, COS, SIN, True), apply_rotary_emb(x, COS, SIN, True))
    qkv, kv = made(2, 5, 3, 3, 12), made(2, 5, 2, 3, 12)
    for name, given in (("QKV_", qkv), ("KV_", kv)):
        found = getattr(rotary, f"ApplyRotaryEmb{name}").apply(given.clone(), COS, SIN)
        function = getattr(rotary, f"apply_rotary_emb_{name.lower()}")
        assert torch.equal(found, function(given.clone(), COS, SIN))


X = made(2, 5, 3, 12)
CU = torch.tensor([0, 4, 10], dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((None, COS, SIN), InvalidInputError, "x must be a torch.Tensor, found NoneType"),
        ((X, None, SIN), InvalidInputError, "cos must be a torch.Tensor"),
        ((X.int(), COS, SIN), DtypeError, "x must be bfloat16, .*, found torch.int32"),
        ((X, COS.int(), SIN), DtypeError, "cos must be bfloat16, .*, found torch.int32"),
        ((X, COS, SIN[:, :4]), ShapeError, r"at most 6\), found \(9, 5\) and \(9, 4\)"),
        ((X, COS.repeat(1, 2), SIN.repeat(1, 2)), ShapeError, r"at most 6\), found \(9, 10\)"),
        ((X, COS[None], SIN[None]), ShapeError, r"found \(1, 9, 5\)"),
        ((X[0], COS, SIN), ShapeError, r"\[batch, seqlen, heads, head_dim\], found \(5, 3, 12\)"),
        ((X, COS[:4], SIN[:4]), ShapeError, "5 positions, .* found 4: pass longer tables"),
        (
            (X, COS, SIN, 5),
            ShapeError,
            "10 positions, for sequences of up to 5 tokens from position 5 on",
        ),
        ((X, COS, SIN, -1), InvalidInputError, "seqlen_offsets must be at least 0, found -1"),
        ((X, COS, SIN, 1.5), InvalidInputError, "an integer or a tensor of them, found float"),
        ((X, COS, SIN, None), InvalidInputError, "an integer or a tensor of them, found NoneType"),
        ((X, COS, SIN, torch.tensor([1, 2, 3])), ShapeError, r"\[batch\] = \[2\], found \(3,\)"),
        ((X, COS, SIN, torch.tensor([1.0, 2])), DtypeError, "seqlen_offsets must be int32"),
        ((X, COS, SIN, torch.tensor([0, 5])), ShapeError, "every position .* a row at 9"),
        ((X, COS, SIN, torch.tensor([-1, 0])), ShapeError, "every position .* a row at -1"),
        *(
            ((X[0], COS, SIN, 0, torch.tensor(ends)), ShapeError, "cu_seqlens must not decrease")
            for ends in ([0, 3, 2], [-2, 3], [0, X.shape[1] + 1])
        ),
        ((X, COS, SIN, 0, CU), ShapeError, r"\[total, heads, head_dim\] with cu_seqlens"),
        ((X[0], COS, SIN, 0, CU.float()), DtypeError, "cu_seqlens must be int32 or int64"),
        ((X[0], COS, SIN, 0, CU[None]), ShapeError, r"cu_seqlens must be \[batch \+ 1\]"),
        ((X[0], COS, SIN, 0, CU, 10), ShapeError, "sequences of up to 10 tokens"),
        ((X.flatten(0, 1), COS[:5], SIN[:5], 0, CU), ShapeError, "a row at 5"),
    ],
)
def test_what_does_not_fit_is_said(
    arguments: tuple[Any, ...], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        apply_rotary(*arguments)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: apply_rotary_emb_qkv_(X, COS, SIN), ShapeError, "with num_heads_q=None"),
        (lambda: apply_rotary_emb_qkv_(X, COS, SIN, num_heads_q=2), ShapeError, "num_heads_q=2"),
        (lambda: apply_rotary_emb_qkv_(X[None], COS, SIN), ShapeError, "3, heads, head_dim"),
        (lambda: apply_rotary_emb_kv_(X, COS, SIN), ShapeError, r"2, heads, head_dim\], found"),
        (lambda: apply_rotary_emb_torch(X, COS, SIN), ShapeError, "one row for each of x"),
        (lambda: rotate_half(X[..., :3]), ShapeError, "an even last dimension"),
        (lambda: RotaryEmbedding(7), InvalidInputError, "positive even number of entries, found 7"),
        (
            lambda: RotaryEmbedding(8)(made(2, 5, 3, 3, 8), seqlen_offset=CU[:2]),
            InvalidInputError,
            "max_seqlen must be given",
        ),
        (
            lambda: apply_rotary_emb(X[:1].expand(2, -1, -1, -1), COS, SIN, inplace=True),
            LayoutError,
            "share memory",
        ),
    ],
)
def test_other_functions_say_it_too(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


def test_nothing_to_turn() -> None:
    assert apply_rotary_emb(X[:, :0], COS, SIN).shape == (2, 0, 3, 12)
    assert apply_rotary_emb(X[:0], COS, SIN).shape == (0, 5, 3, 12)
    assert torch.equal(apply_rotary_emb(X, COS[:, :0], SIN[:, :0]), X)
    rows = X.flatten(0, 1)
    assert torch.equal(apply_rotary_emb(rows, COS, SIN, cu_seqlens=CU[:1]), rows)


@pytest.mark.parametrize("grad", [False, True])
def test_no_heads_to_turn(grad: bool) -> None:
    for call, kinds in ((apply_rotary_emb_qkv_, 3), (apply_rotary_emb_kv_, 2)):
        x = torch.zeros(2, 5, kinds, 0, 12, requires_grad=grad) * 1
        found = call(x, COS, SIN)
        assert found.shape == x.shape
        assert found.requires_grad is grad


def test_the_op_is_chosen_for_plain_tensors_alone() -> None:
    """A tensor subclass sees torch's own functions, and may have no rule for ours."""
    seen = []

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    found = apply_rotary_emb(X.as_subclass(Mine), COS, SIN)
    assert isinstance(found, Mine)
    torch.testing.assert_close(found.as_subclass(torch.Tensor), apply_rotary_emb(X, COS, SIN))
    assert not any("flashvar" in name for name in seen)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@BOTH
def test_torch_has_what_it_asks_of_an_op(interleaved: bool) -> None:
    rotation = checked(X, COS, SIN, interleaved=interleaved, seqlen_offsets=torch.tensor([1, 2]))
    leaf = X.clone().requires_grad_()
    torch.library.opcheck(torch.ops.flashvar.rotary.default, (leaf, 2, *rotation))
    torch.library.opcheck(torch.ops.flashvar.rotary_.default, (X.clone(), *rotation))
