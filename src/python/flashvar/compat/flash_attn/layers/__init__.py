"""Layers of `flash_attn` that others import."""
