"""Blocks that are stored with a loss: what comes back is what the twin makes of them, and only once."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from daemon.tiers.test_cold import SIZE, run
from daemon.tiers.test_encoded import BLOCK, ONE, SLOTS, SPECS, Tenant, key, seal, spoil, until
from kvtier import KvSpec
from kvtier_daemon.codec import frame
from kvtier_daemon.codec.base import CACHEGEN, ECSQ, FP8, Q2, Q4, Q8
from kvtier_daemon.codec.frame import LOSSY, PAGE, RAW, Frame
from kvtier_daemon.codec.losses import NAMES, Losses
from kvtier_daemon.codec.profile import Profile, step_of
from kvtier_daemon.tiers.cold.directory import ColdDirectory
from kvtier_daemon.tiers.cold.mover import Mover
from kvtier_daemon.tiers.cold.scrub import Scrubber
from kvtier_daemon.tiers.cold.segment import FooterEntry, decode_entries, encode_row
from kvtier_daemon.tools.fsck import check
from kvtier_kernels import xxh3_128
from support.losses_by_twins import STEP, block_of, floats_of, once_lost, profile_of
from support.specs import spec_of

SPEC = SPECS["bfloat16"]
NUMBERS = {"q8": Q8, "q4": Q4, "q2": Q2, "fp8": FP8, "ecsq": ECSQ, "cachegen": CACHEGEN}
ERROR = {
    "q8": 0.006,
    "q4": 0.11,
    "q2": 0.5,
    "fp8": 0.03,
}  # root of the mean square, of normal values
CODEC, FLAGS = 3, 5  # of a frame's fields


class Lossy(Tenant):
    """One whose spaces have the identity that their loss gives them."""

    def __init__(
        self, folder: Path, asked: str, profiles: Sequence[Profile] = (), spec: KvSpec = SPEC
    ) -> None:
        super().__init__(folder, "auto")
        self.asked, self.spec = asked, spec
        by_model = [(spec.model, asked)] if asked else []
        self.losses = Losses(by_model, profiles or [profile_of(spec)])
        self.mover = Mover(
            "t", self.catalog, self.bench.tier, SLOTS * BLOCK, through=True, codecs=by_model,
            losses=self.losses,
        )  # fmt: skip
        self.bench.first.stores["t"]._reclaim = self.mover.reclaim
        identity = self.losses.identity(spec, "t")
        self.spaces = {"bfloat16": self.catalog.open(identity, spec, ONE)}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    def put(self, first: int, count: int, digests: bool = False) -> None:
        """Save a chain of these."""
        space = self.spaces["bfloat16"]
        keys = b"".join(map(key, range(first, first + count)))
        granted = self.catalog.reserve(ONE, space, 0, 0, b"", keys)
        sums = b""
        for at, (_, _, offset, _) in enumerate(struct.iter_unpack("<IIQQ", granted.slots)):
            block = block_of(key(first + at), space.spec)
            self.bench.slot(offset // BLOCK)[:] = block
            sums += xxh3_128(block)
        ids = self.catalog.commit(ONE, granted.lease, 0, count, sums if digests else b"")
        for at in range(count):
            self.ids["bfloat16", first + at] = ids[4 * at : 4 * at + 4]
        self.mover.saved(ids)

    def lost(self, number: int, first: int = 0) -> bytes:
        """What this block of a chain that begins with the first is to be."""
        position = (number - first) * self.spec.block_tokens
        return once_lost(self.asked, self.spec, position, block_of(key(number), self.spec))

    def frame(self, number: int) -> tuple[int, ...]:
        (one,) = self.frames(self.ids["bfloat16", number])
        return one

    def header(self, number: int) -> Frame:
        segment, page, _, _, header_pages, *_ = self.frame(number)
        return frame.decode(self.read(segment, page * PAGE, header_pages * PAGE))

    def read(self, segment: int, at: int, nbytes: int) -> bytes:
        with Path(self.bench.tier.table.segments[segment].path).open("rb") as file:
            return os.pread(file.fileno(), nbytes, at)

    async def leave(self) -> None:
        """The oldest segment is used again."""
        shelf = self.bench.first.stores["t"]
        first = shelf.log.reclaim()
        assert first is not None
        self.mover.reclaim(shelf, first)
        await until(lambda: first not in shelf.log.others)


@pytest.mark.parametrize("asked", NAMES)
def test_what_comes_back_is_what_the_twin_makes_of_it(tmp_path: Path, asked: str) -> None:
    async def work() -> None:
        async with Lossy(tmp_path, asked) as tenant:
            for first in (0, 16):
                tenant.put(first, 16, digests=first > 0)
                await tenant.on_disk(first + 16)
            number = NUMBERS[asked.partition("-")[0]]
            assert {tenant.frame(at)[CODEC] for at in range(32)} == {number}
            assert {tenant.frame(at)[FLAGS] for at in range(32)} == {LOSSY}
            used = tenant.catalog.counts()["framed_bytes"]
            assert used == sum(4096 + frame.pages(tenant.frame(at)[2]) for at in range(32))
            assert used < 32 * BLOCK * 0.63, "capacity is charged by what is there"
            header = tenant.header(3)
            assert (header.codec, header.lossy_generation) == (number, 1)
            assert header.profile == (profile_of(SPEC).name if "-" in asked else bytes(16))
            assert header.raw_digest == xxh3_128(tenant.lost(3))
            for at in range(32):
                found = await tenant.bring("bfloat16", at)
                assert found == tenant.lost(at, at // 16 * 16), at
                _within(asked, block_of(key(at), SPEC), found)
        async with Lossy(tmp_path, asked) as again:
            assert again.catalog.counts()["framed_blocks"] == 32
            for at in range(32):
                assert await again.bring("bfloat16", at) == tenant.lost(at, at // 16 * 16), at
        volume = ColdDirectory(tmp_path, SIZE)
        report = check(volume)
        assert report.is_clean and report.frames == 32
        volume.close()

    run(work())


def _within(asked: str, block: bytes, found: bytes) -> None:
    error = floats_of(found) - floats_of(block)
    rounding = np.abs(floats_of(block)).max() / 256
    if asked in ERROR:
        assert 0 < np.sqrt(np.mean(error**2)) < ERROR[asked]
    elif asked.startswith("ecsq"):
        half = step_of(STEP[asked.partition("-")[2]]) / 2
        assert 0 < np.abs(error).max() <= 2**0.5 * half + rounding
    else:
        half = step_of(max(136, STEP[asked.partition("-")[2]])) / 2
        assert 0 < np.abs(error).max() <= half + rounding


def test_heads_that_lie_one_after_the_other_are_known(tmp_path: Path) -> None:
    """As in an engine's pages: the same values, in another order."""
    spec = spec_of("heads first", layout="layer,part,head,token,dim")

    async def work() -> None:
        async with Lossy(tmp_path, "ecsq-mid", spec=spec) as tenant:
            tenant.put(0, 2)
            await tenant.on_disk(2)
            group = spec.cache_groups[0]
            shape = (group.layers * 2, group.kv_heads, spec.block_tokens, group.head_dim)
            for number in range(2):
                saved = np.frombuffer(block_of(key(number), spec), "<u2").reshape(shape)
                other = np.ascontiguousarray(saved.transpose(0, 2, 1, 3)).tobytes()
                plain = spec_of("heads first")
                lost = np.frombuffer(once_lost("ecsq-mid", plain, 16 * number, other), "<u2")
                wanted = lost.reshape(shape[0], shape[2], shape[1], shape[3]).transpose(0, 2, 1, 3)
                assert (
                    await tenant.bring("bfloat16", number) == np.ascontiguousarray(wanted).tobytes()
                )

    run(work())


