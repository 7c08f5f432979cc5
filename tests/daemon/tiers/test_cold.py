"""The cold tier's files: what is written is read, found again after a start, and stays within its cap."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest

from kvtier.errors import TierError
from kvtier_daemon.codec.choice import Choice
from kvtier_daemon.codec.frame import PAGE
from kvtier_daemon.tiers.cold.attached import AttachedDirectory, StoreOptions, open_directory
from kvtier_daemon.tiers.cold.directory import ColdDirectory
from kvtier_daemon.tiers.cold.recovery import Recovered, recover
from kvtier_daemon.tiers.cold.segment import decode_entries
from kvtier_daemon.tiers.cold.segment_log import Segment
from kvtier_daemon.tiers.cold.segment_store import SegmentStore
from kvtier_daemon.tiers.cold.tier import ColdTier
from kvtier_daemon.tiers.cold.transfers import Decoding, Incoming, Landed, Outgoing
from kvtier_kernels import Mapping, views
from support.specs import pattern, spec_of

MIB = 1 << 20
SPEC = spec_of("cold")
BLOCK = SPEC.block_bytes  # 64 KiB
SPACE = b"s" * 32
SEGMENT = MIB
SIZE = 48 * MIB


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def open_directories(folders: list[Path], size: int) -> list[ColdDirectory]:
    """Open directories that share `size`."""
    return [open_directory(folder, size // len(folders)) for folder in folders]


class Bench:
    """A cold tier with some memory to write from and read to, and nothing that decides."""

    def __init__(
        self, folders: list[Path], size: int = SIZE, engine: str = "auto", share: float = 1.0,
        codec: str = "raw", tenants: tuple[str, ...] = ("t",),
    ) -> None:  # fmt: skip
        self.loop = asyncio.get_running_loop()
        self.on_disk: dict[int, Landed] = {}
        self.lost: list[int] = []
        self.codes: dict[int, int] = {}
        self.pages: dict[int, list[int]] = {}
        shares = dict.fromkeys(tenants, share / len(tenants))
        options = StoreOptions(SEGMENT, shares, engine)
        self.tier = ColdTier(self.loop, open_directories(folders, size), options, self.leave)
        self.choice = Choice(self.tier.coding.rates, codec)  # of every other block
        self.memory, self.extent = self.arena()

    def arena(self) -> tuple[Mapping, int]:
        """Memory for 64 blocks, and its number."""
        fd = os.memfd_create("arena")
        os.ftruncate(fd, 64 * BLOCK)
        memory = Mapping(fd, 64 * BLOCK, True)
        os.close(fd)
        return memory, self.tier.memory.register(memory)

    @property
    def first(self) -> AttachedDirectory:
        return self.tier.directories.attached[0]

    def leave(self, shelf: SegmentStore, segment: Segment) -> None:
        for number in [n for n, one in self.on_disk.items() if one.segment == segment.number]:
            del self.on_disk[number]
            self.lost.append(number)
        self.loop.call_soon(shelf.release_segment, segment)

    def slot(self, place: int, memory: Mapping | None = None) -> memoryview:
        slots = b"".join(
            (0).to_bytes(4, "little") + bytes(4) + (place * BLOCK).to_bytes(8, "little") + bytes(8)
            for _ in range(1)
        )
        return views([memory or self.memory], slots, BLOCK, True)[0]

    async def write(self, numbers: range) -> list[int]:
        """Write blocks 64 at a time; those that failed."""
        failed: list[int] = []
        todo = list(numbers)
        while todo:
            some, waiting = todo[:64], asyncio.Event()
            for place, number in enumerate(some):
                self.slot(place)[:] = pattern(key(number), BLOCK)
            going = [
                Outgoing(
                    number, SPACE, SPEC, 0, 0, key(number), key(number - 1) if number else b"", b"",
                    self.extent, place * BLOCK,
                )
                for place, number in enumerate(some)
            ]  # fmt: skip

            if self.choice.encodes(SPACE, SPEC, BLOCK):
                coded = await self.tier.coding.encode(going[1::2], self.choice, [1e9])
                going[1::2] = coded

            def wrote(landed: list[Landed], bad: list[int], done: asyncio.Event = waiting) -> None:
                self.on_disk.update({one.id: one for one in landed})
                failed.extend(bad)
                done.set()

            count = self.tier.writer.write("t", going, wrote)
            todo = todo[count:]
            if count:
                await asyncio.wait_for(waiting.wait(), 20)
            else:
                await asyncio.sleep(0.005)
            for block in going:
                block.release()
        return failed

    async def read(self, number: int) -> bytes | int:
        """The block's bytes, or the errno."""
        one, waiting = self.on_disk[number], asyncio.Event()

        def over(block: Incoming, code: int) -> None:
            self.codes[block.id] = code
            waiting.set()

        self.slot(0)[:] = bytes(BLOCK)
        self.tier.reader.read(
            [
                Incoming(
                    number, one.segment, one.page, one.header_pages, one.payload_bytes, one.digest,
                    self.extent, 0, Decoding(one.codec, SPEC, BLOCK, 0) if one.codec else None,
                )
            ],
            over,
        )  # fmt: skip
        await asyncio.wait_for(waiting.wait(), 20)
        return self.codes[number] or bytes(self.slot(0))

    async def recover(self) -> None:
        async def restored(tenant: str, one: Recovered, segment: int) -> None:
            for row in decode_entries(one.spaces, one.rows):
                number = int.from_bytes(row.identity.key, "big")
                self.on_disk[number] = Landed(
                    number,
                    segment,
                    row.page,
                    row.header_pages,
                    row.payload_bytes,
                    row.payload_digest,
                    row.codec,
                )

        await self.tier.directories.recover(restored)
        await self.tier.writer.describe("t", SPACE, SPEC)

    async def all_read(self) -> None:
        for number in self.on_disk:
            assert await self.read(number) == pattern(key(number), BLOCK), number


