"""Random combinations of features, sizes, dtypes and storages, forward and backward."""

from __future__ import annotations

from device_call import check
from random_cases import RandomCase


def test_random(random_case: RandomCase, backend: str) -> None:
    case = random_case.make()
    check(case.call, backend, case.layout)
    case.check_gradients(backend)
