"""Opening a binary's shared library and calling it.

A library that is truncated or altered can crash the process inside dlopen, so its hash is compared
with the manifest first.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from flashvar.binaries import manifest as manifests
from flashvar.binaries import registry
from flashvar.binaries.registry import Binary, Inventory
from flashvar.errors import BinaryError

_log = logging.getLogger("flashvar")

_OK: Final = 0  # FLASHVAR_OK
_LONGEST: Final = 512  # bytes of an explanation


class Library:
    """An open binary. Its functions take one packed parameter struct of src/cuda/abi/<op>.h."""

    def __init__(self, path: Path, handle: ctypes.CDLL) -> None:
        """Look up the functions of `handle`, opened from `path`."""
        self.path = path
        self._attention_fwd = _function(handle, "flashvar_attention_fwd", ctypes.c_int)
        self._attention_fwd.argtypes = [ctypes.c_char_p]
        self._handle = handle
        self._last_error = _function(handle, "flashvar_last_error", ctypes.c_char_p)

    def attention_fwd(self, packed: bytes) -> None:
        """Enqueue one forward; `packed` is a whole flashvar_attention_fwd_params.

        Raises:
            BinaryError: the library or the driver refused; the message is theirs.
        """
        if self._attention_fwd(packed) != _OK:
            raise BinaryError(f"{self.path.name}: {self.last_error()}")

    def attention_bwd(self, packed: bytes) -> None:
        """Enqueue one backward; `packed` is a whole flashvar_attention_bwd_params.

        Raises:
            BinaryError: as for attention_fwd.
        """
        if self._attention_bwd(packed) != _OK:
            raise BinaryError(f"{self.path.name}: {self.last_error()}")

    def attention_bwd_workspace(self, packed: bytes) -> int:
        """Bytes of workspace that a backward wants.

        Raises:
            BinaryError: as for attention_fwd.
        """
        return self._workspace(self._attention_bwd_workspace, packed)

    def attention_fwd_workspace(self, packed: bytes) -> int:
        """Bytes of workspace that a forward wants.

        Raises:
            BinaryError: as for attention_fwd.
        """
        return self._workspace(self._attention_fwd_workspace, packed)

    def attention_fwd_explain(self, packed: bytes) -> str:
        """Which kernels a forward launches and why: `wgmma: ...` or `mma.sync: ...`.

        Raises:
            BinaryError: as for attention_fwd.
        """
        return self._explain(self._attention_fwd_explain, packed)

    def attention_bwd_explain(self, packed: bytes) -> str:
        """The same of a backward.

        Raises:
            BinaryError: as for attention_fwd.
        """
        return self._explain(self._attention_bwd_explain, packed)

    def _workspace(self, function: Any, packed: bytes) -> int:
        size = ctypes.c_uint64()
        if function(packed, ctypes.byref(size)) != _OK:
            raise BinaryError(f"{self.path.name}: {self.last_error()}")
        return size.value

    def _explain(self, function: Any, packed: bytes) -> str:
        text = ctypes.create_string_buffer(_LONGEST)
        if function(packed, text, _LONGEST) != _OK:
            raise BinaryError(f"{self.path.name}: {self.last_error()}")
        return text.value.decode("utf-8", errors="replace")

    # A binary without the backward has none of its functions, and serves the forward all the same.
    @cached_property
    def _attention_bwd(self) -> Any:
        function = _function(self._handle, "flashvar_attention_bwd", ctypes.c_int)
        function.argtypes = [ctypes.c_char_p]
        return function

    @cached_property
    def _attention_fwd_workspace(self) -> Any:
        return self._workspace_function("attention_fwd")

    @cached_property
    def _attention_bwd_workspace(self) -> Any:
        return self._workspace_function("attention_bwd")

    @cached_property
    def _attention_fwd_explain(self) -> Any:
        return self._explain_function("attention_fwd")

    @cached_property
    def _attention_bwd_explain(self) -> Any:
        return self._explain_function("attention_bwd")

    def _workspace_function(self, op: str) -> Any:
        function = _function(self._handle, f"flashvar_{op}_workspace", ctypes.c_int)
        function.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64)]
        return function

    def _explain_function(self, op: str) -> Any:
        function = _function(self._handle, f"flashvar_{op}_explain", ctypes.c_int)
        function.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64]
        return function

    def last_error(self) -> str:
        """The message of this thread's last failed call; empty when none failed."""
        message: bytes = self._last_error()
        return message.decode("utf-8", errors="replace")


_libraries: dict[Path, Library] = {}


def load(binary: Binary) -> Library:
    """Open the library of `binary`, once per process.

    A version that differs from flashvar's is logged once.

    Raises:
        BinaryError: the library was refused; another candidate may serve.
    """
    library = _libraries.get(binary.library)
    if library is None:
        if binary.skew is not None:
            _log.warning("%s", binary.skew)
        library = _libraries[binary.library] = _open(binary)
    return library


def open_all() -> Inventory:
    """The installed binaries that open; `registry.installed` keeps why the others do not."""
    inventory = registry.installed()
    for binary in inventory.binaries:
        try:
            load(binary)
        except BinaryError as error:
            registry.refuse(binary, str(error))
            return open_all()  # the refused one may have shadowed another
    return inventory


def _open(binary: Binary) -> Library:
    path = binary.library
    _check_hash(path, binary.manifest.library.sha256)
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise BinaryError(f"{path.name}: dlopen refused it: {error}") from error
    _check_abi(path, handle)
    _check_architecture(path, handle, binary.architecture.name)
    return Library(path, handle)


def _check_hash(path: Path, expected: str) -> None:
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise BinaryError(f"{path.name}: expected a readable file, found: {error}") from error
    if found != expected:
        raise BinaryError(
            f"{path.name}: expected sha256 {expected[:12]}... as in its manifest, "
            f"found {found[:12]}...; the file is damaged or from another build"
        )


def _check_abi(path: Path, handle: ctypes.CDLL) -> None:
    found = _function(handle, "flashvar_abi_version", ctypes.c_uint32)()
    if found != manifests.ABI:
        raise BinaryError(f"{path.name}: expected ABI {manifests.ABI}, found {found}")


def _check_architecture(path: Path, handle: ctypes.CDLL, expected: str) -> None:
    text: bytes = _function(handle, "flashvar_build_info", ctypes.c_char_p)() or b""
    try:
        found = json.loads(text)["architecture"]
    except (ValueError, TypeError, KeyError):
        raise BinaryError(f"{path.name}: expected build information, found {text!r}") from None
    if found != expected:
        raise BinaryError(f"{path.name}: expected code for {expected}, found {found}")


def _function(handle: ctypes.CDLL, name: str, result: type[Any]) -> Any:
    try:
        function = handle[name]
    except AttributeError:
        path = Path(handle._name).name
        raise BinaryError(f"{path}: expected a function {name}, found none") from None
    function.restype = result
    function.argtypes = []
    return function
