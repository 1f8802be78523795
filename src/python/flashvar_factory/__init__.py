"""Builds binaries and wheels from `variants.toml`: in the sdist, never in a wheel."""