def test_an_opaque_space_stays_as_it_is(tmp_path: Path) -> None:
    spec = spec_of("nobody knows", layout="somehow")

    async def work() -> None:
        async with Lossy(tmp_path, "q8", spec=spec) as tenant:
            tenant.put(0, 4)
            await tenant.on_disk(4)
            for number in range(4):
                assert tenant.frame(number)[FLAGS] == 0
                assert await tenant.bring("bfloat16", number) == block_of(key(number), spec)
            (said,) = tenant.mover.choice.report()
            assert (said["asked"], said["why"]) == ("q8", "opaque")

    run(work())


@pytest.mark.parametrize("other", ["", "q4", "ecsq-mid", "profile"])
def test_another_configuration_finds_nothing_and_the_first_one_all_of_it(
    tmp_path: Path, other: str
) -> None:
    """Neither is ever given what the other has stored."""
    first = "ecsq-lo" if other == "profile" else "q8"
    profiles = [profile_of(SPEC, step=1)] if other == "profile" else []
    asked = "ecsq-lo" if other == "profile" else other

    async def work() -> None:
        async with Lossy(tmp_path, first) as tenant:
            tenant.put(0, 3)
            await tenant.on_disk(3)
        async with Lossy(tmp_path, asked, profiles) as second:
            for number in range(3):
                assert await second.bring("bfloat16", number) is None
            second.put(0, 3)
            await second.on_disk(6)
            for number in range(3):
                found = await second.bring("bfloat16", number)
                block = block_of(key(number), SPEC)
                wanted = (
                    once_lost(asked, SPEC, 16 * number, block, bool(profiles)) if asked else block
                )
                assert found == wanted and found != tenant.lost(number)
        async with Lossy(tmp_path, first) as again:
            for number in range(3):
                assert await again.bring("bfloat16", number) == again.lost(number)

    run(work())


