"""Compiled binaries: what one says of itself, which are installed, and how one is opened."""
