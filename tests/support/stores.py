"""Functions that fill a small native store."""

import struct
from hashlib import sha256

PAGE = 4096
FULL, WINDOW, STATE = 0, 1, 2


def key(name):
    return sha256(str(name).encode()).digest()


def keys(*names):
    return b"".join(key(name) for name in names)


def pack(*ids):
    return b"".join(struct.pack("<I", i) for i in ids)


def unpack(ids):
    return [i for (i,) in struct.iter_unpack("<I", ids)]


def generation(table, slot):
    _, _, offset, _ = struct.unpack("<IIQQ", slot)
    return struct.unpack_from("<Q", table, offset // PAGE * 8)[0]


def open_arena(store, nbytes=64 * PAGE):
    table = bytearray(nbytes // PAGE * 8)
    store.add_extent(nbytes, table)
    return table


def save(store, space, names, group=0, shard=0, parent=None):
    """Reserve and commit a chain of new keys; return their ids."""
    above = None if parent is None else key(parent)
    ids, _ = store.reserve(space, group, shard, above, keys(*names), bytes(len(names)))
    store.commit(ids, b"")
    store.check()
    return ids


def look_up(catalog, space, keys):
    """Match, and count the answer as a daemon without a disk does."""
    found = catalog.match(space, keys)
    catalog.usage.count_lookup(space, keys, found.ready)
    return found
