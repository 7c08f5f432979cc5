"""Reads in the daemon: repeated, cancelled, declined and late requests."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import pytest

from daemon.tiers import test_forget
from daemon.tiers.test_forget import ONE, SLOTS, Tenant
from kvtier_daemon.catalog import Found
from kvtier_daemon.catalog.frames import FRAME
from kvtier_daemon.catalog.holds import Request
from kvtier_daemon.planning import PATIENCE_S, read_order, recomputed
from kvtier_daemon.tiers.cold import read_queue
from kvtier_daemon.tiers.cold.frames import Incoming, Read
from support.cold_bench import BLOCK, Bench, run
from support.specs import pattern


def key(number: int) -> bytes:
    """A key. No two are equal in their first 64 bits."""
    return blake2b(number.to_bytes(8), digest_size=32).digest()


def keys(count: int) -> bytes:
    return b"".join(key(number) for number in range(count))


class Held(Tenant):
    """A tenant whose reads reach the disk only when the test releases them."""

    def __init__(self, folder: Path, bench: Bench | None = None) -> None:
        super().__init__(folder, bench=bench)
        self.read: list[Incoming] = []
        self.held: list[tuple[Sequence[Incoming], Read]] = []
        self.reads = self.bench.tier.reads
        self.to_disk, self.bench.tier.reader.read = self.bench.tier.reader.read, self.hold  # type: ignore[method-assign]

    def hold(self, blocks: Sequence[Incoming], done: Read, urgent: bool = True) -> None:
        self.read += blocks
        self.held.append((blocks, done))

    async def submit_reads(self) -> None:
        while self.held or self.catalog.promotions.reading:
            for blocks, done in self.held:
                self.to_disk(blocks, done)
            self.held.clear()
            await asyncio.sleep(0.001)

    async def turn(self) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def end(self) -> None:
        await self.submit_reads()
        await asyncio.sleep(0)
        assert not any(one.reading for one in self.bench.tier.table.segments), (
            "a segment is held for ever"
        )
        assert self.running is not None
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.bench.tier.close()


@pytest.fixture(autouse=True)
def _few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_order, "WINDOW_S", 0.0)
    monkeypatch.setattr(test_forget, "key", key)


def test_a_cancelled_request_leaves_no_read_and_no_slot(tmp_path: Path) -> None:
    async def goes() -> None:
        tenant = Held(tmp_path)
        await tenant.on_disk_alone(24)
        for how in ("cancelled", "session"):
            before = len(tenant.read)
            asked = tenant.mover.reads.promote(tenant.space, keys(24), 24, request=(7, how))
            assert (asked[0], asked[2]) == (24, "unknown")
            await tenant.turn()
            begun = len(tenant.read) - before
            assert 0 < begun < 24
            if how == "cancelled":
                tenant.mover.pending.cancel((7, how))
            else:
                tenant.mover.pending.session_ended(7)
            assert tenant.catalog.promotions.reading == begun
            await tenant.submit_reads()
            assert len(tenant.read) - before == begun, "others were read all the same"
            assert tenant.catalog.match(tenant.space, keys(24)).ready == begun
            granted = tenant.catalog.reserve(
                ONE, tenant.space, 0, 0, b"", b"".join(key(1000 + at) for at in range(SLOTS))
            )
            tenant.catalog.abort(ONE, granted.lease)
            assert granted.outcomes.count(0) == SLOTS, "a slot is missing"
        await tenant.end()

    run(goes())


def test_a_declined_request_starts_no_read_and_takes_no_slot(tmp_path: Path) -> None:
    async def beaten() -> None:
        tenant = Held(tmp_path)
        await tenant.on_disk_alone(20)
        evicted = dict(tenant.catalog.blocks.evicted)
        for again in (0, 1):
            asked = tenant.mover.reads.promote(
                tenant.space, keys(20), 20, request=(1, 1), recompute_s=20 * BLOCK / 1e12
            )
            assert asked == (0, 0.0, "slower"), again
        assert tenant.mover.reads.verdicts["slower"] == 1
        await tenant.turn()
        assert (tenant.read, tenant.catalog.promotions.reading) == ([], 0)
        assert dict(tenant.catalog.blocks.evicted) == evicted
        await tenant.end()

    run(beaten())


def test_blocks_declined_twice_are_promoted_in_the_background(tmp_path: Path) -> None:
    """A save of these blocks finds them on disk, and makes no copy in memory."""

    async def again() -> None:
        tenant = Held(tmp_path)
        await tenant.on_disk_alone(20)
        granted = tenant.catalog.reserve(ONE, tenant.space, 0, 0, b"", keys(20))
        assert granted.lease == 0, "it is there already"
        tenant.mover.reads.recomputes(1, tenant.space, keys(20), 0, 12)
        assert tenant.catalog.promotions.reading == 0, "once is not enough"
        tenant.mover.reads.recomputes(2, tenant.space, keys(20), 2, 18)
        assert tenant.catalog.promotions.reading == 12
        link = tenant.bench.first.disk.link
        assert tenant.reads.planner.order.may_write(link), "others wait for none of it"
        await tenant.submit_reads()
        assert tenant.catalog.match(tenant.space, keys(20)) == Found(12, 8)
        tenant.mover.reads.recomputes(1, tenant.space, keys(20), 12, 8)
        tenant.mover.pending.session_ended(1)
        assert tenant.catalog.promotions.reading == 0, "who asked is gone, and it was not begun"
        await tenant.end()

    run(again())


@pytest.mark.parametrize(
    "used, begun", [(0, [0, 4, 0, 2, 2]), (1, [0, 4, 8, 0, 2]), (4, [0, 4, 20, 20, 20])]
)
def test_prefetches_of_recomputed_blocks_end_if_clients_use_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: int, begun: list[int]
) -> None:
    """The blocks are evicted after each prefetch. A client has used some of the first four."""
    monkeypatch.setattr(recomputed, "TRIAL_BLOCKS", 4)
    monkeypatch.setattr(recomputed, "RETRY", 1 / 8)
    monkeypatch.setattr(recomputed, "LEAST_BLOCKS", 64)

    async def again() -> None:
        tenant = Held(tmp_path)
        catalog, space = tenant.catalog, tenant.space
        await tenant.on_disk_alone(20)
        found = []
        for at in range(5):
            tenant.mover.reads.recomputes(1, space, keys(20), 0, 20)
            found.append(catalog.promotions.reading)
            await tenant.submit_reads()
            if found[-1] and used and (at == 1 or used == 4):
                lease = catalog.load(ONE, space, keys(used), 1.0, [0], 0.0).lease
                catalog.release(ONE, lease, nbytes=used * BLOCK)
            others = b"".join(key(1000 + other) for other in range(SLOTS))
            catalog.abort(ONE, catalog.reserve(ONE, space, 0, 0, b"", others).lease)
        assert found == begun
        await tenant.end()

    run(again())


def test_background_promotions_leave_room_for_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def room() -> None:
        monkeypatch.setattr(recomputed, "LIMIT_BYTES", 1)
        tenant = Held(tmp_path)
        await tenant.on_disk_alone(24)
        assert tenant.mover.reads.promote(tenant.space, keys(6), 6, request=(1, 1))[0] == 6
        for _ in range(3):
            tenant.mover.reads.recomputes(2, tenant.space, keys(24), 6, 18)
            assert tenant.catalog.promotions.reading <= recomputed.LEAST_BLOCKS < 24
        assert tenant.catalog.promotions.reading == recomputed.LEAST_BLOCKS
        await tenant.end()

    run(room())


def test_requests_for_the_same_blocks_share_reads(tmp_path: Path) -> None:
    async def share() -> None:
        tenant = Held(tmp_path)
        await tenant.on_disk_alone(20)
        for request in ((1, 1), (1, 1), (2, 1), (3, 5)):
            assert tenant.mover.reads.promote(tenant.space, keys(20), 20, request=request)[0] == 20
        await tenant.turn()
        tenant.mover.pending.cancel((1, 1))
        tenant.mover.pending.session_ended(3)
        await tenant.submit_reads()
        assert len(tenant.read) == len({block.id for block in tenant.read}) == 20
        assert tenant.catalog.match(tenant.space, keys(20)).ready == 20
        for number in range(20):
            (lease,) = tenant.catalog.load(ONE, tenant.space, keys(number + 1), 1.0, [0], 0.0).parts
            (_, _, offset, _) = list(struct.iter_unpack("<IIQQ", lease.slots))[-1]
            assert bytes(tenant.bench.slot(offset // BLOCK)) == pattern(key(number), BLOCK)
        await tenant.end()

    run(share())


def test_a_late_request_is_given_up_with_the_reason_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def late() -> None:
        tenant = Held(tmp_path)
        await tenant.on_disk_alone(24)
        planner, now = tenant.reads.planner, [tenant.reads.planner._clock()]
        monkeypatch.setattr(planner, "_clock", lambda: now[0])
        assert tenant.mover.reads.promote(tenant.space, keys(24), 24, request=(1, 1))[0] == 24
        await tenant.turn()
        begun = len(tenant.read)
        assert 0 < begun < 24
        now[0] += PATIENCE_S + 0.01
        tenant.reads.pending.expire()
        assert tenant.catalog.promotions.reading == begun
        assert tenant.mover.counts["not_read"] == 24 - begun
        assert tenant.mover.reads.promote(tenant.space, keys(24), 24, request=(1, 1))[2] == "late"
        await tenant.end()

    run(late())


@pytest.mark.parametrize("how", ["cancelled", "session", "late"])
def test_many_blocks_are_queued_and_returned_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Other clients are served in between, and a session that ends meanwhile leaves no reads."""
    monkeypatch.setattr(read_queue, "ADD_BLOCKS", 3)
    monkeypatch.setattr(read_queue, "GIVE_BACK_BLOCKS", 4)
    monkeypatch.setattr(read_queue, "READ_BLOCKS", 0)  # no read begins

    async def many(turns: int) -> None:
        folder = tmp_path / str(turns)
        folder.mkdir()
        tenant = Held(folder)
        await tenant.on_disk_alone(24)
        planner, segments = tenant.reads.planner, tenant.bench.tier.table.segments
        link = tenant.bench.first.disk.link
        link.wrote(1 << 30)  # writes have used their share
        assert tenant.mover.reads.promote(tenant.space, keys(24), 24, request=(7, 1))[0] == 24
        assert planner.eta_s((7, 1)) == pytest.approx(24 * BLOCK / read_order.GUESS_BYTES_S)
        # Another request waits for the same blocks, and must be informed of each of them.
        assert tenant.mover.reads.promote(tenant.space, keys(24), 24, request=(8, 1))[0] == 24
        assert len(planner.order) == 3
        for turn in range(turns):
            assert len(planner.order) <= 3 * (turn + 1)
            await asyncio.sleep(0)
        assert sum(segment.reading for segment in segments) == 24, "a segment may go"
        if turns > 20:
            assert (len(planner.order), planner.order.waits) == (24, 48)
        for request in ((8, 1), (7, 1)):
            if how == "cancelled":
                tenant.mover.pending.cancel(request)
            elif how == "session":
                tenant.mover.pending.session_ended(request[0])
        if how == "late":
            now = planner._clock() + PATIENCE_S + 0.01
            monkeypatch.setattr(planner, "_clock", lambda: now)
            tenant.reads.pending.expire()
        left = tenant.catalog.promotions.reading
        assert left >= 24 - 4 - 4
        while tenant.catalog.promotions.reading:
            await asyncio.sleep(0)
            assert left - tenant.catalog.promotions.reading <= 4 + 4
            left = tenant.catalog.promotions.reading
        assert (len(planner.order), planner.order.waits, tenant.reads._waiting) == (0, 0, {})
        assert planner.order.may_write(link), "nobody waits"
        assert sum(segment.reading for segment in segments) == 0
        assert tenant.mover.counts["not_read"] == 24
        assert tenant.catalog.match(tenant.space, keys(24)) == Found(0, 24)
        await tenant.end()

    for turns in (0, 2, 5, 30):
        run(many(turns))


