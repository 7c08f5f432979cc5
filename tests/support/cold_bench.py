"""A cold tier without a catalog, for tests of its files."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import NamedTuple

from kvtier_daemon.catalog.frames import FramedBlocks, StoredFrame
from kvtier_daemon.codec.choice import Choice
from kvtier_daemon.tiers.cold.attached import AttachedDirectory, StoreOptions, open_directory
from kvtier_daemon.tiers.cold.directory import ColdDirectory
from kvtier_daemon.tiers.cold.frames import Decoding, Incoming, Outgoing
from kvtier_daemon.tiers.cold.recovery import Recovered
from kvtier_daemon.tiers.cold.segment import decode_entries
from kvtier_daemon.tiers.cold.segment_log import Segment
from kvtier_daemon.tiers.cold.segment_store import SegmentStore
from kvtier_daemon.tiers.cold.tier import ColdTier
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


def open_directories(
    folders: list[Path], size: int, state: Path | None = None
) -> list[ColdDirectory]:
    """Open directories that share `size`."""
    return [open_directory(folder, size // len(folders), state=state) for folder in folders]


class Landed(NamedTuple):
    """A block on disk."""

    id: int
    segment: int
    page: int
    header_pages: int
    payload_bytes: int
    digest: bytes
    codec: int


def landed(blocks: FramedBlocks) -> list[Landed]:
    found = []
    for number, packed, digest in blocks:
        at = StoredFrame.unpack(packed)
        found.append(
            Landed(
                number, at.segment, at.page, at.header_pages, at.payload_bytes, digest, at.codec
            )
        )  # fmt: skip
    return found


class Bench:
    """A cold tier with an arena of 64 blocks for writes and reads. It has no catalog and makes no
    decisions."""

    def __init__(
        self, folders: list[Path], size: int = SIZE, engine: str = "auto", share: float = 1.0,
        codec: str = "raw", tenants: tuple[str, ...] = ("t",), state: Path | None = None,
        encrypted: bool = False,
    ) -> None:  # fmt: skip
        self.loop = asyncio.get_running_loop()
        self.on_disk: dict[int, Landed] = {}
        self.lost: list[int] = []
        self.codes: dict[int, int] = {}
        self.pages: dict[int, list[int]] = {}
        shares = dict.fromkeys(tenants, share / len(tenants))
        options = StoreOptions(size, SEGMENT, shares, engine, encrypted=encrypted)
        directories = open_directories(folders, size, state)
        self.tier = ColdTier(self.loop, directories, options, self.leave)
        self.choice = Choice(self.tier.coding.rates, codec)  # for every second block
        self.memory, self.extent = self.arena()

    def arena(self) -> tuple[Mapping, int]:
        """Memory for 64 blocks, and its extent number."""
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
        """Write blocks, 64 at a time. Returns the ids whose write failed."""
        failed: list[int] = []
        todo = list(numbers)
        while todo:
            some, waiting = todo[:64], asyncio.Event()
            for place, number in enumerate(some):
                self.slot(place)[:] = pattern(key(number), BLOCK)
            going = [
                Outgoing(
                    number, SPACE, SPEC, 0, 0, key(number), key(number - 1) if number else b"", b"",
                    BLOCK, self.extent, place * BLOCK,
                )
                for place, number in enumerate(some)
            ]  # fmt: skip

            if self.choice.encodes(SPACE, SPEC, BLOCK):
                coded = await self.tier.coding.encode(going[1::2], self.choice, [1e9])
                going[1::2] = coded

            def wrote(written: FramedBlocks, bad: list[int], done: asyncio.Event = waiting) -> None:
                self.on_disk.update({one.id: one for one in landed(written)})
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
        """The block's bytes, or the errno of the read."""
        one, waiting = self.on_disk[number], asyncio.Event()

        def over(block: Incoming, code: int) -> None:
            self.codes[block.id] = code
            waiting.set()

        self.slot(0)[:] = bytes(BLOCK)
        self.tier.reader.read(
            [
                Incoming(
                    number, one.segment, one.page, one.header_pages, one.payload_bytes, one.digest,
                    self.extent, 0, one.payload_bytes,
                    Decoding(one.codec, SPEC, BLOCK) if one.codec else None,
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
    """The disk space of all files in the directory, as the file system counts it."""
    nbytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a thread of the tier removes segments
            nbytes += path.lstat().st_blocks * 512
    return nbytes


def run(work: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work, 60)

    asyncio.run(bounded())


def kill(bench: Bench) -> None:
    """Stop without writing footers, the index or anything else, as a kill does."""
    for one in bench.tier.directories.attached:
        one.descriptions.close()
        one.disk.stop(5)
        one.directory.close()


def files_of(folder: Path) -> list[Path]:
    return sorted((folder / "segments" / "t").iterdir())
