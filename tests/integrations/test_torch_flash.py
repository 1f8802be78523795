"""Flashvar in torch's registry of flash attentions; its kernels at the key of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashvar.errors import BackendUnavailableError
from flashvar.integrations import torch as sdpa
from flashvar.integrations.torch import flash as ours

pytestmark = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "restore_flash_attention_impl"),
    reason=f"torch {torch.__version__} has no registry of flash attentions that can be left",
)

flash = torch.ops.aten._scaled_dot_product_flash_attention


@pytest.fixture
def on_cpu() -> Iterator[None]:
    implementation = ours.Implementation("CPU")
    yield
    implementation.remove()


def made(layout: str, seqlen: int) -> torch.Tensor:
    """[batch, heads, sequence, head_dim] that lies in memory as models have it."""
    if layout == "bhsd":
        return torch.randn(2, 4, seqlen, 16)
    if layout == "bshd":
        return torch.randn(2, seqlen, 4, 16).transpose(1, 2)
    if layout == "packed":
        return torch.randn(2, seqlen, 3, 4, 16)[:, :, 1].transpose(1, 2)
    return torch.randn(seqlen, 2, 4, 16).permute(1, 2, 0, 3)  # "sbhd"


LAYOUTS = ("bhsd", "bshd", "packed", "sbhd")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_equals_torchs_function(layout: str, causal: bool) -> None:
    tensors = [made(layout, 9).requires_grad_() for _ in "qkv"]
    expected = scaled_dot_product_attention(*tensors, is_causal=causal, scale=0.3)
    out, lse, *_ = flash(*tensors, is_causal=causal, scale=0.3)
    torch.testing.assert_close(out, expected)
    grads = [torch.autograd.grad(x.square().sum(), tensors) for x in (out, expected)]
    torch.testing.assert_close(*grads)
    scores = tensors[0] @ tensors[1].mT * 0.3
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1) if causal else torch.zeros(9, 9).bool()
    torch.testing.assert_close(lse, scores.masked_fill(hidden, -torch.inf).logsumexp(-1))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gives_what_the_compiler_was_promised(layout: str) -> None:
    q, k, v = (made(layout, 9) for _ in "qkv")
    found = flash(q, k, v)
    promised = flash(*(x.to("meta") for x in (q, k, v)))
    for have, want in zip(found, promised, strict=True):
        if isinstance(want, torch.Tensor):
            assert (have.shape, have.stride(), have.dtype) == (
                want.shape,
                want.stride(),
                want.dtype,
            )
        else:
            assert have == want
    out, lse, *_, state, unused, _ = found
    arguments = (out, q, k, v, out, lse, None, None, 9, 9, 0.0, False, state, unused)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(*arguments)
    for grad, tensor in zip(grads, (q, k, v), strict=True):
        assert grad.stride() == torch.empty_like(tensor).stride()


@pytest.mark.usefixtures("on_cpu")
def test_dropout_is_left_to_the_kernel_that_was_there() -> None:
    """The forward may have been that kernel's, whose seed drops other elements here."""
    q = made("bhsd", 9)
    with pytest.raises(BackendUnavailableError, match="dropout, found none"):
        flash(q, q, q, 0.5)
    out, lse, *_, seed, unused, _ = flash(q, q, q)
    arguments = (out, q, q, q, out, lse, None, None, 9, 9, 0.5, False, seed, unused)
    with pytest.raises(BackendUnavailableError, match="dropout, found none"):
        torch.ops.aten._scaled_dot_product_flash_attention_backward(*arguments)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e39], ids=str)
def test_odd_scales_are_left_to_the_kernel_that_was_there(scale: float) -> None:
    q = made("bhsd", 9)
    out, lse, *_, seed, unused, _ = flash(q, q, q)
    arguments = (out, q, q, q, out, lse, None, None, 9, 9, 0.0, False, seed, unused)
    for call in (
        lambda: flash(q, q, q, scale=scale),
        lambda: cudnn(q, q, q, None, True, scale=scale),
        lambda: torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *arguments, scale=scale
        ),
    ):
        with pytest.raises(BackendUnavailableError, match=r"a scale that is not .*, found none"):
            call()


@pytest.mark.usefixtures("on_cpu")
def test_what_nothing_serves() -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(BackendUnavailableError, match="a debug mask is wanted, found none"):
        flash(q, q, q, 0.0, False, True)


