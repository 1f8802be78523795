"""Who else is to see a call of scaled_dot_product_attention sees it while flashvar is active."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from fresh_python import evaluate
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from flashvar.integrations import fallback
from flashvar.integrations.attend import Attend
from flashvar.integrations.torch import activation as ours

OWN = torch._C._nn.scaled_dot_product_attention
Q, K, V = torch.randn(3, 1, 2, 6, 8)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FLASHVAR_STRICT", raising=False)
    monkeypatch.setattr(fallback, "_logged", set())
    yield
    ours.deactivate()
    assert functional.scaled_dot_product_attention is OWN
    assert vars(functional)["scaled_dot_product_attention"] is OWN
    assert type(functional) is type(pickle)


def call(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    return functional.scaled_dot_product_attention(*tensors or (Q, K, V), **options)


def served() -> int:
    """Calls that flashvar served since the last look."""
    found = ours.report().get(ours.RUN, 0)
    ours._calls.clear()
    return found


class Seen(TorchFunctionMode):
    """Counts calls of a function, and lets them pass."""

    def __init__(self, function: Any = None) -> None:
        super().__init__()
        self.function = function
        self.calls: list[dict[str, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Without one: whatever torch's function is now.
        if func is (self.function or functional.scaled_dot_product_attention):
            self.calls.append(kwargs or {})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("function", [OWN, None], ids=["known before", "asked for"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.zeros(6, 6)}])
def test_function_modes(function: Any, options: dict[str, Any]) -> None:
    expected = OWN(Q, K, V, **options)
    with ours.activate("reference"), Seen(function) as mode:
        torch.testing.assert_close(call(**options), expected)
        assert "Seen" in str(ours.last_reason())
    assert [list(kwargs) for kwargs in mode.calls] == [list(options)]


def test_a_function_mode_that_knows_flashvars_function() -> None:
    """As context_parallel's of torch 2.8 does if it is entered after the activation."""
    with ours.activate("reference"), Seen(functional.scaled_dot_product_attention) as mode:
        torch.testing.assert_close(call(), OWN(Q, K, V))
        assert len(mode.calls) == 1
        assert served() == 1


def test_a_default_device_sees_constructors_alone() -> None:
    with ours.activate("reference"), torch.device("cpu"):
        call()
        assert served() == 1


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_torchs_ops() -> None:
    with Ops() as own:
        expected = call()
    with ours.activate("reference"):
        with Ops() as mode:
            found = call()
        torch.testing.assert_close(found, expected)
    assert mode.ops == own.ops
    assert any("scaled_dot_product" in op for op in mode.ops)


def test_counters_of_operations_know_flashvars_ops() -> None:
    with ours.activate("reference"), FlopCounterMode(display=False) as counter:
        call()
        assert served() == 1
    assert counter.get_total_flops() == 2 * 2 * 2 * 6 * 6 * 8


