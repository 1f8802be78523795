"""`flashvar.compat.fla` over a package of flash-linear-attention's signatures, and in its place."""

from __future__ import annotations

import importlib
import inspect
import logging
import pickle
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType
from typing import Any

import fake_fla
import pytest
import torch

import flashvar
from flashvar.compat import fla as ours
from flashvar.compat.fla import delta_rule
from flashvar.errors import ConfigurationError, IntegrationError, NotProvidedError
from flashvar.machine import system

pytestmark = pytest.mark.skipif(
    fake_fla.installed(), reason="flash-linear-attention is installed: test_compat_fla_real"
)


@pytest.fixture(params=["0.6.0", "0.5.1"])
def fla(request: pytest.FixtureRequest) -> Iterator[dict[str, ModuleType]]:
    before = set(sys.modules)
    yield fake_fla.put(before=request.param == "0.5.1")
    ours.uninstall()
    for name in {name for name in sys.modules if name.split(".")[0] == "fla"} - before:
        del sys.modules[name]
    del sys.modules["a_model_of_someone"]


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    ours.uninstall()


def inputs(dtype: torch.dtype = torch.float32, **changed: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 5, 2, 8).to(dtype).unbind()
    v = torch.randn(2, 5, 4, 6).to(dtype)
    g, beta = -torch.rand(2, 5, 4), torch.rand(2, 5, 4)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, **changed}


def bindings(modules: dict[str, ModuleType]) -> dict[tuple[str, str], Any]:
    return {
        (name, key): value
        for name, module in modules.items()
        for key, value in vars(module).items()
        if callable(value)
    }


def test_every_name_is_bound_anew_and_restored(fla: dict[str, ModuleType]) -> None:
    theirs = bindings(fla)
    ours.install()
    replaced = bindings(fla)
    assert len(theirs) > 15
    assert not [key for key in theirs if theirs[key] is replaced[key]]
    assert fla["fla.ops.gated_delta_rule"].chunk_gdn is fla["a_model_of_someone"].rule
    ours.install(strict=True)
    ours.uninstall()
    assert bindings(fla) == theirs
    ours.uninstall()
    assert bindings(fla) == theirs


def test_a_module_that_is_imported_later_is_restored_too(fla: dict[str, ModuleType]) -> None:
    original = fla["fla.ops"].chunk_delta_rule
    ours.install()
    fla["a_model_of_someone"].later = fla["fla.ops"].chunk_delta_rule
    ours.uninstall()
    assert fla["a_model_of_someone"].later is original


@pytest.mark.parametrize("name", fake_fla.functions(before=True))
def test_pickles_find_what_is_installed(name: str, fla: dict[str, ModuleType]) -> None:
    """A model that has bound a function is pickled, and read where flashvar is not installed."""
    home = fla["fla.ops" if "rule" in name else "fla.modules.convolution"]
    original = vars(home)[name]
    ours.install()
    kept = pickle.dumps(vars(home)[name])
    assert pickle.loads(kept) is vars(home)[name] is not original
    ours.uninstall()
    assert pickle.loads(kept) is original


def test_threads(fla: dict[str, ModuleType]) -> None:
    theirs = bindings(fla)
    calls = [ours.install, ours.uninstall] * 8
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ours.uninstall()
    assert bindings(fla) == theirs


