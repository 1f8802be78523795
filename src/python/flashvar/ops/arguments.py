"""Checks of arguments that ops have in common: tensors, flags and counts."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from functools import wraps
from numbers import Integral, Real
from typing import Any, Final, ParamSpec, TypeVar

import torch

from flashvar.errors import DeviceError, InvalidInputError, LayoutError
from flashvar.ops.dispatch_modes import is_compiling
from flashvar.ops.unknown_sizes import is_known
from flashvar.selection.request import BACKENDS

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_DEVICES: Final = ("cpu", "cuda", "meta")
FLOAT32_LIMIT: Final = float(torch.finfo(torch.float32).max)
# Numbers may also come from numpy, and be symbols while a graph is traced.
_INTEGERS: Final = (int, torch.SymInt, Integral)
_NUMBERS: Final = (int, float, torch.SymFloat, torch.SymInt, Real)
_BOOLS: Final = (bool, torch.SymBool)
_TRACEABLE: Final = (int, float, str, torch.SymFloat, torch.SymInt, torch.Tensor)
_PACKED: Final = "a padded dense one, or pass its values packed, with cu_seqlens"


def check_tensor(name: str, tensor: object) -> None:
    """Refuse a value that is not a tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInputError(
            f"{name} must be a torch.Tensor, found {type(tensor).__name__}: "
            "convert it with torch.as_tensor()"
        )


def check_strided(name: str, tensor: Any, to: str = _PACKED) -> None:
    """Refuse a value that is not a tensor, or a tensor without strides: to be converted `to`."""
    check_tensor(name, tensor)
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise LayoutError(f"{name} must be a strided tensor, found {kind}: convert it to {to}")


def check_operand(name: str, tensor: Any, to: str = _PACKED) -> None:
    """Refuse a value that is not a strided tensor on a device that backends know."""
    check_strided(name, tensor, to)
    if tensor.device.type not in _DEVICES:
        raise DeviceError(
            f"{name} must be on a CUDA device or the CPU, found {tensor.device}: "
            "move it with .to('cuda') or .to('cpu')"
        )


def check_device(name: str, tensor: Any, device: torch.device, of: str) -> None:
    """Refuse a tensor on another device than that of the tensor called `of`."""
    if tensor.device != device:
        raise DeviceError(
            f"{name} must be on the device of {of}, {device}, found {tensor.device}: move it with "
            f".to({of}.device)"
        )


def check_layout(layout: Any, layouts: Collection[str], dimensions: str) -> None:
    """Refuse a layout that is not in `layouts`; `dimensions` says what their letters mean."""
    if type(layout) is not str or layout not in layouts:
        raise LayoutError(
            f"layout must be one of {', '.join(map(repr, layouts))}, found {layout!r}: "
            f"name the order of the dimensions ({dimensions})"
        )


def check_backend(backend: Any) -> None:
    """Refuse a backend that has no such name."""
    if type(backend) is not str or backend not in BACKENDS:
        raise InvalidInputError(
            f"backend must be one of {', '.join(map(repr, BACKENDS))}, found {backend!r}: "
            'leave it out for "auto"'
        )


def refuse_unknown_subclasses(error: TypeError, tensors: tuple[object, ...]) -> None:
    """Raise an InvalidInputError if a tensor subclass does not implement an op; else do nothing.

    `error` is what torch raised while it dispatched `tensors`.
    """
    names = {type(x).__name__ for x in tensors if isinstance(x, torch.Tensor)}
    if str(error).startswith(("Multiple dispatch failed", "no implementation found")):
        raise InvalidInputError(
            "tensors must be of types that implement flashvar's ops and torch's views, found "
            f"{', '.join(sorted(names))}: convert them to plain tensors, and pass what "
            "else they hold as arguments"
        ) from error


