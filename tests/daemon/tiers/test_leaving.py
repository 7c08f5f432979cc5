"""Copies of the blocks of segments that are reused next."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvtier_daemon.catalog import Catalog, SessionId
from kvtier_daemon.catalog.policy import make
from kvtier_daemon.codec.encryption import FrameCipher
from kvtier_daemon.tiers.cold.leaving import LeavingSegment
from kvtier_daemon.tiers.cold.mover import Mover
from kvtier_daemon.tiers.cold.segment_log import Stage
from kvtier_kernels import Store, xxh3_128
from support.cold_bench import BLOCK, SPACE, SPEC, Bench, key, run
from support.specs import pattern

SLOTS, BLOCKS = 64, 12
CIPHER = FrameCipher.of([bytes([1]) * 32], "t")
KEYS = b"".join(key(number) for number in range(1, BLOCKS + 1))


def content(number: int) -> bytes:
    half = BLOCK // 2
    return pattern(key(number), half) + pattern(key(number + 1000), half)


class Tenant:
    """A tenant with a sealed segment that has `BLOCKS` blocks, which are not in memory."""

    def __init__(self, folder: Path, codec: str, encrypted: bool) -> None:
        self.bench = Bench([folder], encrypted=encrypted)
        self.catalog = Catalog(Store(), make("lru"))
        self.catalog.add_extent(SLOTS * BLOCK, bytearray(8 * SLOTS * BLOCK // 4096))
        self.mover = Mover(
            "t", self.catalog, self.bench.tier, SLOTS * BLOCK, through=True, codec=codec,
            cipher=(lambda: CIPHER) if encrypted else lambda: None,
        )  # fmt: skip
        self.mover.extents.append(self.bench.extent)
        self.space = self.catalog.spaces.open(SPACE, SPEC, SessionId(1))

    async def fill(self) -> LeavingSegment:
        me, catalog, mover = SessionId(1), self.catalog, self.mover
        await self.bench.recover()
        granted = catalog.reserve(me, self.space, 0, 0, b"", KEYS)
        for number in range(BLOCKS):
            offset = int.from_bytes(granted.slots[24 * number + 8 : 24 * number + 16], "little")
            self.bench.slot(offset // BLOCK)[:] = content(number + 1)
        sums = b"".join(xxh3_128(content(number + 1)) for number in range(BLOCKS))
        mover.writes.saved(catalog.commit(me, granted.lease, 0, BLOCKS, sums))
        self.moving = asyncio.create_task(mover.run())
        await until(lambda: mover.counts["written"] == BLOCKS)
        catalog.reserve(me, self.space, 0, 0, b"", b"".join(map(key, range(900, 900 + SLOTS))))
        (store,) = [one.stores["t"] for one in self.bench.tier.directories.attached]
        segment = store.log.open
        assert segment is not None and segment.head is not None
        store.seal()
        await until(lambda: segment.stage is Stage.SEALED)
        return LeavingSegment(mover.leaving, store, segment, segment.head)

    async def close(self) -> None:
        self.moving.cancel()
        await asyncio.gather(self.moving, return_exceptions=True)
        await self.bench.tier.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def with_tenant(
    folder: Path, check: Callable[[Tenant, LeavingSegment], Awaitable[None]], codec: str = "raw",
    encrypted: bool = False,
) -> None:  # fmt: skip
    async def checked() -> None:
        tenant = Tenant(folder, codec, encrypted)
        leaving = await tenant.fill()
        await check(tenant, leaving)
        await tenant.close()

    run(checked())


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("codec", ["raw", "r32", "zstd"])
def test_a_copy_has_the_bytes_and_the_checksum_of_the_save(
    tmp_path: Path, codec: str, encrypted: bool
) -> None:
    async def check(tenant: Tenant, leaving: LeavingSegment) -> None:
        ids = array("I", leaving.ids(False))
        assert len(ids) == BLOCKS and leaving.ids(True) == b""
        codecs = set(tenant.catalog.blocks.store.frames(ids.tobytes())[0][12::16])
        assert len(codecs) == 1 and (codecs == {0}) is (codec == "raw" and not encrypted)
        for at in range(0, BLOCKS, 4):
            plans = leaving.plans(ids[at : at + 4].tobytes())
            copies = await leaving.read(plans)
            assert copies.keys() == set(ids[at : at + 4])
            for number, (block, checksum) in copies.items():
                saved = content(int.from_bytes(plans[number].identity.key, "big"))
                assert bytes(block) == saved and checksum == xxh3_128(saved)
        assert tenant.catalog.promotions.reading == 0

    with_tenant(tmp_path, check, codec, encrypted)


def test_blocks_that_were_forgotten_since_they_were_listed_have_no_plan(tmp_path: Path) -> None:
    async def check(tenant: Tenant, leaving: LeavingSegment) -> None:
        ids = leaving.ids(False)
        assert tenant.catalog.forget(tenant.space, KEYS[: 3 * 32]) == 3
        assert len(leaving.plans(ids)) == BLOCKS - 3

    with_tenant(tmp_path, check)


def test_a_block_that_is_forgotten_during_the_read_is_left_out(tmp_path: Path) -> None:
    async def check(tenant: Tenant, leaving: LeavingSegment) -> None:
        ids = leaving.ids(False)
        plans = leaving.plans(ids)
        reading = asyncio.create_task(leaving.read(plans))
        await asyncio.sleep(0)
        assert tenant.catalog.forget(tenant.space, KEYS[: 3 * 32]) == 3
        left = {bytes(plans[one].identity.key) for one in await reading}
        assert left == {key(number) for number in range(4, BLOCKS + 1)}
        # Those that were forgotten before are not read.
        read, handed = tenant.bench.tier.reader.read, []
        tenant.bench.tier.reader.read = (  # type: ignore[method-assign]
            lambda blocks, done, urgent=True: (handed.extend(blocks), read(blocks, done, urgent))[1]
        )
        assert (await leaving.read(plans)).keys() == {one.id for one in handed}
        assert len(handed) == BLOCKS - 3

    with_tenant(tmp_path, check)


def test_nothing_is_read_of_a_segment_that_is_being_reused(tmp_path: Path) -> None:
    async def check(tenant: Tenant, leaving: LeavingSegment) -> None:
        plans = leaving.plans(leaving.ids(False))
        assert len(plans) == BLOCKS
        tenant.mover.reclaimer.reclaim(leaving._store, reclaimed(leaving))
        assert await leaving.read(plans) == {}
        assert leaving.plans(array("I", plans).tobytes()) == {}
        await until(
            lambda: (
                not leaving.is_there and not tenant.catalog.blocks.store.counts()["framed_blocks"]
            )
        )

    with_tenant(tmp_path, check)


def reclaimed(leaving: LeavingSegment) -> object:
    segment = leaving._store.log.reclaim()
    assert segment is leaving._segment
    return segment


def test_an_id_that_names_another_block_meanwhile_is_left_out(tmp_path: Path) -> None:
    async def check(tenant: Tenant, leaving: LeavingSegment) -> None:
        ids = array("I", leaving.ids(False))
        plans = leaving.plans(ids.tobytes())
        plans[ids[0]], plans[ids[1]] = plans[ids[1]], plans[ids[0]]
        assert (await leaving.read(plans)).keys() == set(ids[2:])

    with_tenant(tmp_path, check)
