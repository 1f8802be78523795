"""The Triton kernel that writes new keys and values into a KV cache."""
