"""Norms of rows, for flashvar.layers: root mean square with an optional gate, and L2.

Not in the table of ops: no binary has it, and no caller names a backend. Triton's kernels normalize
CUDA tensors, a formula in torch's functions all others; there is nothing to select or to report.
"""