def refuses_unknown_subclasses(
    function: Callable[_Arguments, _Result],
) -> Callable[_Arguments, _Result]:
    """Decorator: a tensor subclass that does not implement an op raises InvalidInputError."""

    @wraps(function)
    def wrapped(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        try:
            return function(*arguments, **options)
        except TypeError as error:
            refuse_unknown_subclasses(error, (*arguments, *options.values()))
            raise

    return wrapped


def check_flag(name: str, flag: Any) -> None:
    """Refuse a flag that is not a bool, as flashvar's own functions do.

    Plans are found by equality, and 1 equals True.
    """
    if not is_bool(flag):
        raise InvalidInputError(f"{name} must be True or False, found {flag!r}: pass a bool")


def as_bool(name: str, flag: Any) -> bool:
    """A flag of a function of another package: also a number, a numpy bool or a tensor of one.

    Raises:
        InvalidInputError: the flag has no single truth value.
    """
    try:
        return bool(flag)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidInputError(
            f"{name} must be True or False, found {type(flag).__name__}: pass a bool"
        ) from None


def as_device(device: Any) -> torch.device | None:
    """A device by its name, as a torch.device; None, for the default one, is kept.

    Raises:
        DeviceError: torch has no such device.
    """
    try:
        return None if device is None else torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise DeviceError(
            f"device must be a torch device, found {device!r}: pass that of the other tensors"
        ) from error


def is_number(value: object) -> bool:
    """Whether a value is a number: not a bool, and not a tensor, which may be on a device."""
    return isinstance(value, _NUMBERS) and type(value) is not bool


def is_bool(value: object) -> bool:
    """Whether a value is a bool, or the symbol of one: comparisons of sizes that are traced."""
    return type(value) in _BOOLS


def is_integer(value: object) -> bool:
    """Whether the type of a value is an integer type; bool is not, nor is a tensor."""
    return isinstance(value, _INTEGERS) and type(value) is not bool


def as_traceable(value: Any) -> Any:
    """While torch.compile traces, NumPy numbers and symbolic booleans as what ops take.

    Dynamo turns NumPy numbers into arrays, which no op accepts. Other values are unchanged.
    """
    # The usual types return first: type() of a value from eager code can end the trace.
    if not is_compiling() or value is None:
        return value
    if isinstance(value, _BOOLS):  # bool() of a symbol would be one, too
        return True if value else False  # noqa: SIM210
    if isinstance(value, _TRACEABLE):
        return value
    if type(value).__module__ != "numpy":
        return value
    array = torch.as_tensor(value)
    return array.item() if array.numel() == 1 and array.dtype != torch.bool else value


def whole_number(value: Any) -> Any:
    """An integer as Python's; None for other values.

    Every integer argument is read by it. As for torch's functions, that is anything with
    `__index__`: also integers of numpy, and tensors of one integer, which the host waits for.
    Booleans are not numbers here, not even in a tensor, nor are floats.
    """
    if type(value) is int:  # as nearly always: each call of an op reads several
        return value
    value = as_traceable(value)
    if isinstance(value, (int, torch.SymInt)):
        return None if type(value) is bool else value
    # Some versions of numpy count its bools as integers.
    dtype = getattr(value, "dtype", None)
    if dtype == torch.bool or getattr(dtype, "kind", None) == "b":
        return None
    try:
        if isinstance(value, torch.Tensor):  # Dynamo of torch 2.8 does not follow index()
            kind = value.dtype
            is_one = value.numel() == 1 and not kind.is_floating_point and not kind.is_complex
            return value.item() if is_one else None
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def as_integer(value: Any) -> Any:
    """What `whole_number` reads; other values are kept, for checks to refuse in their words."""
    found = whole_number(value)
    return value if found is None else found


def check_scale(scale: Any, default: str) -> None:
    """Refuse a scale that is not a number; `default` is what the op takes without one."""
    if scale is not None and not is_number(scale):
        is_tensor = isinstance(scale, torch.Tensor)
        found = "a tensor" if is_tensor else repr(scale)
        way = "pass scale.item(), or leave it out" if is_tensor else "leave it out"
        raise InvalidInputError(f"scale must be a number, found {found}: {way} for {default}")


def is_scale(scale: Any) -> bool:
    """Whether a scale is one that ops take: None, or a finite number that float32 can hold."""
    if scale is None or not is_number(scale):
        return scale is None
    # Compared with itself for NaN: the limit may be a symbol of torch.compile, which NaN is not
    # compared with.
    is_nan = scale != scale
    return not is_nan and bool(abs(scale) <= FLOAT32_LIMIT)


def float32_scale(scale: Any, default: str) -> float:
    """A scale that is a number, as a float.

    Raises:
        InvalidInputError: float32 cannot hold it.
    """
    try:
        value = float(scale)
    except OverflowError:
        value = math.inf
    if not abs(value) <= FLOAT32_LIMIT:
        raise InvalidInputError(
            f"scale must be a finite number that float32 can hold, found {scale!r}: "
            f"leave it out for {default}"
        )
    return value


def count(name: str, number: Any) -> Any:
    """A count as `whole_number` reads it.

    Raises:
        InvalidInputError: the number is not a whole number, or is negative.
    """
    found = whole_number(number)
    if found is None or is_known(found < 0):
        raise InvalidInputError(
            f"{name} must be a whole number, not negative, found {number!r}: pass an int"
        )
    return found


def size(name: str, number: Any) -> Any:
    """The size of a dimension as `whole_number` reads it.

    Raises:
        InvalidInputError: the number is not a whole number, or is not positive.
    """
    found = whole_number(number)
    if found is None or is_known(found < 1):
        raise InvalidInputError(
            f"{name} must be a whole number of at least 1, found {number!r}: pass an int"
        )
    return found
