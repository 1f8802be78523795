"""Reads variants.toml and what a command selects of it: the plan of every build."""
