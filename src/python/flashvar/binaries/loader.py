"""Opens a binary's shared library and calls its functions.

A truncated or altered library can crash the process inside dlopen, so its hash is compared with the
manifest first.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import struct
from pathlib import Path
from typing import Any, Final

from flashvar.binaries import manifest as manifests
from flashvar.binaries import registry
from flashvar.binaries.manifest import Manifest
from flashvar.binaries.registry import Binary, Inventory
from flashvar.errors import BinaryError

_log = logging.getLogger("flashvar")

_OK: Final = 0  # FLASHVAR_OK
# ELF header: class, data encoding; e_phoff, e_phentsize, e_phnum (System V ABI, chapter 4).
_ELF_MAGIC: Final = b"\x7fELF\x02\x01"
_ELF_HEADER: Final = struct.Struct("<6s26xQ14xHH")
# Program header: p_offset and p_filesz.
_ELF_SEGMENT: Final = struct.Struct("<8xQ16xQ16x")
_LONGEST: Final = 512  # bytes, the longest explanation


class Function:
    """A function of an op in an open library; it takes one packed struct of src/cuda/abi/<op>.h."""

    def __init__(self, library: Library, name: str) -> None:
        """Look up `flashvar_<name>` and its `_workspace` and `_explain`."""
        self._library = library
        self._launch = library.symbol(f"flashvar_{name}", ctypes.c_int)
        self._launch.argtypes = [ctypes.c_char_p]
        self._workspace = library.symbol(f"flashvar_{name}_workspace", ctypes.c_int)
        self._workspace.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64)]
        self._explain = library.symbol(f"flashvar_{name}_explain", ctypes.c_int)
        self._explain.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64]

    def launch(self, packed: bytes) -> None:
        """Enqueue one call.

        Raises:
            BinaryError: the library or the driver refused the call; the message is the library's.
        """
        if self._launch(packed) != _OK:
            raise self._library.failure()

    def workspace(self, packed: bytes) -> int:
        """Bytes of workspace that a call needs.

        Raises:
            BinaryError: as for launch.
        """
        size = ctypes.c_uint64()
        if self._workspace(packed, ctypes.byref(size)) != _OK:
            raise self._library.failure()
        return size.value

    def explain(self, packed: bytes) -> str:
        """Which kernels a call launches and why: `wgmma: ...` or `mma.sync: ...`.

        Raises:
            BinaryError: as for launch.
        """
        text = ctypes.create_string_buffer(_LONGEST)
        if self._explain(packed, text, _LONGEST) != _OK:
            raise self._library.failure()
        return text.value.decode("utf-8", errors="replace")


class Library:
    """An open binary."""

    def __init__(self, path: Path, handle: ctypes.CDLL) -> None:
        """Wrap `handle`, which was opened from `path`."""
        self.path = path
        self._handle = handle
        self._last_error = self.symbol("flashvar_last_error", ctypes.c_char_p)
        self._functions: dict[str, Function] = {}

    def function(self, name: str) -> Function:
        """A function of an op, looked up once.

        Raises:
            BinaryError: the library does not export the function; its others can still be used.
        """
        found = self._functions.get(name)
        if found is None:
            found = self._functions[name] = Function(self, name)
        return found

    def symbol(self, name: str, result: type[Any]) -> Any:
        """The exported function of a name; BinaryError if the library exports none."""
        return _symbol(self._handle, name, result)

    def failure(self) -> BinaryError:
        """The error of this thread's last failed call."""
        return BinaryError(f"{self.path.name}: {self.last_error()}")

    def last_error(self) -> str:
        """The message of this thread's last failed call; empty when none failed."""
        message: bytes = self._last_error()
        return message.decode("utf-8", errors="replace")


_libraries: dict[Path, Library] = {}


def load(binary: Binary) -> Library:
    """Open the library of `binary`, once per process.

    A version that differs from flashvar's is logged once.

    Raises:
        BinaryError: the library was rejected; another candidate may run the call.
    """
    library = _libraries.get(binary.library)
    if library is None:
        if binary.version_mismatch is not None:
            _log.warning("%s", binary.version_mismatch)
        library = _libraries[binary.library] = _open(binary)
    return library


