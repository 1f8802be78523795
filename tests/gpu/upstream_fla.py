"""A plugin of pytest that puts flashvar under flash-linear-attention's own tests.

    FLA_DISABLE_BACKEND_DISPATCH=1 python -m pytest -p upstream_fla tests/ops/test_gdn.py

in a checkout of flash-linear-attention, with this folder on PYTHONPATH. Every call of its public
functions that flashvar serves is flashvar's, and what it does not serve is an error. Where
causal-conv1d is not installed flashvar stands in for it too. What flashvar leaves unwritten is NaN:
flash-linear-attention's conftest.py fills empty tensors, and the plugin checks that it does so for
flashvar. FLASHVAR_REHEARSE=1 runs the tests on the CPU, as far as they call no kernel of
flash-linear-attention.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before flash-linear-attention's conftest.py, which binds names of the device."""
    import flashvar.compat.causal_conv1d
    import flashvar.compat.fla

    if importlib.util.find_spec("causal_conv1d") is None:
        flashvar.compat.causal_conv1d.provide()
    import fla.utils

    if os.environ.get("FLASHVAR_REHEARSE"):
        fla.utils.device, fla.utils.device_torch_lib = "cpu", torch.cpu
    flashvar.compat.fla.install(strict=True)


def pytest_report_header(config: pytest.Config) -> str:
    import fla

    import flashvar

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    return f"flashvar {flashvar.__version__} under fla {fla.__version__} on {device}"


@pytest.fixture(autouse=True)
def _unwritten_is_nan(request: pytest.FixtureRequest) -> None:
    """Fail where an output of flashvar that nothing has written could look right."""
    if "poison_torch_memory" not in request.fixturenames:
        pytest.fail("expected flash-linear-attention's conftest.py, which fills empty tensors")
    request.getfixturevalue("poison_torch_memory")
    path = str(request.node.path)
    if "tests/ops/" not in path and "tests/modules/" not in path:
        return  # conftest.py leaves other folders alone
    from flashvar.ops.causal_conv1d import run

    unwritten = run.like_forward(torch.zeros(1, 2, 3), None, None, 0, "btd")[0]
    assert unwritten.isnan().all()
