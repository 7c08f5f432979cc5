"""Blocks that were requested before a restart get their second chance after it. The index stores these
requests only as a hint."""

from __future__ import annotations

import asyncio
import shutil
import struct
from array import array
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from daemon.tiers.test_mover import keys
from daemon.tiers.test_scrub import SAVED, Kept
from kvtier_daemon.catalog import SessionId
from kvtier_daemon.tiers.cold.access_log import KEY, PIECE, TABLE, AccessLog
from kvtier_daemon.tiers.cold.index import Index
from kvtier_daemon.tiers.cold.recovery import Recovered
from kvtier_daemon.tiers.cold.segment_log import Stage
from support.cold_bench import SPACE, Bench, run
from support.specs import spec_of

WANTED = 5  # the first blocks of the chain

Spoil = Callable[[Index], None]


def test_pages_are_found_again_and_a_change_writes_one_piece(tmp_path: Path) -> None:
    many = range(3 * PIECE + 10, 10, -1)
    with closing(Index(tmp_path, 64 << 20)) as index:
        uses = AccessLog(index)
        uses.add(7).extend(many)
        assert (uses.write(2), uses.write(100), uses.write(100)) == (2, 1, 0)
        uses.add(7).append(3)
        uses.add(8).append(1)
        assert uses.write(100) == 2
    with closing(Index(tmp_path, 64 << 20)) as index:
        uses = AccessLog(index)
        uses.load()
        assert uses.pages(7) == array("I", sorted([3, *many])).tobytes()
        uses.add(7).append(5)
        assert uses.write(100) == 1
        uses.drop(8)
    with closing(Index(tmp_path, 64 << 20)) as index:
        assert [KEY.unpack(name) for name, _ in index.entries(TABLE)] == [(7, n) for n in range(4)]
        uses = AccessLog(index)
        uses.load()
        assert uses.pages(7) == array("I", sorted([3, 5, *many])).tobytes()
        assert uses.pages(8) == b""
        uses.keep_only({8})
    with closing(Index(tmp_path, 64 << 20)) as index:
        assert index.entries(TABLE) == []


@pytest.mark.parametrize(
    ("number", "text", "left"),
    [
        (0, b"abc", 0),
        (1, bytes(PIECE * 4 + 4), 1),
        (2, b"", 2),
        (5, struct.pack("<I", 9), 2),
    ],
    ids=["part of a number", "too long", "empty", "not the next"],
)
def test_impossible_pieces_are_dropped_and_later_ones_are_accepted(
    tmp_path: Path, number: int, text: bytes, left: int
) -> None:
    with closing(Index(tmp_path, 64 << 20)) as index:
        uses = AccessLog(index)
        uses.add(7).extend(range(PIECE + 1))
        uses.write(100)
        index.put(TABLE, KEY.pack(7, number), text)
        index.put(TABLE, b"short", b"")
    with closing(Index(tmp_path, 64 << 20)) as index:
        uses = AccessLog(index)
        uses.load()
        assert len(uses.pages(7)) == {0: 0, 1: 4 * PIECE, 2: 4 * PIECE + 4}[left]
        uses.add(7).append(PIECE + 7)
        uses.write(100)
    with closing(Index(tmp_path, 64 << 20)) as index:
        uses = AccessLog(index)
        uses.load()
        assert struct.pack("<I", PIECE + 7) in uses.pages(7)
        assert all(len(name) == KEY.size for name, _ in index.entries(TABLE))


class Again(Kept):
    """A bench that recovers the directory of an earlier one."""

    async def recover(self) -> None:
        async def restored(_: str, one: Recovered, segment: int) -> None:
            for identity, spec, rows in one.parts:
                self.catalog.segments.restore(identity, spec, rows, segment, one.used)

        await self.tier.directories.recover(restored)


async def first_life(folder: Path, copy: Path) -> None:
    """Save blocks, request the first ones, and stop as a kill does."""
    kept = Kept(folder)
    await kept.save()
    space = kept.catalog.spaces.open(SPACE, spec_of("cold"), SessionId(1))
    assert kept.catalog.match(space, keys(0, WANTED)).ready == WANTED
    kept.tier.table.note_access(kept.catalog.segments.take_used(1000))
    assert kept.tier.directories.attached[0].directory.access_log.write(10) == 1
    # Flushed after all others.
    await kept.tier.writer.describe("t", b"other" * 6 + b"ab", spec_of("cold"))
    shutil.copytree(folder, copy)
    await kept.close()


async def second_life(folder: Path) -> int:
    """Reclaim the oldest segment. Returns how many of the requested blocks were still known."""
    kept = Again(folder)
    await kept.save(first=100, known=SAVED)
    shelf = kept.tier.directories.attached[0].stores["t"]
    segment = shelf.log.reclaim()
    assert segment is not None
    epoch = segment.head.epoch if segment.head else 0
    kept.leave(shelf, segment)
    while segment.stage in (Stage.LEAVING, Stage.FREEING):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    space = kept.catalog.spaces.open(SPACE, spec_of("cold"), SessionId(1))
    assert kept.tier.directories.attached[0].directory.access_log.pages(epoch) == b""
    found = kept.catalog.match(space, keys(0, 14))
    await kept.close()
    return found.ready + found.coming


def nothing(_: Index) -> None:
    pass


def garble(index: Index) -> None:
    for name, _ in index.entries(TABLE):
        index.put(TABLE, name, b"\xff" * 11)


def others(index: Index) -> None:
    for name, _ in index.entries(TABLE):
        index.put(TABLE, name, struct.pack("<III", 1 << 31, 3, 4))


def lose(index: Index) -> None:
    for name, _ in index.entries(TABLE):
        index.drop(TABLE, name)


@pytest.mark.parametrize(
    ("spoil", "kept"), [(nothing, WANTED), (garble, 0), (others, 0), (lose, 0)]
)
def test_blocks_requested_before_a_kill_get_a_second_chance_after_it(
    tmp_path: Path, spoil: Spoil, kept: int
) -> None:
    found = -1

    async def work() -> None:
        nonlocal found
        await first_life(tmp_path / "a", tmp_path / "b")
        with closing(Index(tmp_path / "b" / "index", 16 << 20)) as index:
            spoil(index)
        found = await second_life(tmp_path / "b")

    (tmp_path / "a").mkdir()
    run(work())
    assert found == kept


def test_requests_for_blocks_of_removed_segments_are_dropped(tmp_path: Path) -> None:
    async def work() -> None:
        await first_life(tmp_path / "a", tmp_path / "b")
        for path in (tmp_path / "b" / "segments" / "t").iterdir():
            path.unlink()
        bench = Bench([tmp_path / "b"])
        await bench.recover()
        await bench.tier.close()
        with closing(Index(tmp_path / "b" / "index", 16 << 20)) as index:
            assert index.entries(TABLE) == []

    (tmp_path / "a").mkdir()
    run(work())
