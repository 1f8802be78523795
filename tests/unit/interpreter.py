"""A Python process in which Triton's interpreter runs the kernels, on the CPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src" / "python"


def interpreted(python: str, *arguments: str) -> str:
    """What it prints."""
    finished = subprocess.run(
        [python, *arguments],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (SOURCES, TESTS))),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def patch_once() -> None:
    """Make Triton's interpreter faster, in the process that it runs in.

    It patches its language at every call of a function in a kernel, although the launch has done
    so: half of its time. Here the first call of a module's functions patches alone. And whatever it
    computes it makes types anew, which are the same for the same shape and dtype.
    """
    from triton.language.core import block_type
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction

    make, made = block_type.__init__, {}

    def begin(self: Any, element: Any, shape: Any) -> None:
        key = element.name, *(getattr(size, "value", size) for size in shape)
        if key in made:
            self.__dict__.update(made[key])
        else:
            make(self, element, shape)
            made[key] = dict(self.__dict__)

    block_type.__init__ = begin

    look_up, known = interpreter._get_np_dtype, {}

    def found(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    interpreter._get_np_dtype = found
    patching = InterpretedFunction.__call__
    patched = set()

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        module = self.fn.__module__
        if module in patched:
            return self.rewrite()(*arguments, **options)
        patched.add(module)
        return patching(self, *arguments, **options)

    InterpretedFunction.__call__ = call
