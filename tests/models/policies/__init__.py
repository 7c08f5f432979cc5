"""Eviction policies in plain Python: models of the native ones."""
