"""Compiled binaries: variants, manifests, the registry of installed binaries, and the loader."""
