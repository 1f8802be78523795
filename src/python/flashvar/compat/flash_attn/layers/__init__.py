"""The package `flash_attn.layers`, with `rotary` only."""
