"""Slow, short models of product code. Tests compare the product with them."""
