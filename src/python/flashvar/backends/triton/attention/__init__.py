"""Attention through Triton: needs no binary, compiles for the device at the first call."""

from __future__ import annotations

from flashvar.backends.triton.attention.launch import prepare_backward, prepare_forward

__all__ = ["prepare_backward", "prepare_forward"]