@pytest.mark.parametrize("name", fake_fla.functions(before=False))
def test_signatures(name: str, fla: dict[str, ModuleType]) -> None:
    module = next((m for m in fla.values() if hasattr(m, name)), None)
    if module is None:
        pytest.skip(f"{name} is not in this version")
    theirs = inspect.signature(getattr(module, name))
    ours.install()
    found = inspect.signature(getattr(module, name))
    ordered = [
        (one.name, one.default)
        for one in theirs.parameters.values()
        if one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    of_ours = [(one.name, one.default) for one in found.parameters.values()]
    assert of_ours[: len(ordered)] == ordered
    if name == "chunk_gated_delta_rule":
        named = {"use_gate_in_kernel", "A_log", "dt_bias", "chunk_size", "transpose_state_layout"}
        assert named <= set(found.parameters)


def test_values_and_gradients(fla: dict[str, ModuleType]) -> None:
    given = {name: x.requires_grad_() for name, x in inputs().items()}
    state = torch.randn(2, 4, 6, 8)
    wanted, after = flashvar.ops.gated_delta_rule.api.gated_delta_rule(
        *given.values(), initial_state=state, return_final_state=True, state_layout="vk",
        qk_l2norm=True,
    )  # fmt: skip
    ours.install(strict=True)
    call = fla["fla.ops"].chunk_gated_delta_rule
    out, final = call(
        *given.values(), None, state, True, use_qk_l2norm_in_kernel=True, state_v_first=True
    )
    assert torch.equal(out, wanted)
    assert torch.equal(final, after)
    grads = torch.autograd.grad(out.sum(), list(given.values()))
    expected = torch.autograd.grad(wanted.sum(), list(given.values()))
    assert all(map(torch.equal, grads, expected))


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_a_mixture_of_dtypes(name: str) -> None:
    given = inputs(torch.float16)
    given |= {"q": given["q"].float(), "beta": given["beta"].half(), "g": given["g"].bfloat16()}
    state = torch.randn(2, 4, 8, 6).half()
    out, final = getattr(delta_rule, name)(**given, initial_state=state, output_final_state=True)
    assert out.dtype == (torch.float32 if name.startswith("chunk") else torch.float16)
    assert final.dtype == torch.float32
    wide = {name: x.float() for name, x in given.items()}
    wanted, after = delta_rule.chunk_gated_delta_rule(
        **wide, initial_state=state.float(), output_final_state=True
    )
    torch.testing.assert_close(out.float(), wanted, atol=1e-3, rtol=1e-3)
    assert torch.equal(final, after)


@pytest.mark.parametrize("name", ["chunk_delta_rule", "fused_recurrent_delta_rule"])
def test_the_delta_rule_has_the_dtype_of_q(name: str) -> None:
    given = inputs(torch.float16)
    del given["g"]
    given["q"] = given["q"].float()
    out, _ = getattr(delta_rule, name)(**given)
    wanted, _ = delta_rule.chunk_delta_rule(**{name: x.float() for name, x in given.items()})
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, wanted)


def test_gates_in_the_kernel() -> None:
    given = inputs(beta=torch.randn(2, 5, 4), g=torch.randn(2, 5, 4))
    a_log, dt_bias = torch.randn(4), torch.randn(4)
    wanted = dict(given)
    wanted["g"] = -a_log.exp() * torch.nn.functional.softplus(given["g"] + dt_bias)
    wanted["beta"] = 2 * given["beta"].sigmoid()
    for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
        call = getattr(delta_rule, name)
        options = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
        found, none = call(
            **given, **options, use_gate_in_kernel=True, A_log=a_log, dt_bias=dt_bias
        )
        assert none is None
        torch.testing.assert_close(found, call(**wanted)[0])
        assert torch.equal(call(**wanted, A_log=a_log, dt_bias=dt_bias)[0], call(**wanted)[0])
        with pytest.raises(ValueError, match="A_log must be given"):
            call(**given, use_gate_in_kernel=True)


def test_without_gates_and_without_beta() -> None:
    given = inputs()
    plain = {name: given[name] for name in ("q", "k", "v")}
    ones = torch.ones(2, 5, 4)
    wanted = delta_rule.chunk_gated_delta_rule(**plain, g=torch.zeros(2, 5, 4), beta=ones)[0]
    for found in (
        delta_rule.chunk_delta_rule(**plain, beta=ones),
        delta_rule.fused_recurrent_delta_rule(**plain),
        delta_rule.fused_recurrent_gated_delta_rule(**plain),
    ):
        torch.testing.assert_close(found[0], wanted)


def test_deprecated_names() -> None:
    given = inputs()
    state = torch.randn(2, 4, 6, 8)
    for call in (
        delta_rule.chunk_gated_delta_rule, delta_rule.fused_recurrent_gated_delta_rule
    ):  # fmt: skip
        wanted = call(**given, initial_state=state, state_v_first=True)[0]
        with pytest.warns(DeprecationWarning, match="pass state_v_first"):
            found = call(**given, initial_state=state, transpose_state_layout=True)[0]
        assert torch.equal(found, wanted)
        with pytest.raises(ValueError, match="named once"):
            call(**given, state_v_first=True, transpose_state_layout=True)
        with pytest.raises(DeprecationWarning, match="found True"):
            call(**given, head_first=True)
    with pytest.raises(DeprecationWarning, match="found False"):
        delta_rule.chunk_gated_delta_rule(**given, head_first=False)
    with pytest.raises(ValueError, match="chunk_size must be one of 16, 32, 64, found 48"):
        delta_rule.chunk_gated_delta_rule(**given, chunk_size=48)


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_names_of_sequences_without_offsets_are_refused(name: str) -> None:
    """Models of transformers drop what the signature does not name: they would be one sequence."""
    call = getattr(delta_rule, name)
    assert "seq_idx" in inspect.signature(call).parameters
    given = {key: x[:1] for key, x in inputs().items()}
    names, ends = torch.tensor([[0, 0, 0, 1, 1]]), torch.tensor([0, 3, 5])
    with pytest.raises(flashvar.InvalidInputError, match="found seq_idx alone"):
        call(**given, seq_idx=names)
    found = call(**given, seq_idx=names, cu_seqlens=ends)[0]
    assert torch.equal(found, call(**given, cu_seqlens=ends)[0])


UNSERVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "context parallelism": (
        "chunk_gated_delta_rule", "cp_context is given", {"cp_context": object()}
    ),
    "gates of keys": (
        "fused_recurrent_gated_delta_rule", "gk is given", {"gk": torch.zeros(2, 5, 4, 8)}
    ),
    "beta of channels": (
        "fused_recurrent_gated_delta_rule", "beta has a value for each channel of v",
        {"beta": torch.rand(2, 5, 4, 6)},
    ),
    "of a later version": ("chunk_gated_delta_rule", "lower_bound is given", {"lower_bound": -5}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "reason", "options"), UNSERVED.values(), ids=UNSERVED)
def test_what_is_not_served(
    name: str,
    reason: str,
    options: dict[str, Any],
    fla: dict[str, ModuleType],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = inputs(**options)
    monkeypatch.setattr("flashvar.integrations.fallback._logged", set())
    ours.install()
    call = getattr(fla["fla.ops"], name)
    with caplog.at_level(logging.WARNING, "flashvar"):
        who, got = call(**given)
        call(**given)
    assert who == name
    assert got["q"] is given["q"]
    assert [record.message for record in caplog.records] == [
        f"{name}: {reason}; such calls take flash-linear-attention's own function"
    ]
    for strict in (True, False):
        ours.install(strict)
        monkeypatch.setenv("FLASHVAR_STRICT", "1")
        with pytest.raises(flashvar.BackendUnavailableError, match=reason):
            getattr(fla["fla.ops"], name)(**given)
    with pytest.raises(flashvar.BackendUnavailableError, match=reason):
        getattr(delta_rule, name)(**given)


def test_arguments_that_do_not_bind(fla: dict[str, ModuleType]) -> None:
    ours.install(strict=True)
    given = inputs()
    with pytest.raises(TypeError, match="multiple values"):
        fla["fla.ops"].chunk_gated_delta_rule(*given.values(), q=given["q"])
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'beta'"):
        fla["fla.ops"].chunk_gated_delta_rule(*list(given.values())[:4])


def test_convolution(fla: dict[str, ModuleType]) -> None:
    ours.install(strict=True)
    call = fla["fla.modules.convolution"].causal_conv1d
    x, weight = torch.randn(2, 7, 6), torch.randn(6, 4)
    state = torch.randn(2, 6, 4)
    wanted, after = flashvar.causal_conv1d(
        x, weight, initial_state=state, return_final_state=True, activation="silu", residual=x
    )
    found, final = call(x, weight, None, x, state, True, "swish")
    assert torch.equal(found, wanted)
    assert torch.equal(final, after)
    heads = call(x.unflatten(-1, (2, 3)), weight, residual=x.unflatten(-1, (2, 3)))
    assert heads[1] is None
    assert torch.equal(heads[0].flatten(2), flashvar.causal_conv1d(x, weight, residual=x))
    assert call(x, weight, output_final_state=True, backend="cuda")[1].shape == (2, 6, 4)
    with pytest.raises(ValueError, match="backend must be one of 'triton', 'cuda', 'mix'"):
        call(x, weight, backend="tilelang")
    with pytest.raises(flashvar.BackendUnavailableError, match="the filter has 5 taps"):
        call(x, torch.randn(6, 5))


@pytest.mark.parametrize("shape", [(3, 6), (3, 1, 6), (1, 3, 6), (3, 1, 2, 3), (3, 2, 3)], ids=str)
def test_update(shape: tuple[int, ...], fla: dict[str, ModuleType]) -> None:
    ours.install(strict=True)
    x, weight, cache = torch.randn(3, 6), torch.randn(6, 4), torch.randn(3, 6, 4)
    state = cache.clone()
    wanted = flashvar.causal_conv1d_update(x, state, weight, activation="silu", residual=x)
    call = fla["fla.modules.convolution"].causal_conv1d_update
    y, after = call(x.view(shape), cache, x.view(shape), weight, activation="silu")
    assert y.shape == shape
    assert torch.equal(y.reshape(3, 6), wanted)
    assert after is cache
    assert torch.equal(cache, state)


def test_an_update_after_a_recorded_forward() -> None:
    from flashvar.compat.fla.convolution import causal_conv1d, causal_conv1d_update

    x, weight = torch.randn(2, 5, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    wanted, _ = causal_conv1d(x, weight, residual=x, activation="silu")
    _, cache = causal_conv1d(x[:, :4], weight, output_final_state=True)
    last, after = causal_conv1d_update(x[:, 4:], cache, x[:, 4:], weight, activation="silu")
    assert after is cache
    torch.testing.assert_close(last, wanted[:, 4:])
    grads = (
        torch.autograd.grad(one.sum(), (x, weight), retain_graph=True)
        for one in (last, wanted[:, 4:])
    )
    torch.testing.assert_close(*grads)


def test_several_tokens_are_no_update() -> None:
    from flashvar.compat.fla.convolution import causal_conv1d_update

    with pytest.raises(flashvar.ShapeError, match=r"found \(3, 2, 6\)"):
        causal_conv1d_update(torch.randn(3, 2, 6), torch.randn(3, 6, 4), weight=torch.randn(6, 4))


def test_rows_without_a_batch_are_refused() -> None:
    from flashvar.compat.fla.convolution import causal_conv1d

    with pytest.raises(flashvar.ShapeError, match=r"x must be \[batch, seqlen, dim\]"):
        causal_conv1d(torch.randn(5, 6), torch.randn(6, 4))


def test_residuals_of_other_shapes_are_refused() -> None:
    from flashvar.compat.fla.convolution import causal_conv1d, causal_conv1d_update

    x, weight, state = torch.randn(2, 5, 6), torch.randn(6, 4), torch.randn(5, 6, 4)
    with pytest.raises(
        flashvar.ShapeError, match=r"the shape of x, \(2, 5, 6\), found \(2, 6, 5\)"
    ):
        causal_conv1d(x, weight, residual=x.mT)
    with pytest.raises(flashvar.ShapeError, match=r"the shape of x, \(5, 6\), found \(6, 5\)"):
        causal_conv1d_update(x[0], state, x[0].T, weight)


def test_compiles_without_a_break(fla: dict[str, ModuleType]) -> None:
    ours.install()
    torch._dynamo.reset()
    given = inputs()

    def call(**tensors: torch.Tensor) -> torch.Tensor:
        out, _ = fla["fla.ops"].chunk_gated_delta_rule(**tensors, use_qk_l2norm_in_kernel=True)
        return out * 2

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**given), call(**given))


