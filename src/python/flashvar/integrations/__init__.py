"""Flashvar inside other packages: each module says what it registers and where."""
