"""The package `flash_attn.ops`, with `triton.rotary` only."""
