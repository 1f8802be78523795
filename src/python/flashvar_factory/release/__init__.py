"""Turns variants.toml into a release that is checked: stages, their records, one report."""
