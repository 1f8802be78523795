"""Models of the package transformers on flashvar: `register`."""

from flashvar.integrations.transformers.registration import register

__all__ = ["register"]
