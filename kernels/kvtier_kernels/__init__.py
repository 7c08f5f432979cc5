"""The native kernels in one namespace: copies, checksums, keys, mappings, disks, the catalog's store."""

from kvtier_kernels._native import *  # noqa: F403
