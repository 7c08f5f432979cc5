"""Blocks that are stored with a loss: a read returns what the reference codec returns, and the loss
happens only once."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from daemon.tiers.test_encoded import BLOCK, ONE, SLOTS, SPECS, Tenant, key, seal, spoil, until
from kvtier import KvSpec, frame
from kvtier.frame import (
    CACHEGEN,
    E5M2,
    ECSQ,
    FP8,
    LOSSY,
    MXFP4,
    NVFP4,
    PAGE,
    Q2,
    Q4,
    Q8,
    RAW,
    Frame,
)
from kvtier_daemon.codec.losses import NAMES, Losses
from kvtier_daemon.codec.profile import Profile
from kvtier_daemon.tiers.cold.directory import ColdDirectory
from kvtier_daemon.tiers.cold.mover import Mover
from kvtier_daemon.tiers.cold.scrub import Scrubber
from kvtier_daemon.tiers.cold.segment import FooterEntry, decode_entries, encode_row
from kvtier_daemon.tools.fsck import check
from kvtier_kernels import xxh3_128
from models.codecs import step_of
from support.cold_bench import SIZE, run
from support.effort import effort
from support.losses_by_twins import STEP, block_of, floats_of, once_lost, profile_of
from support.specs import spec_of

SPEC = SPECS["bfloat16"]
NUMBERS = {
    "q8": Q8, "q4": Q4, "q2": Q2, "fp8": FP8, "e5m2": E5M2, "nvfp4": NVFP4, "mxfp4": MXFP4,
    "ecsq": ECSQ, "cachegen": CACHEGEN,
}  # fmt: skip
ERROR = {
    "q8": 0.006,
    "q4": 0.11,
    "q2": 0.5,
    "fp8": 0.03,
    "e5m2": 0.07,
    "nvfp4": 0.13,
    "mxfp4": 0.15,
}  # root mean square of normal values
CODEC, FLAGS = 3, 5  # indices into a frame's fields


class Lossy(Tenant):
    """A tenant whose spaces have the identity that includes their codec's loss."""

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
        self.bench.first.stores["t"]._reclaim = self.mover.reclaimer.reclaim
        identity = self.losses.identity(spec, "t")
        self.spaces = {"bfloat16": self.catalog.spaces.open(identity, spec, ONE)}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    def put(self, first: int, count: int, digests: bool = False) -> None:
        """Save a chain of `count` blocks that begins with block `first`."""
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
        self.mover.writes.saved(ids)

    def lost(self, number: int, first: int = 0) -> bytes:
        """The expected bytes of this block, in a chain that begins with block `first`."""
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
        """Reclaim the oldest segment."""
        shelf = self.bench.first.stores["t"]
        first = shelf.log.reclaim()
        assert first is not None
        self.mover.reclaimer.reclaim(shelf, first)
        await until(lambda: first not in shelf.log.others)


HALF = effort(4, 16, 16)  # of the blocks


