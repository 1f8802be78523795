"""Which undefined symbols of a library the audit takes for the C runtime's."""

from __future__ import annotations

import pytest

from flashvar_factory.audit import library_checks
from flashvar_factory.inspect.dynamic import Undefined


@pytest.mark.parametrize(
    ("symbol", "taken"),
    [
        (Undefined("memcpy", weak=False, version="GLIBC_2.14"), True),
        (Undefined("__gmon_start__", weak=True, version=None), True),
        # std::logic_error of a static libstdc++ brings these; nobody has to define them.
        (Undefined("_ITM_addUserCommitAction", weak=True, version=None), True),
        (Undefined("_ZGTtdlPv", weak=True, version=None), True),
        (Undefined("_ITM_addUserCommitAction", weak=False, version=None), False),
        (Undefined("_ZSt4cout", weak=True, version=None), False),
        (Undefined("memcpy", weak=False, version=None), False),
    ],
    ids=str,
)
def test_what_may_be_undefined(symbol: Undefined, taken: bool) -> None:
    assert library_checks._is_system(symbol) is taken
