"""Merging of partial attentions: `flashvar.merge_states`."""
