from __future__ import annotations

import os

import pytest
from fresh_python import evaluate, run_python

import flashvar

BLOCK = "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
LAYERS = [
    "errors",
    "machine.system",
    "ops.op",
    "binaries.kinds",
    "binaries.manifest",
    "binaries.extras",
    "binaries.registry",
    "binaries.loader",
    "selection.request",
    "selection.candidates",
    "selection.compatibility",
    "selection.rules",
    "selection.resolve",
]


def test_import_loads_three_modules_and_no_framework() -> None:
    loaded = evaluate("import flashvar, json, sys; print(json.dumps(sorted(sys.modules)))")
    assert {"torch", "triton", "numpy", "ctypes", "logging"} & set(loaded) == set()
    ours = [name for name in loaded if name.startswith("flashvar")]
    assert ours == ["flashvar", "flashvar._version", "flashvar.ops"]


@pytest.mark.parametrize("layer", [*LAYERS, "cli", "cli.diagnosis", "cli.doctor_page"])
def test_layer_imports_without_torch_and_triton(layer: str) -> None:
    code = f"import flashvar.{layer}, json\nprint(json.dumps(True))"
    assert evaluate(BLOCK + code) is True


def test_errors_are_public_without_torch() -> None:
    code = "import flashvar, json\nprint(json.dumps(flashvar.ShapeError.__mro__[1].__name__))"
    assert evaluate(BLOCK + code) == "InvalidInputError"


def test_attention_without_torch_fails_at_use_and_names_torch() -> None:
    code = (
        "import flashvar, json\n"
        "try: flashvar.attention\n"
        "except ImportError as error: print(json.dumps([error.name, str(error)]))"
    )
    words = "flashvar.attention needs torch, found none: pip install torch"
    assert evaluate(BLOCK + code) == ["torch", words]


def test_the_reference_computes_its_first_exponential_on_one_thread(python: str) -> None:
    code = """
import json, torch
sizes, exp = [], torch.exp
torch.exp = lambda x: sizes.append(x.numel()) or exp(x)
import flashvar
q, k, v = torch.randn(3, 1, 64, 2, 16)
flashvar.attention(q, k, v)
print(json.dumps(sizes))
"""
    first, *later = evaluate(code, python)
    assert first == 1
    assert later == [2 * 64 * 64]


def test_home_that_cannot_be_written(python: str) -> None:
    code = (
        "import flashvar, json, torch\n"
        "q = torch.zeros(1, 2, 1, 8)\n"
        "print(json.dumps(list(flashvar.attention(q, q, q).shape)))"
    )
    assert evaluate(code, python, os.devnull) == [1, 2, 1, 8]


def test_doctor_needs_neither_torch_nor_triton() -> None:
    code = (
        "import contextlib, io, json\n"
        "from flashvar.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out: code = main(['doctor'])\n"
        "print(json.dumps([code, 'torch cannot be imported' in out.getvalue()]))"
    )
    assert evaluate(BLOCK + code) == [1, True]


@pytest.mark.parametrize("level", ["debug", "nonsense"])
def test_log_variable_never_breaks_the_import(level: str) -> None:
    code = f"import os; os.environ['FLASHVAR_LOG'] = {level!r}\nimport flashvar, json\n"
    assert evaluate(code + "print(json.dumps(True))") is True


def test_module_runs_as_a_command() -> None:
    finished = run_python("-m", "flashvar", "--version")
    assert finished.stdout == f"flashvar {flashvar.__version__}\n"
