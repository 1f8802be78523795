"""Attention: `flashvar.attention` and `flashvar.attention_varlen`."""
