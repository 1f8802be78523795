"""A Python process in which Triton's interpreter runs the kernels, on the CPU.

    TRITON_INTERPRET=1 python interpreted_attention.py

and the other files `interpreted_*.py` print one JSON object, case -> "" or what was wrong. Never
bfloat16: the interpreter computes it on its raw bits.
"""

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
    """Make Triton's interpreter faster and right, in the process that it runs in.

    It patches its language at every call of a function in a kernel, although the launch has done
    so: half of its time. Here the first call of a module's functions patches alone. And whatever it
    computes it makes types anew, which are the same for the same shape and dtype; what follows from
    shapes and dtypes it asks again.

    One thing it computes wrong: a comparison of scalars becomes a block of the dtype of what was
    compared, which Triton 3.9 refuses as a mask.
    """
    from triton.language import core
    from triton.language.core import block_type, constexpr, dtype, tensor
    from triton.language.semantic import TritonSemantic
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

    make_tensor, shapes = tensor.__init__, {}

    def begin_tensor(self: Any, handle: Any, kind: Any) -> None:
        key = tuple(kind.shape) if kind.is_block() else ()
        if key in shapes:
            self.handle, self.type, self.dtype = handle, kind, kind.scalar
            self.numel, self.shape = shapes[key]
        else:
            make_tensor(self, handle, kind)
            shapes[key] = self.numel, self.shape

    tensor.__init__ = begin_tensor

    broadcast = TritonSemantic.broadcast_impl_value

    def alike(self: Any, left: Any, right: Any) -> Any:
        blocks = left.type.is_block(), right.type.is_block()
        if blocks == (False, False):
            return left, right
        if blocks == (True, True) and list(left.type.shape) == list(right.type.shape):
            return left, right
        return broadcast(self, left, right)

    TritonSemantic.broadcast_impl_value = alike

    unwrap, held = core._unwrap_if_constexpr, {}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is constexpr:
            return value.value
        if kind not in held:
            held[kind] = issubclass(kind, (list, tuple, core.tuple, constexpr))
        return unwrap(value) if held[kind] else value

    core._unwrap_if_constexpr = unwrapped
    equal = dtype.__eq__
    dtype.__eq__ = lambda self, other: self is other or equal(self, other)

    look_up, known = interpreter._get_np_dtype, {}

    def found(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    interpreter._get_np_dtype = found
    splat = interpreter.InterpreterBuilder.create_splat

    def spread(self: Any, kind: Any, value: Any) -> Any:
        return splat(self, kind, interpreter.TensorHandle(value.data, kind.scalar))

    interpreter.InterpreterBuilder.create_splat = spread
    patching = InterpretedFunction.__call__
    patched = set()

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        module = self.fn.__module__
        if module in patched:
            return self.rewrite()(*arguments, **options)
        patched.add(module)
        return patching(self, *arguments, **options)

    InterpretedFunction.__call__ = call
