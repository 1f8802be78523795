"""Integrations on a device: torch's function and registry, Attend, and diffusers where it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from device_call import DEVICE, skip_unless_compiled
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashvar.integrations import torch as sdpa
from flashvar.integrations.attend import Attend
from flashvar.integrations.documents import Documents
from flashvar.integrations.torch import flash as torch_flash
from flashvar.ops.attention import plan as plans

OWN = functional.scaled_dot_product_attention
# A model's outputs and gradients in bfloat16 may differ from its own path by so much of the
# largest, and of float64's by three times what its own path does.
NEAR = 3.0

pytestmark = pytest.mark.usefixtures("seed")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    sdpa.deactivate()


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


def assert_near(found: Any, own: Any, exact: Any) -> None:
    """Every tensor is as near to float64's as the one that torch's own path gave."""
    for have, peer, want in zip(found, own, exact, strict=True):
        budget = (peer.double() - want).abs().max().item()
        rounding = torch.finfo(torch.bfloat16).eps * want.abs().max().item()
        error = (have.double() - want).abs().max().item()
        assert error <= NEAR * budget + rounding, (error, budget)


def computed(
    tensors: list[torch.Tensor], dtype: torch.dtype, options: dict[str, Any]
) -> list[torch.Tensor]:
    """Output and gradients of torch's function, whatever it is now."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        options = {**options, "attn_mask": mask.to(dtype)}
    out = functional.scaled_dot_product_attention(*leaves, **options)
    weights = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


CASES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "plain": ((8, 200, 200), {}),
    "causal": ((8, 200, 200), {"is_causal": True, "scale": 0.2}),
    "causal-more-keys": ((8, 100, 200), {"is_causal": True}),
    "causal-more-queries": ((8, 200, 100), {"is_causal": True}),
    "gqa": ((2, 200, 200), {"enable_gqa": True}),
    "bool-mask": ((8, 90, 200), {"attn_mask": "padding"}),
    "float-mask": ((8, 90, 200), {"attn_mask": "bias"}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_torchs_function(case: Any, backend: str) -> None:
    (heads_kv, rows, keys), options = case[0], dict(case[1])
    for op in ("attention_fwd", "attention_bwd"):
        skip_unless_compiled(backend, torch.bfloat16, 64, op)
    if options.get("attn_mask") == "padding":
        lengths = torch.tensor([200, 77], device=DEVICE)[:, None, None, None]
        options["attn_mask"] = torch.arange(keys, device=DEVICE) < lengths
    elif options.get("attn_mask") == "bias":
        options["attn_mask"] = torch.randn(1, 8, rows, keys, device=DEVICE, dtype=torch.bfloat16)
    tensors = [made(2, 8, rows, 64), made(2, heads_kv, keys, 64), made(2, heads_kv, keys, 64)]
    own = computed(tensors, torch.bfloat16, options)
    exact = computed(tensors, torch.float64, options)
    with sdpa.activate(backend=backend):  # type: ignore[arg-type]
        found = computed(tensors, torch.bfloat16, options)
        assert sdpa.report() == {sdpa.RUN: 1}
    assert_near(found, own, exact)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True, device=DEVICE)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def through(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """What a model gives, and the gradients of its parameters."""
    model.zero_grad()
    out = model(x)
    (
        out.double() * torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape)
    ).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


def test_a_transformer(backend: str) -> None:
    for op in ("attention_fwd", "attention_bwd"):
        skip_unless_compiled(backend, torch.bfloat16, 64, op)
    model, x = encoder().bfloat16(), made(2, 150, 256)
    own = through(model, x)
    with sdpa.activate(backend=backend):  # type: ignore[arg-type]
        found = through(model, x)
        assert sdpa.report() == {sdpa.RUN: 2}
        model.eval()
        with torch.no_grad():
            model(x)
        assert sdpa.report() == {sdpa.RUN: 4}
    exact = through(model.train().double(), x.double())
    assert_near(found, own, exact)


def test_float32_is_left_to_torch() -> None:
    if DEVICE == "cpu":
        pytest.skip("the reference takes float32 on the CPU")
    q = made(1, 2, 30, 64, dtype=torch.float32)
    with sdpa.activate():
        out = functional.scaled_dot_product_attention(q, q, q)
        assert "bfloat16 and float16" in str(sdpa.last_reason())
        torch.testing.assert_close(out, OWN(q, q, q))
        with torch.autocast("cuda", torch.bfloat16):
            functional.scaled_dot_product_attention(q, q, q)
            assert sdpa.last_reason() is None
            k = q.detach().bfloat16().mT.contiguous().mT  # another dtype, rows not contiguous
            found = functional.scaled_dot_product_attention(q, k, k)
            assert sdpa.last_reason() is None
            torch.testing.assert_close(found, OWN(q, k, k), atol=2e-2, rtol=2e-2)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes that flashvar computes below torch's dispatcher."""
    if DEVICE == "cpu":
        pytest.skip("torch's registry of flash attentions is of CUDA devices")
    if not torch_flash.switch_on():
        pytest.skip(f"torch {torch.__version__} has no registry of flash attentions")
    torch_flash.switch_off()
    calls: list[str] = []
    for name in ("forward", "backward"):
        passed = getattr(plans, name)

        def watched(*words: Any, _name: str = name, _passed: Any = passed, **options: Any) -> Any:
            calls.append(_name)
            return _passed(*words, **options)

        monkeypatch.setattr(plans, name, watched)
    return calls


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed"])
@pytest.mark.parametrize("head_dim", [64, 40])
def test_the_registry(layout: str, head_dim: int, counted: list[str]) -> None:
    """A function that was taken out of torch before the activation."""
    skip_unless_compiled("cuda", torch.bfloat16, head_dim)
    if layout == "bhsd":
        tensors = [made(2, 4, 130, head_dim) for _ in "qkv"]
    elif layout == "bshd":
        tensors = [made(2, 130, 4, head_dim).transpose(1, 2) for _ in "qkv"]
    else:
        tensors = list(made(2, 130, 3, 4, head_dim).transpose(1, 3).unbind(2))

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            out = OWN(*(x.to(dtype) for x in tensors), is_causal=True)
        weights = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape).to(dtype)
        return [out.detach(), *torch.autograd.grad(out, tensors, weights)]

    own, exact = run(torch.bfloat16), run(torch.float64)
    assert not counted
    with sdpa.activate():
        found = run(torch.bfloat16)
    assert counted == ["forward", "backward"]
    assert_near(found, own, exact)
    again = run(torch.bfloat16)
    assert counted == ["forward", "backward"]
    assert torch.equal(again[0], own[0])


