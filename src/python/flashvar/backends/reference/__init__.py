"""The reference backend: the ops in plain torch operations, for any device, slow."""
