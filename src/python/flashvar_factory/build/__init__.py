"""Runs CMake for a plan: development builds, wheels, the files that go into them."""
