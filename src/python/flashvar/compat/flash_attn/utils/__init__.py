"""The package `flash_attn.utils`, with `distributed` only."""
