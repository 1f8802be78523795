"""Stands before torch on the path of commands that need none, which load in a moment without it."""

raise ImportError("torch is kept out of this test")
