"""flashvar as an attention implementation of the package transformers: `register`."""

from flashvar.integrations.transformers.registration import register

__all__ = ["register"]