def used(folder: Path) -> int:
    """What everything in the directory takes, as the file system counts."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def run(work: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work, 60)

    asyncio.run(bounded())


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def test_blocks_come_back_as_they_were_written(tmp_path: Path, engine: str) -> None:
    async def work() -> None:
        bench = Bench([tmp_path], engine=engine)
        await bench.recover()
        assert await bench.write(range(100)) == []
        assert len(bench.on_disk) == 100
        await bench.all_read()
        await bench.tier.close()

    run(work())


def test_a_start_finds_what_was_written(tmp_path: Path) -> None:
    async def first() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        await bench.write(range(100))
        await bench.tier.close()

    async def again(low: int, high: int) -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        assert sorted(bench.on_disk) == list(range(high))
        await bench.all_read()
        await bench.write(range(high, high + 10))
        await bench.tier.close()

    run(first())
    for turn in range(4):
        run(again(0, 100 + 10 * turn))
    assert used(tmp_path) <= SIZE


@pytest.mark.parametrize("disks", [1, 2])
def test_the_cap_holds_and_the_newest_stay(tmp_path: Path, disks: int) -> None:
    folders = [tmp_path / str(n) for n in range(disks)]
    for folder in folders:
        folder.mkdir()

    async def work() -> None:
        bench = Bench(folders, SIZE * disks)
        await bench.recover()
        for first in range(0, 1600 * disks, 64):
            await bench.write(range(first, first + 64))
            assert sum(map(used, folders)) <= SIZE * disks
        await bench.all_read()
        assert len(bench.on_disk) * BLOCK > 0.4 * SIZE * disks
        newest = range(1600 * disks - 200, 1600 * disks)
        assert set(newest) <= set(bench.on_disk)
        await bench.tier.close()

    run(work())
    assert sum(map(used, folders)) <= SIZE * disks


def test_damage_is_told_and_what_is_whole_still_read(tmp_path: Path) -> None:
    async def work() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        await bench.write(range(40))
        one, other = bench.on_disk[7], bench.on_disk[8]
        fd = bench.tier.table.segments[one.segment].fd
        path = bench.tier.table.segments[one.segment].path
        plain = os.open(path, os.O_RDWR)
        os.pwrite(plain, bytes(64), (one.page + one.header_pages) * PAGE + 1000)
        text = os.pread(plain, (other.header_pages * PAGE + BLOCK), bench.on_disk[9].page * PAGE)
        os.pwrite(plain, text, other.page * PAGE)
        os.fsync(plain)
        os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_DONTNEED)
        assert fd != plain
        os.close(plain)
        assert await bench.read(7) == errno.EBADMSG
        assert await bench.read(8) == errno.EBADMSG
        assert await bench.read(9) == pattern(key(9), BLOCK)
        assert bench.tier.reader.is_on and not bench.tier.directories.faults, (
            "damage is no fault of the disk"
        )
        os.truncate(path, PAGE)
        assert await bench.read(9) == errno.ENODATA
        await bench.tier.close()

    run(work())


def test_a_directory_is_one_daemons(tmp_path: Path) -> None:
    async def work() -> None:
        bench = Bench([tmp_path])
        with pytest.raises(TierError, match=f"another daemon, pid {os.getpid()}"):
            Bench([tmp_path])
        await bench.tier.close()
        await Bench([tmp_path]).tier.close()

    run(work())


def test_a_directory_that_is_missing_or_a_cap_that_is_small_is_said(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(TierError, match="create it"):
            Bench([tmp_path / "missing"])
        with pytest.raises(TierError, match="needed"):
            Bench([tmp_path], size=8 * MIB)

    run(work())


def test_what_a_kill_left_open_is_sealed_by_the_next_start(tmp_path: Path) -> None:
    def footers() -> list[bool]:
        found = [recover(path, None, {}) for path in files_of(tmp_path)]
        return [one.sealed for one in found if one.head is not None]

    async def killed() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        await bench.write(range(40))
        kill(bench)

    async def again() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        assert sorted(bench.on_disk) == list(range(40))
        await bench.tier.writer.settled("t")
        await asyncio.sleep(0.1)
        await bench.all_read()
        await bench.tier.close()

    run(killed())
    assert not all(footers())
    run(again())
    assert all(footers())
    run(again())


def kill(bench: Bench) -> None:
    """End as it is."""
    for one in bench.tier.directories.attached:
        one.descriptions.close()
        one.disk.stop(5)
        one.directory.close()


def test_what_was_being_written_at_a_kill_does_not_come_with_what_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames behind one that was not finished: whole, of this epoch, and never said to be there."""

    async def first() -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        await bench.write(range(10))
        one = bench.on_disk[5]
        kill(bench)
        with (tmp_path / "segments" / "t" / "000000").open("r+b") as file:
            file.seek((one.page + one.header_pages) * PAGE)
            file.write(bytes(PAGE))

    async def again(known: list[int], new: range) -> None:
        bench = Bench([tmp_path])
        await bench.recover()
        assert sorted(bench.on_disk) == known
        await bench.write(new)
        if new:
            kill(bench)
        else:
            await bench.tier.close()

    run(first())
    with monkeypatch.context() as early:  # it ends before it has begun another segment
        early.setattr(SegmentStore, "prepare", lambda _: None)
        run(again([0, 1, 2, 3, 4], range(0)))
    run(again([0, 1, 2, 3, 4], range(20, 21)))
    run(again([0, 1, 2, 3, 4, 20], range(0)))


def files_of(folder: Path) -> list[Path]:
    return sorted((folder / "segments" / "t").iterdir())


def test_a_smaller_cap_is_kept_from_the_start(tmp_path: Path) -> None:
    async def work(size: int, low: int) -> int:
        bench = Bench([tmp_path], size=size)
        await bench.recover()
        assert used(tmp_path) <= size
        for first in range(low, low + 1200, 64):
            await bench.write(range(first, first + 64))
            assert used(tmp_path) <= size
        await bench.all_read()
        await bench.tier.close()
        return len(bench.on_disk)

    async def all_of_it() -> None:
        much = await work(SIZE, 0)
        little = await work(SIZE - 12 * MIB, 10_000)
        assert 0 < little < much

    run(all_of_it())
