"""Damage of an index that LMDB ignores when it opens the file, and that matters when it writes."""

from __future__ import annotations

import random
import select
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kvtier_daemon.tiers.cold.index import Index
from kvtier_daemon.tiers.cold.index_pages import META, fit_together
from support.effort import effort

LIMIT_BYTES = 64 << 20
TABLE = b"segments"


def flushed(index: Index) -> str:
    """Flush. Returns the error, or an empty string if all changes are on disk."""
    index.flush(1)
    select.select([index.event_fd], [], [])
    ((_, failure),) = index.done()
    return failure


def filled(folder: Path, seed: int, rounds: int = 4, each: int = 180) -> bytes:
    """The file of an index after stores and deletes of records of many sizes, some of several pages. Each
    round opens the index, which forks this process."""
    chance = random.Random(seed)
    for _ in range(rounds):
        with closing(Index(folder, LIMIT_BYTES)) as index:
            for _ in range(each):
                key = b"key%04d" % chance.randrange(400)
                if chance.random() < 0.3:
                    index.drop(TABLE, key)
                else:
                    nbytes = chance.choice([0, 1, 40, 500, 2100, 9000])
                    index.put(TABLE, key, chance.randbytes(nbytes))
                if chance.random() < 0.1:
                    assert not flushed(index)
    return (folder / "data.mdb").read_bytes()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
def test_pages_of_an_intact_index_are_consistent(tmp_path: Path, seed: int) -> None:
    assert fit_together(filled(tmp_path, seed, 1 + 3 * seed, 60 * (1 + seed) ** 2))


def test_no_damage_raises_an_exception_in_the_check(tmp_path: Path) -> None:
    """An exception would end the checking process, and the state of the index would be unknown."""
    text = filled(tmp_path, 5, 3, 60)
    chance = random.Random(5)
    for at in (
        *range(160),
        *range(4096, 4256),
        *(chance.randrange(len(text)) for _ in range(effort(1500, 5000, 5000))),
    ):
        for change in (255, 1 << chance.randrange(8)):
            fit_together(text[:at] + bytes([text[at] ^ change]) + text[at + 1 :])
        fit_together(text[:at])


def latest(text: bytes) -> tuple[int, ...]:
    return max((META.unpack_from(text, at) for at in (0, 4096)), key=lambda meta: meta[-1])


def length_of_a_key(text: bytes, chance: random.Random) -> int:
    """The position of a record's key length, in a page that is in use."""
    pages = [at for at in range(8192, len(text), 4096) if text[at + 10 : at + 12] == b"\2\0"]
    while True:
        page = chance.choice(pages)
        (lower,) = struct.unpack_from("<H", text, page + 12)
        (node,) = struct.unpack_from("<H", text, page + chance.randrange(16, lower, 2))
        place = page + node + 6
        bad = text[:place] + bytes([text[place] ^ 255]) + text[place + 1 :]
        if text[place + 2 : place + 5] == b"key" and not fit_together(bad):
            return place


def number_of_a_free_page(text: bytes, chance: random.Random) -> int:
    page = latest(text)[3] * 4096
    assert text[page + 10 : page + 12] == b"\2\0", "the list of free pages has one leaf"
    (node,) = struct.unpack_from("<H", text, page + 16)
    return page + node + 8 + 8 + 8  # after the head of a node, its key, and the count of numbers


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place_of", [length_of_a_key, number_of_a_free_page])
@pytest.mark.parametrize("seed", range(3))
def test_an_index_with_inconsistent_pages_is_replaced(
    tmp_path: Path, place_of: Callable[[bytes, random.Random], int], seed: int
) -> None:
    """Writes to such an index would fail repeatedly, or kill the process."""
    text = filled(tmp_path, seed)
    place = place_of(text, random.Random(seed))
    bad = text[:place] + bytes([text[place] ^ 255]) + text[place + 1 :]
    assert not fit_together(bad)
    (tmp_path / "data.mdb").write_bytes(bad)
    with closing(Index(tmp_path, LIMIT_BYTES)) as index:
        assert index.entries(TABLE) == []
        for number in range(300):
            index.put(TABLE, b"new%04d" % number, bytes(200))
        assert flushed(index) == ""
        assert len(index.entries(TABLE)) == 300
