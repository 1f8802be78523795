"""Reads archives, ELF files, device code and metadata, whatever their bytes are."""
