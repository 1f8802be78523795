"""What `flash_attn.ops` is served of: `triton.rotary`."""
