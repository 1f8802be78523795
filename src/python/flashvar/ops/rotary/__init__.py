"""Rotary position embeddings, which flashvar.compat needs for users of FlashAttention.

Not in the table of ops: no binary has it, and no caller names a backend. Triton's kernel rotates
CUDA tensors, a formula in torch's functions all others; there is nothing to select or to report.
"""
