"""Native kernels behind one import: copies, checksums, names, mappings, the catalog's store."""

from kvtier_kernels._native import Lru, Store, lifecycle

__all__ = ["Lru", "Store", "lifecycle"]