def open_all() -> Inventory:
    """The installed binaries that open, and rejected folders with a reason for the others."""
    inventory = registry.installed()
    for binary in inventory.binaries:
        try:
            library = load(binary)
        except BinaryError as error:
            registry.reject(binary, str(error))
            return open_all()  # the rejected binary may have replaced another
        if _tell_missing(binary, library):
            return open_all()  # likewise, of a function
    return inventory


def whole() -> Inventory:
    """The installed binaries whose libraries have the bytes of their manifests; opens none."""
    inventory = registry.installed()
    for binary in inventory.binaries:
        try:
            check_file(binary)
        except BinaryError as error:
            registry.reject(binary, str(error))
            return whole()  # the rejected binary may have replaced another
    return inventory


def _tell_missing(binary: Binary, library: Library) -> bool:
    """Tell the registry which functions the library does not export; whether it was news."""
    news = False
    for name in sorted(binary.functions):
        try:
            library.function(name)
        except BinaryError as error:
            registry.without_function(binary, name, str(error))
            news = True
    return news


def check_file(binary: Binary) -> bytes:
    """The content of a binary's library, which is that of its manifest; nothing is opened.

    Raises:
        BinaryError: the file cannot be read, or has other bytes.
    """
    return content_of(binary.library, binary.manifest)


def content_of(path: Path, manifest: Manifest) -> bytes:
    """The content of a library, which is that of its manifest; nothing is opened.

    Raises:
        BinaryError: as for check_file.
    """
    content = _content(path)
    _check_hash(path, content, manifest.library.sha256)
    return content


def _open(binary: Binary) -> Library:
    path = binary.library
    _check_segments(path, check_file(binary))
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise BinaryError(f"{path.name}: dlopen refused it: {error}") from error
    _check_abi(path, handle)
    _check_architecture(path, handle, binary.architecture.name)
    return Library(path, handle)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BinaryError(f"{path.name}: expected a readable file, found: {error}") from error


def _check_hash(path: Path, content: bytes, expected: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise BinaryError(
            f"{path.name}: expected sha256 {expected[:12]}... as in its manifest, "
            f"found {found[:12]}...; the file is damaged or from another build"
        )


def _check_segments(path: Path, content: bytes) -> None:
    """Check that every segment is inside the file; loading a truncated one ends in SIGBUS."""
    try:
        magic, start, size, count = _ELF_HEADER.unpack_from(content)
        if magic != _ELF_MAGIC or size != _ELF_SEGMENT.size:
            raise BinaryError(f"{path.name}: expected a 64-bit little-endian ELF library")
        ends = []
        for number in range(count):
            offset, length = _ELF_SEGMENT.unpack_from(content, start + number * size)
            ends.append(offset + length)
    except (struct.error, OverflowError):  # of an offset that no index can be
        raise BinaryError(f"{path.name}: expected an ELF library, found a part of one") from None
    if max(ends, default=0) > len(content):
        raise BinaryError(
            f"{path.name}: expected {max(ends)} bytes of segments, found a file of {len(content)}; "
            "it is truncated"
        )


def _check_abi(path: Path, handle: ctypes.CDLL) -> None:
    found = _symbol(handle, "flashvar_abi_version", ctypes.c_uint32)()
    if found != manifests.ABI:
        raise BinaryError(f"{path.name}: expected ABI {manifests.ABI}, found {found}")


def _check_architecture(path: Path, handle: ctypes.CDLL, expected: str) -> None:
    text: bytes = _symbol(handle, "flashvar_build_info", ctypes.c_char_p)() or b""
    try:
        found = json.loads(text)["architecture"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise BinaryError(f"{path.name}: expected build information, found {text!r}") from None
    if found != expected:
        raise BinaryError(f"{path.name}: expected code for {expected}, found {found}")


def _symbol(handle: ctypes.CDLL, name: str, result: type[Any]) -> Any:
    try:
        function = handle[name]
    except AttributeError:
        path = Path(handle._name).name
        raise BinaryError(f"{path}: expected a function {name}, found none") from None
    function.restype = result
    function.argtypes = []
    return function
