"""Integrations: modules that register flashvar in other packages."""
