"""What `flash_attn.utils` is served of: `distributed`."""
