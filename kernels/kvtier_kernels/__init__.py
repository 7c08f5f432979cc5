"""Native kernels behind one import: copies, checksums, names, mappings, the catalog's store."""
