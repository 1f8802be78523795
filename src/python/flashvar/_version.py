"""The version of every flashvar distribution, defined only here."""

__version__ = "0.1.0"