def test_the_end_of_a_session_does_not_affect_another_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both requests wait for more blocks than are added or returned in one step."""
    monkeypatch.setattr(read_queue, "ADD_BLOCKS", 3)
    monkeypatch.setattr(read_queue, "GIVE_BACK_BLOCKS", 4)
    monkeypatch.setattr(read_queue, "READ_BLOCKS", 0)  # no read begins

    async def both() -> None:
        bench = Bench([tmp_path], tenants=("t", "u"))
        goes, stays = Held(tmp_path, bench), Tenant(tmp_path, "u", bench)
        two: list[Tenant] = [goes, stays]
        for tenant in two:
            await tenant.on_disk_alone(24)
        for session, tenant in enumerate(two):
            assert (
                tenant.mover.reads.promote(tenant.space, keys(24), 24, request=(session, 1))[0]
                == 24
            )
        goes.mover.pending.session_ended(0)
        while sum(tenant.mover.counts["not_read"] for tenant in two) < 24:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert (goes.mover.counts["not_read"], stays.mover.counts["not_read"]) == (24, 0)
        assert stays.catalog.promotions.reading == 24
        monkeypatch.setattr(read_queue, "READ_BLOCKS", 32)
        goes.reads.pump(bench.first.disk)
        while stays.catalog.promotions.reading:
            await goes.submit_reads()
            await asyncio.sleep(0)
        assert stays.catalog.match(stays.space, keys(24)).ready == 24
        assert stays.running is not None
        stays.running.cancel()
        await goes.end()

    run(both())


@pytest.mark.parametrize("how", ["cancelled", "off"])
def test_an_error_while_returning_a_block_is_counted_and_the_others_are_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(read_queue, "GIVE_BACK_BLOCKS", 4)
    monkeypatch.setattr(read_queue, "READ_BLOCKS", 0)  # no read begins

    async def bugs() -> None:
        tenant = Held(tmp_path)
        await tenant.on_disk_alone(24)
        plain, returned, failures = tenant.mover.reads._have_read, list[int](), list[str]()

        def have_read(blocks: Sequence[Incoming], code: int, waited: Sequence[Request]) -> None:
            returned.extend(block.id for block in blocks)
            if len(returned) in (1, 6, 7):
                raise RuntimeError("planted")
            plain(blocks, code, waited)

        monkeypatch.setattr(tenant.mover.reads, "_have_read", have_read)
        tenant.bench.loop.set_exception_handler(lambda _, said: failures.append(said["message"]))
        assert tenant.mover.reads.promote(tenant.space, keys(24), 24, request=(1, 1))[0] == 24
        if how == "off":
            tenant.bench.first.disk.reads.give_up("the test says so")
            monkeypatch.setattr(read_queue, "READ_BLOCKS", 32)
            tenant.reads.pump(tenant.bench.first.disk)
        else:
            tenant.mover.pending.cancel((1, 1))
        for _ in range(40):
            await asyncio.sleep(0)
        assert len(set(returned)) == len(returned) == 24
        assert [text.partition(" reads")[0].split()[-1] for text in failures] == ["1", "2"]
        assert tenant.mover.counts["not_read"] == tenant.catalog.promotions.reading + 18 == 21
        assert tenant.reads._waiting == {}
        monkeypatch.setattr(tenant.catalog.promotions, "reading", 0)
        await tenant.end()

    run(bugs())


def test_writes_wait_while_a_request_waits_for_reads(tmp_path: Path) -> None:
    async def wait() -> None:
        tenant = Held(tmp_path)
        await tenant.on_disk_alone(20)
        link = tenant.bench.first.disk.link
        link.wrote(1 << 30)  # writes have used their share
        assert tenant.mover.reads.promote(tenant.space, keys(20), 20, request=(1, 1))[0] == 20
        await tenant.turn()
        written = tenant.mover.counts["written"]
        writer, checks = tenant.bench.tier.writer, []
        may_write = writer.may_write
        writer.may_write = lambda: checks.append(1) or may_write()  # type: ignore[method-assign, func-returns-value]
        tenant.save(5000)
        async with asyncio.timeout(60):
            while len(checks) < 6:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert tenant.mover.counts["written"] == written
        await tenant.submit_reads()
        await tenant.on_disk(written + 1)
        await tenant.end()

    run(wait())


def test_a_disk_that_is_off_returns_its_queued_reads(tmp_path: Path) -> None:
    async def off() -> None:
        tenant = Held(tmp_path)
        await tenant.on_disk_alone(20)
        assert tenant.mover.reads.promote(tenant.space, keys(20), 20, request=(1, 1))[0] == 20
        tenant.bench.first.disk.reads.give_up("the test says so")
        async with asyncio.timeout(60):
            while tenant.catalog.promotions.reading:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert tenant.read == []
        assert len(tenant.reads.planner.order) == 0
        await tenant.end()

    run(off())


@pytest.mark.parametrize("sizes", [(4096,) * 4, (4096, 8192, 100, 7), ()])
def test_bytes_to_read_are_summed_for_equal_and_different_sizes(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    async def summed() -> None:
        tenant = Held(tmp_path)
        await tenant.on_disk_alone(20)
        used = [one.number for one in tenant.bench.tier.table.segments if one.head][:2]
        assert len(used) == 2
        frames = b"".join(
            FRAME.pack(used[at % 2], at, nbytes, 0, 1, 0) for at, nbytes in enumerate(sizes)
        )
        link = tenant.bench.first.disk.link
        assert tenant.reads.bytes_of(frames) == ({link: sum(sizes)} if sizes else {})
        await tenant.end()

    run(summed())
