"""Installs binaries into this environment: which ones, from where, by which installer."""
