"""Finds what compiles: nvcc, cross compilers, compiler caches, containers."""
