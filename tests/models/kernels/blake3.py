"""BLAKE3 as defined: chunks of blocks, and a binary tree over the chunks."""

import struct
from typing import NamedTuple

MASK = 0xFFFFFFFF
BLOCK, CHUNK = 64, 1024
CHUNK_START, CHUNK_END, PARENT, ROOT, KEYED = 1, 2, 4, 8, 16
IV = (
    0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
)  # fmt: skip
PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
COLUMNS = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
DIAGONALS = ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))

Words = tuple[int, ...]


class Node(NamedTuple):
    """The last compression of a chunk or of a pair; its flags depend on the node above."""

    chaining: Words
    block: bytes
    counter: int
    flags: int

    def finish(self, flag: int = 0) -> Words:
        block = self.block.ljust(BLOCK, b"\0")
        return compress(self.chaining, block, len(self.block), self.counter, self.flags | flag)


def rotated(word: int, bits: int) -> int:
    return (word >> bits | word << 32 - bits) & MASK


def compress(chaining: Words, block: bytes, size: int, counter: int, flags: int) -> Words:
    words = list(struct.unpack("<16I", block))
    v = [*chaining, *IV[:4], counter & MASK, counter >> 32, size, flags]
    for _ in range(7):
        for i, (a, b, c, d) in enumerate(COLUMNS + DIAGONALS):
            for word, first, second in ((words[2 * i], 16, 12), (words[2 * i + 1], 8, 7)):
                v[a] = (v[a] + v[b] + word) & MASK
                v[d] = rotated(v[d] ^ v[a], first)
                v[c] = (v[c] + v[d]) & MASK
                v[b] = rotated(v[b] ^ v[c], second)
        words = [words[i] for i in PERMUTATION]
    return tuple(v[i] ^ v[i + 8] for i in range(8))


def chunk(key: Words, data: bytes, index: int, flags: int) -> Node:
    chaining, start = key, CHUNK_START
    while len(data) > BLOCK:
        chaining = compress(chaining, data[:BLOCK], BLOCK, index, flags | start)
        data, start = data[BLOCK:], 0
    return Node(chaining, data, index, flags | start | CHUNK_END)


def tree(key: Words, data: bytes, index: int, flags: int) -> Node:
    if len(data) <= CHUNK:
        return chunk(key, data, index, flags)
    # The left side is the largest complete tree that leaves something for the right side.
    left_chunks = 1 << ((len(data) - 1) // CHUNK).bit_length() - 1
    cut = left_chunks * CHUNK
    left = tree(key, data[:cut], index, flags).finish()
    right = tree(key, data[cut:], index + left_chunks, flags).finish()
    return Node(key, struct.pack("<16I", *left, *right), 0, flags | PARENT)


def blake3(data: bytes, key: bytes | None = None) -> bytes:
    """Returns the digest of 32 bytes, keyed if there is a key of 32 bytes."""
    words = IV if key is None else struct.unpack("<8I", key)
    flags = 0 if key is None else KEYED
    return struct.pack("<8I", *tree(words, data, 0, flags).finish(ROOT))