@pytest.mark.parametrize("what", ["none", "other codec", "other profile", "other level"])
def test_a_frame_that_its_identity_does_not_promise_is_a_miss(tmp_path: Path, what: str) -> None:
    """As no such space has such frames: it is not what was written."""

    async def work() -> None:
        async with Lossy(tmp_path, "ecsq-mid") as tenant:
            tenant.put(0, 2)
            await tenant.on_disk(2)
            asked = {"none": "", "other codec": "q8", "other level": "ecsq-lo"}.get(
                what, "ecsq-mid"
            )
            losses = Losses([(SPEC.model, asked)], [profile_of(SPEC, step=what == "other profile")])
            loss = losses.look(SPEC)
            known = tenant.mover.choice._known(tenant.spaces["bfloat16"].identity, SPEC)
            known.loss = None if isinstance(loss, str) else loss
            assert await tenant.bring("bfloat16", 0) is None
            assert tenant.mover.counts["spoilt"] == 1

    run(work())


def test_what_a_lossy_frame_gave_is_not_written_again_while_that_lasts(tmp_path: Path) -> None:
    async def work() -> None:
        async with Lossy(tmp_path, "q4") as tenant:
            tenant.put(0, 4)
            await tenant.on_disk(4)
            before = [tenant.frame(number) for number in range(4)]
            for _ in range(2):
                for number in range(4):
                    assert await tenant.bring("bfloat16", number) == tenant.lost(number)
            assert tenant.mover.counts["written"] == 4
            assert [tenant.frame(number) for number in range(4)] == before

    run(work())