@pytest.mark.usefixtures("clean")
def test_stands_in() -> None:
    ours.provide()
    ours.provide()
    module = importlib.import_module("fla.ops.gated_delta_rule")
    assert module.chunk_gated_delta_rule is delta_rule.chunk_gated_delta_rule
    root = importlib.import_module("fla")
    assert root.ops.gated_delta_rule is module
    assert importlib.util.find_spec("fla") is not None
    assert root.__version__ == metadata.version("flash-linear-attention") == ours.__version__
    assert importlib.import_module("fla.layers").GatedDeltaNet.__module__.startswith("flashvar.")
    for name in ("fla.ops.kda", "fla.models"):
        with pytest.raises(NotProvidedError, match=f"{name} is not in flashvar's stand-in for fla"):
            importlib.import_module(name)
    with pytest.raises(ImportError):
        exec("from fla.modules import LayerNorm", {})
    ours.uninstall()
    ours.uninstall()
    assert not [name for name in sys.modules if name.split(".")[0] == "fla"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fla")


def test_does_not_stand_in_for_what_is_there(fla: dict[str, ModuleType]) -> None:
    with pytest.raises(ConfigurationError, match=r"call install\(\)"):
        ours.provide()
    assert sys.modules["fla"] is fla["fla"]


def test_what_is_not_installed() -> None:
    for call in (ours.install, ours.register):
        with pytest.raises(IntegrationError, match=r"0\.5\.1 or newer, found none: pip install"):
            call()


def test_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(index: int, bytes_: int) -> system.Device:
        return system.Device(index, "", (9, 0), bytes_, 1, 1)

    found = system.System(devices=(device(0, 99 << 10), device(1, 227 << 10)))
    monkeypatch.setattr("flashvar.machine.shared_memory.gather", lambda: found)
    answers = {
        arch: tuple(ours.check_shared_mem(arch, index) for index in range(3))
        for arch in ("none", "ada", "Ampere", "HOPPER")
    }
    assert answers == {
        "none": (False, True, False),
        "ada": (True, True, False),
        "Ampere": (False, True, False),
        "HOPPER": (False, True, False),
    }
    monkeypatch.setattr("flashvar.machine.shared_memory.gather", system.System)
    assert ours.check_shared_mem() is False
