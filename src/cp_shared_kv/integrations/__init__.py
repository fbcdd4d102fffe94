"""Plugins into other engines: what fits the core to each of them, and nothing more."""
