"""Rotary position embeddings in Triton."""
