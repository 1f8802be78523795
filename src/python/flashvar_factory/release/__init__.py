"""Turns variants.toml into a release that is proved: stages, their records, one report."""