def test_what_a_lossy_frame_gave_is_never_encoded_so_again(tmp_path: Path) -> None:
    """Its frame goes while it is in memory: it is written again as it is, and stays what it is for good."""

    async def work() -> None:
        async with Lossy(tmp_path, "q4") as tenant:
            tenant.put(0, 2)
            await tenant.on_disk(2)
            await seal(tenant)
            assert await tenant.bring("bfloat16", 0) == tenant.lost(0)
            again = tenant.ids["bfloat16", 0]
            assert tenant.catalog.segments.lossy(again) == again
            tenant.mover._reclaimer.second_chance_bytes = 0
            await tenant.leave()
            tenant.mover.saved(again)
            await until(lambda: tenant.mover.counts["written"] == 3)
            await until(lambda: not tenant.catalog.demotions.dirty(again))
            codec, flags = tenant.frame(0)[CODEC], tenant.frame(0)[FLAGS]
            assert (codec, flags) == (RAW, LOSSY)
            assert tenant.header(0).lossy_generation == 1
            assert await tenant.bring("bfloat16", 0) == tenant.lost(0)
            assert tenant.catalog.segments.lossy(again) == again
            # And where its new frame is brought away.
            await seal(tenant)
            tenant.catalog.load(ONE, tenant.spaces["bfloat16"], key(0), 1.0, [], 0.0, True, False)
            tenant.evict_all()
            tenant.mover._reclaimer.second_chance_bytes = 1 << 30
            await tenant.leave()
            await until(lambda: tenant.mover.counts["written_again"] == 1)
            assert (tenant.frame(0)[CODEC], tenant.frame(0)[FLAGS]) == (RAW, LOSSY)
            assert tenant.header(0).lossy_generation == 1
        # After a restart it is known, too.
        async with Lossy(tmp_path, "q4") as other:
            assert await other.bring("bfloat16", 0) == tenant.lost(0)
            space = other.spaces["bfloat16"]
            ids = other.catalog._store.present(space.index, 0, 0, key(0))
            assert other.catalog.segments.lossy(ids) == ids

    run(work())


def test_what_was_saved_and_is_in_memory_yet_may_be_encoded_again(tmp_path: Path) -> None:
    """Its frame goes before anybody has read that: what is in memory has lost nothing."""

    async def work() -> None:
        async with Lossy(tmp_path, "q4") as tenant:
            tenant.put(0, 2)
            await tenant.on_disk(2)
            await seal(tenant)
            await tenant.leave()
            tenant.mover.saved(tenant.ids["bfloat16", 0])
            await until(lambda: not tenant.catalog.demotions.dirty(tenant.ids["bfloat16", 0]))
            assert tenant.mover.counts["written"] > 2 and tenant.frame(0)[CODEC] == Q4
            assert await tenant.bring("bfloat16", 0) == tenant.lost(0)

    run(work())


def test_what_is_brought_away_stays_as_it_is(tmp_path: Path) -> None:
    async def work() -> None:
        async with Lossy(tmp_path, "ecsq-mid") as tenant:
            tenant.put(0, 2)
            await tenant.on_disk(2)
            await seal(tenant)
            space = tenant.spaces["bfloat16"]
            tenant.catalog.load(ONE, space, key(1), 1.0, [], 0.0, True, False)
            tenant.evict_all()
            before, header = tenant.frame(1), tenant.header(1)
            tenant.mover._reclaimer.second_chance_bytes = 1 << 30
            await tenant.leave()
            assert tenant.mover.counts["written_again"] == 1
            after = tenant.frame(1)
            assert after[:2] != before[:2] and after[2:] == before[2:]
            copied = tenant.header(1)
            for name in ("raw_digest", "payload_digest", "profile", "lossy_generation", "entries"):
                assert getattr(copied, name) == getattr(header, name)
            assert await tenant.bring("bfloat16", 1) == tenant.lost(1)

    run(work())