@pytest.mark.usefixtures("on_cpu")
def test_a_kernel_that_was_there_takes_what_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    expected = flash(q, q, q, is_causal=True, scale=0.3)[0]
    (want,) = torch.autograd.grad(expected.square().sum(), q)
    upper = ours.Implementation("CPU")  # above that of the fixture, which serves
    asked: list[str | None] = []

    def why_not(*_: object) -> str | None:
        asked.append(None if len(asked) % 2 else "a whim")
        return asked[-1]

    monkeypatch.setattr(ours, "_why_not", why_not)
    try:
        out = flash(q, q, q, is_causal=True, scale=0.3)[0]
        (grad,) = torch.autograd.grad(out.square().sum(), q)
    finally:
        upper.remove()
    assert asked == ["a whim", None] * 2
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grad, want)


cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_takes_what_torch_gives_cudnn(layout: str, causal: bool) -> None:
    tensors = [made(layout, 9).requires_grad_() for _ in "qkv"]
    expected = scaled_dot_product_attention(*tensors, is_causal=causal, scale=0.3)
    before = ours.CALLS.of_this_thread()
    out, lse, *rest = cudnn(*tensors, None, True, 0.0, causal, scale=0.3)
    assert ours.CALLS.of_this_thread() == before + 1
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse[..., 0], flash(*tensors, 0.0, causal, scale=0.3)[1])
    grads = [torch.autograd.grad(x.square().sum(), tensors) for x in (out, expected)]
    torch.testing.assert_close(*grads)
    on_meta = cudnn(*(x.to("meta") for x in tensors), None, True, 0.0, causal)
    for have, want in zip((out, lse, *rest), on_meta, strict=True):
        if isinstance(want, torch.Tensor):
            assert (have.shape, have.stride(), have.dtype) == (
                want.shape,
                want.stride(),
                want.dtype,
            )
        else:
            assert have == want


CUDNNS_OWN: dict[str, dict[str, Any]] = {
    "a mask": {"attn_bias": torch.zeros(1, 1, 9, 9)},
    "dropout": {"dropout_p": 0.5},
    "not square": {"is_causal": True},
    "switched off": {},
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("case", CUDNNS_OWN)
def test_leaves_to_cudnn_what_is_cudnns(case: str) -> None:
    """On the CPU there is none, which is said."""
    q, k = made("bhsd", 9), made("bhsd", 11 if case == "not square" else 9)
    off = sdpa_kernel([SDPBackend.CUDNN_ATTENTION]) if case == "switched off" else nullcontext()
    words = {"attn_bias": None, "compute_log_sumexp": True, **CUDNNS_OWN[case]}
    with off, pytest.raises(BackendUnavailableError, match=f"{case}.*, found none"):
        cudnn(q, k, k, **words)


@pytest.mark.usefixtures("on_cpu")
def test_a_forward_of_cudnns_has_its_backward() -> None:
    q = made("bhsd", 9)
    out, lse, *_, seed, offset, _ = cudnn(q, q, q, None, True)
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    words = (out, q, q, q, out, lse)
    rest = (offset, None, None, None, 9, 9, 0.0, False)
    assert backward(*words, seed, *rest)[0].shape == q.shape
    with pytest.raises(BackendUnavailableError, match="a forward of cuDNN's, found none"):
        backward(*words, torch.empty((), dtype=torch.int64), *rest)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_named_backend_serves_here_too(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    forward = ours.plans.forward

    def watched(inputs: Any, options: Any) -> Any:
        asked.append(options.backend)
        return forward(inputs, options)

    monkeypatch.setattr(ours.plans, "forward", watched)
    implementation = ours.Implementation("CPU")
    try:
        with sdpa.activate(backend):
            flash(*(made("bhsd", 9) for _ in "qkv"))
    finally:
        implementation.remove()
    assert asked == [backend]


def test_removal() -> None:
    q = torch.randn(1, 1, 4, 8)
    first = ours.Implementation("CPU")
    second = ours.Implementation("CPU")  # over a kernel that is there, without a warning
    flash(q, q, q)
    second.remove()
    flash(q, q, q)
    first.remove()
    with pytest.raises(NotImplementedError):
        flash(q, q, q)


class Other:
    def remove(self) -> None:
        pass


def test_an_activation_is_in_the_registry() -> None:
    registry: Any = torch.nn.attention
    assert registry.current_flash_attention_impl() is None
    registry.register_flash_attention_impl("other", register_fn=Other)
    registry.activate_flash_attention_impl("other")
    with sdpa.activate():
        assert ours.NAME in registry.list_flash_attention_impls()
        assert registry.current_flash_attention_impl() == ours.NAME
        with sdpa.activate():
            pass
        assert registry.current_flash_attention_impl() == ours.NAME
    assert registry.current_flash_attention_impl() == "other"
    registry.restore_flash_attention_impl()
    with sdpa.activate():
        pass
    assert registry.current_flash_attention_impl() is None


@pytest.mark.parametrize(
    "missing", ["register_flash_attention_impl", "restore_flash_attention_impl"]
)
def test_an_older_torch(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, missing)
    assert not ours.switch_on()
    ours.switch_off()
