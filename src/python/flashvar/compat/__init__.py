"""Drop-in replacements for modules of other projects, installed on request."""