class Subclass(torch.Tensor):
    """Answers torch's function itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return "its own answer"
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("place", range(4), ids=["query", "key", "value", "mask"])
def test_subclasses(place: int) -> None:
    tensors = [Q, K, V, torch.zeros(6, 6)]
    tensors[place] = tensors[place].as_subclass(Subclass)
    for backend in ("reference", "auto"):
        with ours.activate(backend):  # type: ignore[arg-type]
            assert call(*tensors) == "its own answer"


def test_proxies_of_a_symbolic_trace() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    with ours.activate("reference"):
        traced = torch.fx.symbolic_trace(Module())
    assert OWN in [node.target for node in traced.graph.nodes]
    torch.testing.assert_close(traced(Q), OWN(Q, Q, Q, is_causal=True))


def test_torchs_own_masks_by_its_own_way() -> None:
    mask = causal_lower_right(6, 6)
    with ours.activate("reference"), Seen() as mode:
        torch.testing.assert_close(call(Q, K, V, mask), OWN(Q, K, V, is_causal=True))
    assert mode.calls


class Patch:
    """A replacement of the function that passes calls on to what it found."""

    def __init__(self) -> None:
        self.found = functional.scaled_dot_product_attention
        self.calls = 0
        functional.scaled_dot_product_attention = self

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return self.found(*args, **kwargs)

    def undo(self) -> None:
        functional.scaled_dot_product_attention = self.found


def test_a_patch_after_flashvar() -> None:
    with ours.activate("reference"):
        patch = Patch()
        call()
        assert (patch.calls, served()) == (1, 1)
        patch.undo()
        call()
        assert (patch.calls, served()) == (1, 1)


def test_a_patch_before_flashvar() -> None:
    patch = Patch()
    with ours.activate("reference"):
        assert functional.scaled_dot_product_attention is patch
        call()
        assert (patch.calls, served()) == (1, 0)
        patch.undo()  # which does not lose flashvar
        call()
        assert (patch.calls, served()) == (1, 1)


def test_a_patch_outlives_flashvar() -> None:
    for before in (True, False):
        patch = Patch() if before else None
        activation = ours.activate("reference")
        patch = patch or Patch()
        activation.__exit__(None, None, None)
        assert functional.scaled_dot_product_attention is patch
        torch.testing.assert_close(call(), OWN(Q, K, V))
        assert (patch.calls, served()) == (1, 0)
        patch.undo()  # which does not revive flashvar
        assert functional.scaled_dot_product_attention is OWN


def test_flashvar_again_under_a_patch() -> None:
    ours.activate()
    patch = Patch()
    ours.deactivate()
    with ours.activate("reference"):
        call()
        assert (patch.calls, served()) == (1, 1)
        patch.undo()
        call()
        assert served() == 1


def test_patches_of_mock() -> None:
    name = "torch.nn.functional.scaled_dot_product_attention"
    with ours.activate("reference"):
        with mock.patch(name, return_value="mocked") as mocked:
            assert call() == "mocked"
        assert mocked.call_count == 1
        call()
        assert served() == 1
    with mock.patch(name, return_value="mocked"), ours.activate("reference"):
        assert call() == "mocked"


def test_a_function_that_somebody_kept() -> None:
    with ours.activate("reference"):
        kept = functional.scaled_dot_product_attention
        assert kept.__name__ == "scaled_dot_product_attention"  # by it context_parallel replaces
        assert pickle.loads(pickle.dumps(kept)) is kept
        assert pickle.loads(pickle.dumps(functional)) is functional
    torch.testing.assert_close(kept(Q, K, V), OWN(Q, K, V))
    assert served() == 0


@pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
def test_a_kept_function_with_torchs_own_masks(variant: Any) -> None:
    kept, (q, k, v) = functional.scaled_dot_product_attention, torch.randn(3, 1, 2, 9, 8)
    q = q[:, :, :7]
    expected = kept(q, k, v, attn_mask=variant(7, 9))
    handler = CausalBias.__dict__["__torch_function__"]
    with ours.activate(backend="reference"):
        for function in (kept, functional.scaled_dot_product_attention):
            torch.testing.assert_close(function(q, k, v, attn_mask=variant(7, 9)), expected)
        assert variant(7, 9).shape[1:] == (7, 9)  # in calls of other functions nothing changes
        assert pickle.loads(pickle.dumps(torch.nn.attention)) is torch.nn.attention
    assert CausalBias.__dict__["__torch_function__"] is handler
    assert type(torch.nn.attention) is type(pickle)


# Torch reads the lengths of a lower right mask that is not square: of others it takes the call's.
LENGTHS = {
    "upper-left": (causal_upper_left(3, 4), ours.RUN),
    "square": (causal_lower_right(4, 4), ours.RUN),
    "one-query": (causal_lower_right(1, 9), ours._MISFIT),
    "other-queries": (causal_lower_right(6, 9), RuntimeError),
    "other-keys": (causal_lower_right(7, 8), RuntimeError),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_a_causal_bias_of_other_lengths_is_what_it_is_in_torch(case: str) -> None:
    bias, outcome = LENGTHS[case]
    tensors = torch.randn(1, 2, 7, 8), *torch.randn(2, 1, 2, 9, 8)
    if outcome is RuntimeError:
        with pytest.raises(RuntimeError) as expected:
            call(*tensors, attn_mask=bias)
        with ours.activate("reference"), pytest.raises(RuntimeError) as found:
            call(*tensors, attn_mask=bias)
        assert str(found.value) == str(expected.value)
        return
    own = call(*tensors, attn_mask=bias)
    with ours.activate("reference"):
        torch.testing.assert_close(call(*tensors, attn_mask=bias), own)
        assert ours.report() == {outcome: 1}
        torch._dynamo.reset()
        compiled = torch.compile(lambda *x: call(*x, attn_mask=bias), backend="eager")
        torch.testing.assert_close(compiled(*tensors), own)


def test_torchs_own_masks_after_their_module_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = CausalBias.__dict__["__torch_function__"]
    with ours.activate(backend="reference"):
        monkeypatch.delitem(sys.modules, "torch.nn.attention.bias")
    assert CausalBias.__dict__["__torch_function__"] is handler


def test_a_kept_function_with_masks_of_a_module_that_is_imported_later(
    python_with_models: str,
) -> None:
    """Torch's compiler is there, which that module imports; the module itself is not."""
    code = (
        "import sys, torch, flashvar\n"
        "assert 'torch.nn.attention.bias' not in sys.modules\n"
        "import flashvar.integrations.torch as ours\n"
        "kept = torch.nn.functional.scaled_dot_product_attention\n"
        "q, k, v = torch.randn(3, 1, 2, 7, 8)\n"
        "expected = kept(q, k, v, is_causal=True)\n"
        "with ours.activate():\n"
        "    from torch.nn.attention.bias import causal_upper_left\n"
        "    out = kept(q, k, v, attn_mask=causal_upper_left(7, 7))\n"
        "print((out - expected).abs().max().item())"
    )
    assert evaluate(code, python_with_models) < 1e-5


