"""Lossy: 2 bits an element, otherwise as `q4`.

Errors of 40 percent: for models that are known to bear it.
"""

from kvtier.codec import base

CODEC: base.Codec = base.Native("q2", base.Q2, lossy=True)
