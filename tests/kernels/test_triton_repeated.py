"""Repeated launches: which of them Triton looks up, and what the compiled kernel is called with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashvar.backends.triton import repeated
from flashvar.backends.triton.repeated import RepeatedLaunch
from flashvar.ops.plans import Plans

STREAM = 77


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current stream of the tensors' device."""

    def current(device: int) -> int:
        assert device == torch.zeros(1).get_device()
        return STREAM

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", current, raising=False)


class Compiled:
    """What Triton returns from a launch; launches of it are recorded."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert grid == (7, 1, 1)

        def run(*given: Any, stream: int) -> None:
            assert stream == STREAM
            self.launched.append(given)

        return run


class Kernel:
    """A kernel of two tensors and two other parameters."""

    arg_names = ("p_x", "p_y", "count", "BLOCK")

    def __init__(self, interpreted: bool = False) -> None:
        self.looked_up: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.compiled: list[Compiled] = []
        self.interpreted = interpreted

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert grid == (7,)

        def launch(*tensors: Any, **arguments: Any) -> Compiled | None:
            self.looked_up.append((tensors, arguments))
            self.compiled.append(Compiled(len(self.compiled)))
            return None if self.interpreted else self.compiled[-1]

        return launch


ARGUMENTS = {"BLOCK": 64, "count": 3, "num_warps": 4}


def test_the_second_launch_is_not_looked_up() -> None:
    kernel = Kernel()
    launch = RepeatedLaunch(kernel, (7,), ARGUMENTS)
    x, y = torch.zeros(8), torch.zeros(8)
    launch(x, None)
    assert kernel.looked_up == [((x, None), ARGUMENTS)]
    launch(y, None)
    launch(x, None)
    assert len(kernel.looked_up) == 1
    # In the order of the parameters, without options of the compiler.
    assert kernel.compiled[0].launched == [(y.data_ptr(), 0, 3, 64), (x.data_ptr(), 0, 3, 64)]


def test_what_is_compiled_apart_is_looked_up() -> None:
    kernel = Kernel()
    launch = RepeatedLaunch(kernel, (7,), ARGUMENTS)
    x = torch.zeros(8)
    assert x.data_ptr() % 16 == 0
    kinds = [(x, None), (x[1:], None), (x, x), (x, x[1:]), (x, x.int()), (x.half(), x)]
    for _ in range(3):
        for kind in kinds:
            launch(*kind)
    assert len(kernel.looked_up) == len(kinds)
    for compiled, (one, _) in zip(kernel.compiled, kinds, strict=True):
        assert [given[0] for given in compiled.launched] == [one.data_ptr()] * 2


def test_the_interpreter_compiles_nothing() -> None:
    kernel = Kernel(interpreted=True)
    launch = RepeatedLaunch(kernel, (7,), ARGUMENTS)
    launch(torch.zeros(8), None)
    launch(torch.zeros(8), None)
    assert len(kernel.looked_up) == 2


class Elsewhere(torch.Tensor):
    """A tensor of another device."""

    def get_device(self) -> int:
        return 5


def test_a_launch_is_repeated_only_with_equal_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "_launches", Plans())
    kernel, x = Kernel(), torch.zeros(8)
    other = torch.zeros(8).as_subclass(Elsewhere)
    kinds: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (kernel, (x, None, 3), {"BLOCK": 64, "num_warps": 4}),
        (kernel, (x, x, 3), {"BLOCK": 64, "num_warps": 4}),
        (kernel, (x, None, 5), {"BLOCK": 64, "num_warps": 4}),
        (kernel, (x, None, 3), {"BLOCK": 32, "num_warps": 4}),
        (kernel, (x, None, 3), {"BLOCK": 64, "num_warps": 8}),
        (kernel, (x, None, 3), {"BLOCK": 64, "num_stages": 4}),
        (kernel, (other, None, 3), {"BLOCK": 64, "num_warps": 4}),
        (Kernel(), (x, None, 3), {"BLOCK": 64, "num_warps": 4}),
    ]
    for one, given, named in kinds:
        before = len(one.looked_up)
        repeated.start(one, (7,))(*given, **named)
        assert one.looked_up[before:] == [(given[:2], {"count": given[2], **named})]
    for one, given, named in kinds[:6]:
        before = len(one.looked_up)
        repeated.start(one, (7,))(*given, **named)
        assert len(one.looked_up) == before
    for compiled, (_, given, named) in zip(kernel.compiled, kinds[:6], strict=False):
        pointers = [0 if x is None else x.data_ptr() for x in given[:2]]
        assert compiled.launched == [(*pointers, given[2], named["BLOCK"])]


def test_a_launch_is_repeated_only_on_an_equal_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "_launches", Plans())
    x = torch.zeros(8)
    kernel = Kernel()
    repeated.start(kernel, (7,))(x, x, 3, BLOCK=64)
    with pytest.raises(AssertionError):  # of the other grid
        repeated.start(kernel, (8,))(x, x, 3, BLOCK=64)
