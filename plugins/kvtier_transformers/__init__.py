"""kvtier for Hugging Face transformers: caches that load saved prefixes, and save what is new."""

from kvtier_transformers.attach import Attachment, attach
from kvtier_transformers.cache import KvtierCache
from kvtier_transformers.options import UnsupportedModel

__all__ = ["Attachment", "KvtierCache", "UnsupportedModel", "attach"]
