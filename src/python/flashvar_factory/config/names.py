"""Checks names: those of variants.toml end up in C++, manifests and commands."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from flashvar.binaries.manifest import FIXED_KERNEL_KEYS

# The keys of selection arguments, beside the axes.
SELECTION: Final = ("arch", "op", "ptx", "jobs", "toolkit", "cache", "shard", "platform")
# Instead of the name of an architecture.
ALL: Final = "all"
NATIVE: Final = "native"
# In [defaults] and [dev], beside the axes.
_KEYS: Final = ("ops", "architecture")

_CPP: Final = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t
char32_t class co_await co_return co_yield compl concept const const_cast consteval constexpr
constinit continue decltype default delete do double dynamic_cast else enum explicit export
extern false float for friend goto if inline int long mutable namespace new noexcept not not_eq
nullptr operator or or_eq private protected public register reinterpret_cast requires return
short signed sizeof static static_assert static_cast std struct switch template this
thread_local throw true try typedef typeid typename union unsigned using virtual void volatile
wchar_t while xor xor_eq
"""

_LONGEST: Final = 64  # names of functions and files are made of several words
_WORD = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", re.ASCII)


# How names print an axis such as head_dim.
_SHORT: Final = re.compile(r"[a-z]dim")


def why_not(word: str) -> str | None:
    """What is expected of a word instead of `word`; None where it is fine."""
    if not _WORD.fullmatch(word) or len(word) > _LONGEST:
        return f"words of a-z and 0-9, joined by single _, of at most {_LONGEST} characters"
    return "no word that C++ has a meaning for" if word in _CPP.split() else None


def op_of(function: str) -> str:
    """The name without its last word: attention of attention_fwd.

    A function that is all of its op needs such a word too: vector_add counts as the op vector.
    """
    return function.rpartition("_")[0] or function


def why_no_axis(word: str, ops: Iterable[str]) -> str | None:
    """The same of the name of an axis, beside the names of all ops."""
    reserved = {*SELECTION, *_KEYS, *FIXED_KERNEL_KEYS, *ops}
    if word in reserved:
        return f"an axis that is called none of {', '.join(sorted(reserved))}"
    if _SHORT.fullmatch(word):
        return "the axis in full, such as head_dim for hdim"
    return why_not(word)
