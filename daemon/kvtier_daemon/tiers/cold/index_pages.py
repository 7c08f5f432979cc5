"""Whether the pages of an LMDB file fit together. LMDB trusts them: where the length of a key, or a number in
the list of free pages, is wrong, a later write fails, ends the process, or overwrites a page that is in use.

    page   number 8 | 2 | kind 2 | lower 2, upper 2 | offsets of nodes, 2 each | free | nodes
           of an overflow: number 8 | 2 | kind 2 | pages 4 | value
    node   4 | flags 2 | bytes of the key 2 | key | value
           The first 4 are the bytes of the value in a leaf; the first 6 the number of a page in a branch.
    tree   40 | root 8
           A first page has two at 40, of the list of free pages and of the tables' names, then the last
           page's number 8 and the transaction's 8.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from mmap import mmap
from typing import Final

META: Final = struct.Struct("<16xII16xI36xQ40xQQQ")
PAGE: Final = struct.Struct("<QHHHH")
NODE: Final = struct.Struct("<HHHH")
NUMBER: Final = struct.Struct("<Q")
MAGIC: Final = 0xBEEFC0DE
FORMAT: Final = 1
FIRST_PAGES: Final = 2
NONE: Final = (1 << 64) - 1
BRANCH, LEAF, OVERFLOW = 1, 2, 4  # kinds of pages
BIG, TREE = 1, 2  # a node's value is an overflow's number; is a table's tree
TREE_BYTES: Final = 48
LONGEST_KEY: Final = 511


class _TornError(Exception):
    """Something does not fit."""


def fit_together(text: bytes | mmap) -> bool:
    """Whether each page belongs to one tree or is free, once, and nodes fill what their pages have. True too
    for a file that LMDB refuses, or knows by another format."""
    metas = [META.unpack_from(text, at) for at in _first_pages(text)]
    if len(metas) < FIRST_PAGES or any(meta[:2] != (MAGIC, FORMAT) for meta in metas):
        return True
    _, _, page_bytes, free, tables, last, _ = max(metas, key=lambda meta: meta[-1])
    if page_bytes == 0 or (last + 1) * page_bytes > len(text):
        return False
    pages = _Pages(text, page_bytes, last)
    try:
        listed = [number for value in pages.tree(free) for number in _numbers(value)]
        for _ in pages.tree(tables):
            pass
        for number in listed:
            pages.take(number)
    except (_TornError, struct.error):
        return False
    return len(pages.left) == 0


def _first_pages(text: bytes | mmap) -> list[int]:
    if len(text) < META.size:
        return []
    page_bytes = META.unpack_from(text)[2]
    return [at for at in (0, page_bytes) if len(text) >= at + META.size]


def _numbers(value: bytes) -> list[int]:
    """Of free pages: how many, and each."""
    count = len(value) // NUMBER.size
    numbers = list(struct.unpack(f"<{count}Q", value[: count * NUMBER.size]))
    if not numbers or numbers[0] >= count:
        raise _TornError
    return numbers[1 : 1 + numbers[0]]


class _Pages:
    def __init__(self, text: bytes | mmap, page_bytes: int, last: int) -> None:
        self._text = text
        self._page_bytes = page_bytes
        self.left = set(range(FIRST_PAGES, last + 1))

    def take(self, number: int) -> None:
        if number not in self.left:
            raise _TornError
        self.left.remove(number)

    def tree(self, root: int) -> Iterator[bytes]:
        """The values of a tree, and of those whose roots are values of it."""
        waiting = [] if root == NONE else [root]
        while waiting:
            number = waiting.pop()
            self.take(number)
            start = number * self._page_bytes
            named, _, kind, lower, upper = PAGE.unpack_from(self._text, start)
            if named != number or kind not in (BRANCH, LEAF):
                raise _TornError
            for node in self._nodes(start, lower, upper):
                low, high, flags, key_bytes = NODE.unpack_from(self._text, node)
                value_at = node + NODE.size + key_bytes
                size = low | high << 16
                if kind == BRANCH:
                    waiting.append(size | flags << 32)
                    self._ends(node, value_at)
                elif flags == BIG:
                    (place,) = NUMBER.unpack_from(self._text, value_at)
                    self._ends(node, value_at + NUMBER.size)
                    yield self._overflow(place, size)
                else:
                    self._ends(node, value_at + size)
                    value = self._text[value_at : value_at + size]
                    if flags == TREE and size == TREE_BYTES:
                        (below,) = NUMBER.unpack_from(value, size - NUMBER.size)
                        waiting += [below] if below != NONE else []
                    elif flags:
                        raise _TornError
                    else:
                        yield value
            if self._end != start + self._page_bytes:
                raise _TornError

    def _nodes(self, start: int, lower: int, upper: int) -> Iterator[int]:
        """Where they lie, in the order of their places. Each has to begin where the one before it ends."""
        if not PAGE.size < lower <= upper <= self._page_bytes or lower % 2:
            raise _TornError
        places = struct.unpack_from(f"<{(lower - PAGE.size) // 2}H", self._text, start + PAGE.size)
        self._end = start + upper
        for place in sorted(places):
            if start + place != self._end:
                raise _TornError
            yield start + place

    def _ends(self, node: int, end: int) -> None:
        key_bytes = NODE.unpack_from(self._text, node)[3]
        if key_bytes > LONGEST_KEY:
            raise _TornError
        self._end = end + end % 2

    def _overflow(self, number: int, size: int) -> bytes:
        start = number * self._page_bytes
        count = -(-(PAGE.size + size) // self._page_bytes)
        for page in range(number, number + count):
            self.take(page)
        named, _, kind, low, high = PAGE.unpack_from(self._text, start)
        if named != number or kind != OVERFLOW or low | high << 16 != count:
            raise _TornError
        return self._text[start + PAGE.size : start + PAGE.size + size]
