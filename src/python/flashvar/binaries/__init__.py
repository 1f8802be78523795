"""Compiled binaries: kinds, manifests, the registry of installed binaries, and the loader."""
