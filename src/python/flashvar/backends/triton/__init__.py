"""The Triton backend: needs no binary, compiles for the device at the first call."""
