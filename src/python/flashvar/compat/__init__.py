"""Modules that stand in for those of other projects, when a program asks for it."""
