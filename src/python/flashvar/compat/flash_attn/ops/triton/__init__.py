"""The package `flash_attn.ops.triton`, with `rotary` only."""
