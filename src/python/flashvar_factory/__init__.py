"""Builds binaries and wheels from `variants.toml`: not in the wheel of flashvar."""
