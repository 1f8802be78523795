"""flashvar inside diffusers: real models, small and freshly initialized, on the CPU."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashvar.errors import BackendUnavailableError, IntegrationError
from flashvar.integrations import diffusers as ours
from flashvar.integrations import fallback
from flashvar.integrations import torch as sdpa

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def diffusers() -> Any:
    """The package, which takes seconds to load."""
    with warnings.catch_warnings():  # it reads attributes that torch deprecates
        warnings.simplefilter("ignore")
        return pytest.importorskip("diffusers", reason="diffusers needs Python 3.11")


@pytest.fixture(scope="module")
def attention_dispatch(diffusers: Any) -> Any:
    return importlib.import_module("diffusers.models.attention_dispatch")


@pytest.fixture(autouse=True)
def clean(attention_dispatch: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FLASHVAR_STRICT", raising=False)
    monkeypatch.setattr(fallback, "_logged", set())
    active = attention_dispatch._AttentionBackendRegistry._active_backend
    yield
    attention_dispatch._AttentionBackendRegistry._active_backend = active
    sdpa.deactivate()


def outcome(model: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Output and the gradients of all parameters that have one."""
    model.zero_grad()
    out = model(**inputs, return_dict=False)[0]
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    grads = [x.grad.clone() for x in model.parameters() if x.grad is not None]
    assert len(grads) > 10
    return [out.detach(), *grads]


def unet(diffusers: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
        cross_attention_dim=24,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ).double()
    words = torch.arange(7).expand(2, 7) < torch.tensor([[7], [4]])
    return model, {
        "sample": torch.randn(2, 4, 8, 8).double(),
        "timestep": torch.tensor([3, 500]),
        "encoder_hidden_states": torch.randn(2, 7, 24).double(),
        "encoder_attention_mask": words,
    }


def dit(diffusers: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        num_layers=2,
        norm_num_groups=4,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    ).double()
    return model, {
        "hidden_states": torch.randn(2, 4, 8, 8).double(),
        "timestep": torch.tensor([3, 7]),
        "class_labels": torch.tensor([1, 2]),
    }


def flux(diffusers: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    ).double()
    return model, {
        "hidden_states": torch.randn(2, 16, 4).double(),
        "encoder_hidden_states": torch.randn(2, 5, 24).double(),
        "pooled_projections": torch.randn(2, 8).double(),
        "timestep": torch.tensor([0.3, 0.5]).double(),
        "img_ids": torch.randint(0, 4, (16, 3)).double(),
        "txt_ids": torch.zeros(5, 3).double(),
    }


@pytest.mark.parametrize("make", [unet, dit], ids=["unet", "dit"])
def test_models_that_call_torchs_function(make: Any, diffusers: Any) -> None:
    torch.manual_seed(0)
    model, inputs = make(diffusers)
    model.eval()
    expected = outcome(model, inputs)
    with sdpa.activate(backend="reference"):
        found = outcome(model, inputs)
        assert list(sdpa.report()) == [sdpa.RUN]
    torch.testing.assert_close(found, expected)


def served(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of q in calls that flashvar computes."""
    shapes: list[torch.Size] = []
    attend = ours.attend

    def watched(q: torch.Tensor, *others: Any) -> torch.Tensor:
        shapes.append(q.shape)
        return attend(q, *others)

    monkeypatch.setattr(ours, "attend", watched)
    return shapes


def test_a_model_that_knows_backends(
    diffusers: Any, attention_dispatch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = served(monkeypatch)
    model, inputs = flux(diffusers)
    expected = outcome(model, inputs)
    ours.register()
    ours.register()
    model.set_attention_backend("flashvar")
    found = outcome(model, inputs)
    assert calls == [(2, 21, 2, 16)] * 2
    torch.testing.assert_close(found, expected)
    with attention_dispatch.attention_backend("flashvar"):
        pass
    model.set_attention_backend("native")
    outcome(model, inputs)
    assert len(calls) == 2


def dispatched(attention_dispatch: Any, **options: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 6, 4, 16, generator=generator)
    k, v = torch.randn(2, 2, 9, options.pop("heads", 4), 16, generator=generator)
    answer: torch.Tensor = attention_dispatch.dispatch_attention_fn(q, k, v, **options)
    return answer


@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask": torch.arange(9).expand(2, 9) < torch.tensor([[9], [5]])},
        {"attn_mask": torch.randn(2, 9)},
        {"attn_mask": torch.rand(2, 1, 6, 9) > 0.3},
        {"is_causal": True},
        {"scale": 0.2},
        {"heads": 2, "enable_gqa": True},
    ],
    ids=["padding", "bias-of-keys", "mask", "causal", "scale", "gqa"],
)
def test_options(
    options: dict[str, Any], attention_dispatch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = served(monkeypatch)
    ours.register()
    expected = dispatched(attention_dispatch, **options)
    assert not calls
    with attention_dispatch.attention_backend("flashvar"):
        found = dispatched(attention_dispatch, **options)
    assert len(calls) == 1
    torch.testing.assert_close(found, expected)


def test_what_it_does_not_serve(attention_dispatch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = served(monkeypatch)
    ours.register()
    mask = torch.ones(6, 1)
    expected = dispatched(attention_dispatch, attn_mask=mask)
    with attention_dispatch.attention_backend("flashvar"):
        torch.testing.assert_close(dispatched(attention_dispatch, attn_mask=mask), expected)
        monkeypatch.setenv("FLASHVAR_STRICT", "1")
        with pytest.raises(BackendUnavailableError, match="expected a call that flashvar supports"):
            dispatched(attention_dispatch, attn_mask=mask)
    assert not calls


def test_a_model_that_is_split_over_processes(diffusers: Any) -> None:
    """diffusers asks the registry whether a backend may be chosen there."""
    ours.register()
    model, _ = flux(diffusers)
    for processor in model.attn_processors.values():
        processor._parallel_config = object()
    model.set_attention_backend("flashvar")


@pytest.mark.parametrize(
    "mask", [torch.ones(6, 1), torch.randn(9, 2).t()], ids=["of queries", "strided, of keys"]
)
def test_a_native_backend_of_fewer_arguments(
    mask: torch.Tensor, attention_dispatch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of diffusers 0.35 has no log-sum-exp and no parallelism, and expects masks of torch."""
    expected = dispatched(attention_dispatch, attn_mask=mask)

    def native(query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
        tensors = (x.transpose(1, 2) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask, **options)
        return out.transpose(1, 2)

    ours.register()
    registry, name = (
        attention_dispatch._AttentionBackendRegistry,
        attention_dispatch.AttentionBackendName.NATIVE,
    )
    taken = {"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}
    monkeypatch.setitem(registry._backends, name, native)
    monkeypatch.setitem(registry._supported_arg_names, name, taken)
    with attention_dispatch.attention_backend("flashvar"):
        torch.testing.assert_close(dispatched(attention_dispatch, attn_mask=mask), expected)


@pytest.mark.parametrize("missing", ["diffusers", "diffusers.models.attention_dispatch"])
def test_without_diffusers(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in ("diffusers.models.attention_dispatch", missing):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(IntegrationError, match=r"needs diffusers 0\.35 or newer, found"):
        ours.register()
