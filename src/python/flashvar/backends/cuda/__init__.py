"""Compiled kernels, called through the C ABI of src/cuda/abi."""
