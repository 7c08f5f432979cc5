"""The places that hold blocks. `base` is the seam that each one implements."""
