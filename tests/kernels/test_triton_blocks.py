"""Sizes of blocks on the host."""

from __future__ import annotations

import triton

from flashvar.backends.triton.blocks import power_of_2


def test_powers_of_2_are_those_of_triton() -> None:
    sizes = [*range(1, 70), *(2**n + step for n in range(7, 15) for step in (-1, 0, 1))]
    assert [power_of_2(size) for size in sizes] == [triton.next_power_of_2(n) for n in sizes]
