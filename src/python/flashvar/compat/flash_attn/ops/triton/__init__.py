"""What `flash_attn.ops.triton` is served of: `rotary`."""