@pytest.mark.sampled(4)
@pytest.mark.parametrize("asked", NAMES)
def test_a_read_returns_what_the_reference_codec_returns(tmp_path: Path, asked: str) -> None:
    async def work() -> None:
        async with Lossy(tmp_path, asked) as tenant:
            for first in (0, HALF):
                tenant.put(first, HALF, digests=first > 0)
                await tenant.on_disk(first + HALF)
            number = NUMBERS[asked.partition("-")[0]]
            assert {tenant.frame(at)[CODEC] for at in range(2 * HALF)} == {number}
            assert {tenant.frame(at)[FLAGS] for at in range(2 * HALF)} == {LOSSY}
            used = tenant.catalog.counts()["framed_bytes"]
            assert used == sum(4096 + frame.pages(tenant.frame(at)[2]) for at in range(2 * HALF))
            assert used < 2 * HALF * BLOCK * 0.63, "capacity is charged by the bytes in use"
            header = tenant.header(3)
            assert (header.codec, header.lossy_generation) == (number, 1)
            assert header.profile == (profile_of(SPEC).name if "-" in asked else bytes(16))
            assert header.raw_digest == xxh3_128(tenant.lost(3))
            for at in range(2 * HALF):
                found = await tenant.bring("bfloat16", at)
                assert found == tenant.lost(at, at // HALF * HALF), at
                _within(asked, block_of(key(at), SPEC), found)
        async with Lossy(tmp_path, asked) as again:
            assert again.catalog.counts()["framed_blocks"] == 2 * HALF
            for at in range(2 * HALF):
                assert await again.bring("bfloat16", at) == tenant.lost(at, at // HALF * HALF), at
        volume = ColdDirectory(tmp_path, SIZE)
        report = check(volume)
        assert report.is_clean and report.frames == 2 * HALF
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


def test_pages_with_heads_in_sequence_are_encoded_correctly(tmp_path: Path) -> None:
    """As in an engine's pages: the same values in another order."""
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


def test_an_opaque_space_is_stored_without_loss(tmp_path: Path) -> None:
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
def test_another_configuration_finds_no_block_and_the_first_one_finds_all(
    tmp_path: Path, other: str
) -> None:
    """A client with one configuration never receives blocks of the other."""
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
def test_a_frame_with_a_loss_other_than_its_identity_is_a_miss(tmp_path: Path, what: str) -> None:
    """No space with this identity contains such frames, so the frame is damaged."""

    async def work() -> None:
        async with Lossy(tmp_path, "ecsq-mid") as tenant:
            tenant.put(0, 2)
            await tenant.on_disk(2)
            asked = {"none": "", "other codec": "q8", "other level": "ecsq-lo"}.get(
                what, "ecsq-mid"
            )
            losses = Losses([(SPEC.model, asked)], [profile_of(SPEC, step=what == "other profile")])
            loss = losses.find(SPEC)
            known = tenant.mover.choice._known(tenant.spaces["bfloat16"].identity, SPEC)
            known.loss = None if isinstance(loss, str) else loss
            assert await tenant.bring("bfloat16", 0) is None
            assert tenant.mover.counts["spoilt"] == 1

    run(work())


def test_a_promoted_lossy_block_is_not_written_again_while_its_frame_exists(tmp_path: Path) -> None:
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


def test_a_promoted_lossy_block_is_written_raw_after_its_frame_was_freed(tmp_path: Path) -> None:
    """Its frame is freed while the block is in memory: the block is written raw, and keeps its loss
    mark permanently."""

    async def work() -> None:
        async with Lossy(tmp_path, "q4") as tenant:
            tenant.put(0, 2)
            await tenant.on_disk(2)
            await seal(tenant)
            assert await tenant.bring("bfloat16", 0) == tenant.lost(0)
            again = tenant.ids["bfloat16", 0]
            assert tenant.catalog.blocks.store.lossy(again) == again
            tenant.mover._budget.second_chance_bytes = 0
            await tenant.leave()
            tenant.mover.writes.saved(again)
            await until(lambda: tenant.mover.counts["written"] == 3)
            await until(lambda: not tenant.catalog.blocks.store.dirty(again))
            codec, flags = tenant.frame(0)[CODEC], tenant.frame(0)[FLAGS]
            assert (codec, flags) == (RAW, LOSSY)
            assert tenant.header(0).lossy_generation == 1
            assert await tenant.bring("bfloat16", 0) == tenant.lost(0)
            assert tenant.catalog.blocks.store.lossy(again) == again
            # The same holds after its new frame is copied by a second chance.
            await seal(tenant)
            tenant.catalog.load(ONE, tenant.spaces["bfloat16"], key(0), 1.0, [], 0.0)
            tenant.evict_all()
            tenant.mover._budget.second_chance_bytes = 1 << 30
            await tenant.leave()
            await until(lambda: tenant.mover.counts["written_again"] == 1)
            assert (tenant.frame(0)[CODEC], tenant.frame(0)[FLAGS]) == (RAW, LOSSY)
            assert tenant.header(0).lossy_generation == 1
        # The mark is found again after a restart.
        async with Lossy(tmp_path, "q4") as other:
            assert await other.bring("bfloat16", 0) == tenant.lost(0)
            space = other.spaces["bfloat16"]
            ids = other.catalog._store.present(space.index, 0, 0, key(0))
            assert other.catalog.blocks.store.lossy(ids) == ids

    run(work())


def test_a_saved_block_that_was_never_read_from_disk_is_encoded_again(tmp_path: Path) -> None:
    """Its frame is freed before it was read: the copy in memory has no loss yet."""

    async def work() -> None:
        async with Lossy(tmp_path, "q4") as tenant:
            tenant.put(0, 2)
            await tenant.on_disk(2)
            await seal(tenant)
            await tenant.leave()
            tenant.mover.writes.saved(tenant.ids["bfloat16", 0])
            await until(lambda: not tenant.catalog.blocks.store.dirty(tenant.ids["bfloat16", 0]))
            assert tenant.mover.counts["written"] > 2 and tenant.frame(0)[CODEC] == Q4
            assert await tenant.bring("bfloat16", 0) == tenant.lost(0)

    run(work())


def test_a_second_chance_keeps_a_lossy_frame_unchanged(tmp_path: Path) -> None:
    async def work() -> None:
        async with Lossy(tmp_path, "ecsq-mid") as tenant:
            tenant.put(0, 2)
            await tenant.on_disk(2)
            await seal(tenant)
            space = tenant.spaces["bfloat16"]
            tenant.catalog.load(ONE, space, key(1), 1.0, [], 0.0)
            tenant.evict_all()
            before, header = tenant.frame(1), tenant.header(1)
            tenant.mover._budget.second_chance_bytes = 1 << 30
            await tenant.leave()
            assert tenant.mover.counts["written_again"] == 1
            after = tenant.frame(1)
            assert after[:2] != before[:2] and after[2:] == before[2:]
            copied = tenant.header(1)
            for name in ("raw_digest", "payload_digest", "profile", "lossy_generation", "entries"):
                assert getattr(copied, name) == getattr(header, name)
            assert await tenant.bring("bfloat16", 1) == tenant.lost(1)

    run(work())


def test_a_block_with_a_wrong_digest_is_not_encoded_with_loss(tmp_path: Path) -> None:
    """A lossy frame has no checksum of the original bytes, so the writer's digest is checked before the
    encoding."""

    async def work() -> None:
        async with Lossy(tmp_path, "q8") as tenant:
            space = tenant.spaces["bfloat16"]
            granted = tenant.catalog.reserve(ONE, space, 0, 0, b"", key(0))
            (_, _, offset, _) = struct.unpack("<IIQQ", granted.slots)
            tenant.bench.slot(offset // BLOCK)[:] = block_of(key(0), SPEC)
            tenant.mover.writes.saved(
                tenant.catalog.commit(ONE, granted.lease, 0, 1, b"another digest..")
            )
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


def test_a_space_keeps_its_loss_when_the_settings_change(tmp_path: Path) -> None:
    """The identity includes the loss, so a change of the settings does not affect an open space."""

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


def test_frames_of_an_unsealed_segment_keep_their_loss_mark() -> None:
    """Without a footer, the frames themselves contain the mark."""
    name = frame.Identity(bytes(32), 0, 0, key(1))
    for generation in (0, 1):
        one = Frame(
            name, b"", RAW, PAGE, PAGE, 1, 1, bytes(16), bytes(16), (), lossy_generation=generation
        )
        row = encode_row(FooterEntry.of(one, 3), 0)
        (listed,) = decode_entries([(bytes(32), SPEC)], row)
        assert listed == FooterEntry.of(one, 3) and listed.lossy == (generation > 0)


def test_blocks_of_a_long_chain_are_encoded_with_their_position(tmp_path: Path) -> None:
    """A wrong position would give intact frames with wrong values, so the test reads the position in
    the payload."""

    async def work() -> None:
        async with Lossy(tmp_path, "ecsq-mid") as tenant:
            tenant.put(0, 40)
            await tenant.on_disk(40)
            for number in (0, 17, 39):
                segment, page, nbytes, _, header_pages, *_ = tenant.frame(number)
                payload = tenant.read(segment, (page + header_pages) * PAGE, nbytes)
                # K is the first part of a payload.
                assert struct.unpack_from("<I", payload, 4) == (16 * number,)

    run(work())


def test_the_event_loop_runs_during_lossy_encoding(tmp_path: Path) -> None:
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