def test_a_block_that_is_not_what_its_writer_says_is_no_sound_frame(tmp_path: Path) -> None:
    """Its checksum would go with what is lost, so it is looked at before."""

    async def work() -> None:
        async with Lossy(tmp_path, "q8") as tenant:
            space = tenant.spaces["bfloat16"]
            granted = tenant.catalog.reserve(ONE, space, 0, 0, b"", key(0))
            (_, _, offset, _) = struct.unpack("<IIQQ", granted.slots)
            tenant.bench.slot(offset // BLOCK)[:] = block_of(key(0), SPEC)
            tenant.mover.saved(tenant.catalog.commit(ONE, granted.lease, 0, 1, b"another digest.."))
            await tenant.on_disk(1)
            assert await tenant.bring("bfloat16", 0) is None
            assert tenant.mover.counts["spoilt"] == 1

    run(work())


@pytest.mark.parametrize("inside", [-PAGE + 100, -PAGE + 230, 0, 9_000], ids=str)
@pytest.mark.parametrize("asked", ["q8", "ecsq-mid", "cachegen-mid"])
def test_damage_is_a_miss(tmp_path: Path, asked: str, inside: int) -> None:
    async def work() -> None:
        async with Lossy(tmp_path, asked) as tenant:
            tenant.put(0, 3)
            await tenant.on_disk(3)
            tenant.evict_all()
            spoil(tenant, 1, inside)
            assert await tenant.bring("bfloat16", 1) is None
            assert tenant.mover.counts["spoilt"] == 1
            for number in (0, 2):
                assert await tenant.bring("bfloat16", number) == tenant.lost(number)

    run(work())


def test_a_space_keeps_its_loss_for_as_long_as_the_daemon_lives(tmp_path: Path) -> None:
    """As long as its identity says so: what else is asked for meanwhile takes nothing away."""

    async def work() -> None:
        async with Lossy(tmp_path, "ecsq-mid") as tenant:
            tenant.put(0, 1)
            await tenant.on_disk(1)
            choice = tenant.mover.choice
            for by_model in ([], [(SPEC.model, "q8")], [(SPEC.model, "raw")]):
                choice._by_model = by_model
                choice._spaces.clear()
                assert await tenant.bring("bfloat16", 0) == tenant.lost(0)
            tenant.put(1, 1)
            await tenant.on_disk(2)
            assert await tenant.bring("bfloat16", 1) == tenant.lost(1, 1)
            assert tenant.mover.counts["spoilt"] == 0

    run(work())


def test_a_scrub_sees_damage_without_a_profile(tmp_path: Path) -> None:
    async def work() -> None:
        async with Lossy(tmp_path, "ecsq-mid") as tenant:
            tenant.put(0, 3)
            await tenant.on_disk(3)
        async with Lossy(tmp_path, "") as other:
            await until(lambda: other.bench.first.stores["t"].log.open is not None)
            await seal(other)
            scrub = Scrubber(other.bench.tier, {"t": other.catalog}, lambda *_: None, 1 << 30)
            await scrub.round()
            assert (scrub.counts["frames"], scrub.counts["damaged"]) == (3, 0)
            segments = range(len(other.bench.tier.table.segments))
            ids = b"".join(map(other.catalog.segments.in_segment, segments))
            other.ids["bfloat16", 1] = ids[4:8]
            spoil(other, 1, 100)
            await scrub.round()
            assert scrub.counts["damaged"] == 1

    run(work())


def test_what_a_kill_left_is_known_as_what_it_is() -> None:
    """Without a footer the frames themselves say it."""
    name = frame.Identity(bytes(32), 0, 0, key(1))
    for generation in (0, 1):
        one = Frame(
            name, b"", RAW, PAGE, PAGE, 1, 1, bytes(16), bytes(16), (), lossy_generation=generation
        )
        row = encode_row(FooterEntry.of(one, 3), 0)
        (listed,) = decode_entries([(bytes(32), SPEC)], row)
        assert listed == FooterEntry.of(one, 3) and listed.lossy == (generation > 0)


def test_blocks_of_a_long_chain_are_told_where_they_lie(tmp_path: Path) -> None:
    """Of a wrong position the bytes would be sound, and more: it is looked at."""

    async def work() -> None:
        async with Lossy(tmp_path, "ecsq-mid") as tenant:
            tenant.put(0, 40)
            await tenant.on_disk(40)
            for number in (0, 17, 39):
                segment, page, nbytes, _, header_pages, *_ = tenant.frame(number)
                payload = tenant.read(segment, (page + header_pages) * PAGE, nbytes)
                # The first part of it is K.
                assert struct.unpack_from("<I", payload, 4) == (16 * number,)

    run(work())


def test_the_loop_goes_on_while_blocks_lose(tmp_path: Path) -> None:
    async def work() -> None:
        async with Lossy(tmp_path, "cachegen-mid") as tenant:
            turns = 0

            async def turn() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            turning = asyncio.create_task(turn())
            tenant.put(0, 48)
            before = turns
            await tenant.on_disk(48)
            assert turns > before + 100
            turning.cancel()

    run(work())
