"""kvtier for SGLang: a storage backend of its hierarchical cache, which keeps its pages in the daemon."""
