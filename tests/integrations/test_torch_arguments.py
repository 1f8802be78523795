"""Values of options that flashvar does not take: torch's own function computes or refuses them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from flashvar.integrations import torch as ours

_NO_BOOLS: Final = (1, 0, "x", "", None, 1.0, [], np.bool_(True), torch.tensor(True))
VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "enable_gqa": (True, False, *_NO_BOOLS),
    "is_causal": (True, False, *_NO_BOOLS),
    "scale": (
        *(float("nan"), float("inf"), -float("inf"), np.float32("nan"), 1e39, 10**400),
        *("x", 1j, torch.tensor([0.5]), torch.tensor(0.5), 0.0, True, None),
    ),
    "dropout_p": (float("nan"), -0.1, 1.0, 1 - 2**-30, 1.5, None, "x", 0, False),
}
CASES: Final = [
    pytest.param(name, value, id=f"{name}={value}"[:30])
    for name, values in VALUES.items()
    for value in values
]


def outcome(heads_kv: int, faked: bool, options: dict[str, Any]) -> Any:
    """The type of what is raised, or the output, which of fake tensors is a shape."""
    q, k = (torch.arange(h * 80.0).cos().view(1, h, 5, 16) for h in (4, heads_kv))
    mode = FakeTensorMode()
    torch.manual_seed(0)
    try:
        if faked:
            q, k = mode.from_tensor(q), mode.from_tensor(k)
            with mode:
                return functional.scaled_dot_product_attention(q, k, k, **options).shape
        return functional.scaled_dot_product_attention(q, k, k, **options)
    except (TypeError, ValueError, RuntimeError, OverflowError, AssertionError) as error:
        return type(error)


@pytest.mark.parametrize("faked", [False, True], ids=["eager", "faked"])
@pytest.mark.parametrize(("name", "value"), CASES)
def test_any_value_does_what_it_does_in_torch(name: str, value: Any, faked: bool) -> None:
    for heads_kv in (4, 2) if name == "enable_gqa" else (4,):
        call = (heads_kv, faked, {name: value})
        expected = outcome(*call)
        with ours.activate(backend="reference"):
            found = outcome(*call)
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(found, expected, equal_nan=True)
        else:
            assert found == expected


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "options",
    [{"scale": float("nan")}, {"scale": float("inf")}, {"enable_gqa": 1}, {"is_causal": None}],
    ids=str,
)
def test_compiled_calls_too(options: dict[str, Any], dynamic: bool) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, x, **options)

    def compiled(x: torch.Tensor) -> Any:
        torch._dynamo.reset()
        try:
            return torch.compile(call, backend="eager", dynamic=dynamic)(x)
        except TypeError as error:
            return str(error)

    x = torch.randn(1, 2, 5, 16)
    expected = compiled(x)
    with ours.activate(backend="reference"):
        found = compiled(x)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, equal_nan=True)
    else:
        assert found == expected