def test_attend_leaves_calls_to_who_replaced_the_function() -> None:
    """Attend computes in the place of a call of torch's function."""
    attend = Attend(flash=True, backend="reference")
    patch = Patch()
    try:
        torch.testing.assert_close(attend(Q, K, V), OWN(Q, K, V))
        assert patch.calls == 1
        assert "replaced" in str(attend.why_not(Q, K, V))
    finally:
        patch.undo()
    attend(Q, K, V)
    assert patch.calls == 1


def test_torchs_own_modes_are_nobody_else() -> None:
    """What is traced keeps flashvar's op, also beside a default device."""
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with ours.activate("reference"), torch.device("cpu"):
        torch._dynamo.reset()
        torch.compile(lambda q: call(q, q, q), backend=backend, fullgraph=True)(Q)
        assert "flashvar.attention_fwd.default" in targets
        targets.clear()
        backend(make_fx(lambda q: call(q, q, q))(Q), None)
        assert "flashvar.attention_fwd.default" in targets


class Doubled(TorchFunctionMode):
    """Doubles what a function gives, as somebody who replaces its answer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return (
            out * 2 if func is (self.function or functional.scaled_dot_product_attention) else out
        )


@pytest.mark.parametrize(
    ("knows", "backend"),
    # Dynamo calls the mode, and what it traced goes to the backend: each backend is there once.
    [("torch's", "eager"), ("flashvar's", "aot_eager"), ("what it finds", "eager")],
)
def test_a_function_mode_in_compiled_code(knows: str, backend: str) -> None:
    expected = 2 * OWN(Q, Q, Q) + 1
    with ours.activate("reference"):
        found = functional.scaled_dot_product_attention
        functions = {"torch's": OWN, "flashvar's": found, "what it finds": None}
        with Doubled(functions[knows]):
            torch._dynamo.reset()
            compiled = torch.compile(lambda q: call(q + 0, q, q) + 1, backend=backend)
            for _ in range(2):
                torch.testing.assert_close(compiled(Q), expected)


def test_the_import_loads_no_compiler(python: str) -> None:
    """Torch's own imports left aside; CausalBias alone would bring Dynamo, of 1.5 s."""
    code = (
        "import json, sys, torch, flashvar\n"
        "flashvar.attention\n"
        "before = set(sys.modules)\n"
        "import flashvar.integrations.torch as ours\n"
        "with ours.activate(): pass\n"
        "print(json.dumps(sorted(name for name in set(sys.modules) - before)))"
    )
    new = evaluate(code, python)
    assert "flashvar.integrations.torch" in new
    assert [name for name in new if not name.startswith("flashvar.")] == []
