"""Measures a model, so that its K and V can be encoded with a known loss."""