@pytest.mark.parametrize("insists", [False, True], ids=["torch chooses", "cuDNN insisted on"])
def test_where_torch_prefers_cudnn(insists: bool, counted: list[str]) -> None:
    """As it does on newer devices; who insists on cuDNN has it, backward too."""
    skip_unless_compiled("cuda", torch.bfloat16, 64)
    tensors = [made(2, 4, 130, 64) for _ in "qkv"]
    weights = torch.randn(2, 4, 130, 64, device=DEVICE).bfloat16()
    exact_out = OWN(*(x.double() for x in tensors), is_causal=True)
    exact = [exact_out, *torch.autograd.grad(exact_out, tensors, weights.double())]
    own_out = OWN(*tensors, is_causal=True)
    own = [own_out, *torch.autograd.grad(own_out, tensors, weights)]
    with sdpa.activate():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if insists else nullcontext():
            try:
                out = OWN(*tensors, is_causal=True)
            except RuntimeError as error:
                pytest.skip(f"torch has no cuDNN attention here: {error}")
        found = [out, *torch.autograd.grad(out, tensors, weights)]
    assert counted == ([] if insists else ["forward", "backward"])
    assert_near(found, own, exact)


# The compiler of some versions of torch uses what torch itself deprecates.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_the_registry_under_the_compiler(counted: list[str]) -> None:
    skip_unless_compiled("cuda", torch.bfloat16, 64)
    x = made(2, 130, 3, 4, 64)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return OWN(*x.transpose(1, 3).unbind(2)).transpose(1, 2).flatten(2)

    with sdpa.activate(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True)
        out = compiled(x)
        (grad,) = torch.autograd.grad(out.float().square().sum(), x)
        assert counted == ["forward", "backward"]
        expected = layer(x)
        (want,) = torch.autograd.grad(expected.float().square().sum(), x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grad, want, atol=2e-2, rtol=2e-2)


def test_attend(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    skip_unless_compiled(backend, torch.bfloat16, 64)
    attend = Attend(flash=True, scale=0.2, backend=backend)  # type: ignore[arg-type]
    q, k, v = (made(2, 4, rows, 64) for rows in (120, 77, 77))
    assert attend.why_not(q, k, v) is None
    exact = Attend(scale=0.2)(q.double(), k.double(), v.double())
    own = OWN(q, k, v, scale=0.2)
    assert_near([attend(q, k, v)], [own], [exact])
    if backend != "reference":  # each call by itself: what kernels do not take is torch's
        wide = made(1, 2, 10, 264)
        assert attend.why_not(wide, wide, wide) is not None
        assert attend.why_not(q.float(), k.float(), v.float()) is not None
        torch.testing.assert_close(attend(wide, wide, wide), OWN(wide, wide, wide, scale=0.2))


def test_documents(backend: str) -> None:
    skip_unless_compiled(backend, torch.bfloat16, 64)
    ids = torch.randint(3, (2, 300), device=DEVICE).sort().values
    q, k, v = (made(2, 300, 4, 64) for _ in "qkv")
    out = Documents.of_ids(ids).attention(q, k, v, backend=backend)
    mask = (ids[:, :, None] == ids[:, None])[:, None]

    def masked(dtype: torch.dtype) -> torch.Tensor:
        return OWN(*(x.to(dtype).transpose(1, 2) for x in (q, k, v)), mask).transpose(1, 2)

    assert_near([out], [masked(torch.bfloat16)], [masked(torch.float64)])


def test_diffusers(seed: int) -> None:
    diffusers = pytest.importorskip(
        "diffusers", reason="diffusers is not installed", exc_type=ImportError
    )
    if DEVICE == "cuda":
        skip_unless_compiled("cuda", torch.bfloat16, 64)
    from flashvar.integrations import diffusers as ours

    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=64,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=8,
        axes_dims_rope=(16, 24, 24),
    ).to(DEVICE)
    inputs = {
        "hidden_states": torch.randn(2, 64, 4),
        "encoder_hidden_states": torch.randn(2, 11, 32),
        "pooled_projections": torch.randn(2, 8),
        "timestep": torch.tensor([0.3, 0.5]),
        "img_ids": torch.randint(0, 8, (64, 3)).float(),
        "txt_ids": torch.zeros(11, 3),
    }

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        model.to(dtype).zero_grad()
        given = {name: x.to(DEVICE, dtype) for name, x in inputs.items()}
        out = model(**given, return_dict=False)[0]
        out.float().square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    exact, own = run(torch.float64), run(torch.bfloat16)
    ours.register()
    model.set_attention_backend("flashvar")
    try:
        found = run(torch.bfloat16)
    finally:
        model.set_attention_backend("native")
    assert_near(found, own, exact)
