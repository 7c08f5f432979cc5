"""Encrypted blocks in the cold tier: they are read back, nothing of them is on disk, and changed, moved or
unreadable frames are misses."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon.tiers.test_encoded import BLOCK, SPECS, Tenant, content, seal, until
from kvtier.errors import TierError
from kvtier.frame import ENCRYPTED, HEADER, PAGE
from kvtier_daemon.catalog.frames import StoredFrame
from kvtier_daemon.codec.encryption import FrameCipher
from kvtier_daemon.codec.table import BY_NAME
from kvtier_daemon.tiers.cold import disk, segment_files
from kvtier_daemon.tiers.cold.directory import ColdDirectory
from kvtier_daemon.tiers.cold.recovery import Recovered, recover
from kvtier_daemon.tiers.cold.scrub import Scrubber
from kvtier_daemon.tiers.cold.segment import Head
from kvtier_daemon.tools.fsck import check
from kvtier_kernels import Disk, seal_frame
from support.cold_bench import SEGMENT, kill, run

FIRST, SECOND = b"1" * 32, b"2" * 32
DTYPE = "bfloat16"


def cipher(*keys: bytes, encrypts: bool = True, tenant: str = "t") -> FrameCipher:
    return FrameCipher.of(keys or (FIRST,), tenant, encrypts)


async def started(folder: Path, codec: str = "raw", by: FrameCipher | None = None) -> Tenant:
    tenant = Tenant(folder, codec, cipher=by)
    await tenant.start()
    return tenant


async def saved(tenant: Tenant, count: int, dtype: str = DTYPE, first: int = 0) -> None:
    before = tenant.catalog.counts()["framed_blocks"]
    tenant.save(dtype, first, count)
    await tenant.on_disk(before + count)


def traces(folder: Path, numbers: range, dtype: str = DTYPE) -> list[Path]:
    """The files that contain a piece of one of these blocks."""
    pieces = [content(SPECS[dtype], number)[at : at + 32] for number in numbers for at in (0, 512)]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if any(piece in path.read_bytes() for piece in pieces)]


@pytest.mark.parametrize("codec", ["raw", "r32", "zstd"])
@pytest.mark.parametrize("dtype", [DTYPE, "int8"])
def test_saved_blocks_are_read_back_and_are_not_in_any_file(
    tmp_path: Path, codec: str, dtype: str
) -> None:
    async def work() -> None:
        tenant = await started(tmp_path, codec, cipher())
        for first in (0, 16):
            await saved(tenant, 16, dtype, first)
        assert all(one[3] & ENCRYPTED for one in tenant.frames(b"".join(tenant.ids.values())))
        if dtype == DTYPE:
            stored = {one[3] & ~ENCRYPTED for one in tenant.frames(b"".join(tenant.ids.values()))}
            assert stored == {BY_NAME[codec].number}
        await tenant.same(dtype, 0, 32)
        assert not traces(tmp_path, range(32), dtype)
        await tenant.close()
        again = await started(tmp_path, "raw", cipher())
        assert again.catalog.counts()["framed_blocks"] == 32
        await again.same(dtype, 0, 32)
        await again.close()

    run(work())


@pytest.mark.parametrize(
    ("processors", "plain", "encrypted"), [(1, 1, 1), (2, 1, 2), (4, 2, 2), (16, 4, 4)]
)
def test_a_disk_with_encrypted_frames_has_two_decoders_where_there_are_two_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processors: int, plain: int, encrypted: int
) -> None:
    started_with = []

    def recorded(*args: Any, decoders: int, **more: Any) -> Any:
        started_with.append(decoders)
        return Disk(*args, decoders=decoders, **more)

    async def work(folder: Path, by: FrameCipher | None) -> None:
        tenant = await started(folder, "raw", by)
        await saved(tenant, 4)
        await tenant.same(DTYPE, 0, 4)
        await tenant.close()

    monkeypatch.setattr(disk, "Disk", recorded)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(processors)))
    for name, by in (("plain", None), ("encrypted", cipher())):
        (tmp_path / name).mkdir()
        run(work(tmp_path / name, by))
    assert started_with == [plain, encrypted]


def test_frames_are_found_after_a_kill_and_fsck_finds_them_sound(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = await started(tmp_path, "r32", cipher())
        await saved(tenant, 8)
        tenant.running.cancel()
        kill(tenant.bench)
        again = await started(tmp_path, "raw", cipher())
        await again.same(DTYPE, 0, 8)
        await again.close()
        volume = ColdDirectory(tmp_path, None)
        for keys, unknown in (((), 0), ((SECOND,), 8), ((SECOND, FIRST), 0)):
            report = check(volume, keys=keys)
            assert report.is_clean and report.frames == report.encrypted == 8
            assert report.unknown_keys == unknown
        volume.close()

    run(work())


def test_a_rotated_key_encrypts_and_the_older_ones_decrypt(tmp_path: Path) -> None:
    async def work() -> None:
        for number, keys in enumerate(((FIRST,), (SECOND, FIRST))):
            tenant = await started(tmp_path, "raw", cipher(*keys))
            await saved(tenant, 4, first=4 * number)
            await tenant.same(DTYPE, 0, 4 + 4 * number)
            await tenant.close()
        tenant = await started(tmp_path, "raw", cipher(SECOND))
        assert [await tenant.bring(DTYPE, number) for number in range(4)] == [None] * 4
        await tenant.same(DTYPE, 4, 4)
        assert tenant.mover.counts["unknown_key"] == 4 and not tenant.mover.counts["spoilt"]
        assert not tenant.bench.tier.faults
        await tenant.close()

    run(work())


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_without_keys_encrypted_frames_are_misses(tmp_path: Path, codec: str) -> None:
    async def work() -> None:
        tenant = await started(tmp_path, codec, cipher())
        await saved(tenant, 4)
        await tenant.close()
        tenant = await started(tmp_path)
        assert await tenant.bring(DTYPE, 0) is None
        assert tenant.mover.counts["unknown_key"] == 1
        await tenant.close()

    run(work())


def test_switching_it_on_erases_what_was_not_encrypted(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = await started(tmp_path)
        await saved(tenant, 24)
        await tenant.close()
        assert traces(tmp_path, range(24))
        tenant = await started(tmp_path, "raw", cipher())
        assert not traces(tmp_path, range(24))
        assert not tenant.catalog.counts()["framed_blocks"]
        await saved(tenant, 24)
        await tenant.close()
        tenant = await started(tmp_path, "raw", cipher())
        await tenant.same(DTYPE, 0, 24)  # nothing is erased twice
        await tenant.close()

    run(work())


def test_switching_it_off_leaves_the_frames_readable(tmp_path: Path) -> None:
    """And new frames go to other segments, so that switching it on again loses only these."""

    async def work() -> None:
        tenant = await started(tmp_path, "raw", cipher())
        await saved(tenant, 4)
        await tenant.close()
        tenant = await started(tmp_path, "raw", cipher(encrypts=False))
        await tenant.same(DTYPE, 0, 4)
        await saved(tenant, 4, first=4)
        await tenant.same(DTYPE, 4, 4)
        await tenant.close()
        assert len(traces(tmp_path, range(4, 8))) == 1
        tenant = await started(tmp_path, "raw", cipher())
        await tenant.same(DTYPE, 0, 4)
        assert await tenant.bring(DTYPE, 4) is None
        assert not traces(tmp_path, range(4, 8))
        await tenant.close()

    run(work())


def mark(path: Path, head: Head) -> None:
    """Mark a segment as encrypted."""
    with path.open("r+b") as file:
        assert file.read(PAGE) == head.encode()
        file.seek(0)
        file.write(replace(head, encrypted=True).encode())


def test_a_plain_frame_in_an_encrypted_segment_has_the_segment_erased(tmp_path: Path) -> None:
    """As an earlier version leaves it, which writes on in the newest segment."""

    async def work() -> None:
        tenant = await started(tmp_path, "raw", cipher())
        await saved(tenant, 2)
        await tenant.close()
        tenant = await started(tmp_path, "raw", cipher(encrypts=False))
        await saved(tenant, 2, first=2)
        segment = tenant.bench.first.stores["t"].log.open
        assert segment is not None and segment.head is not None
        head, path = segment.head, Path(segment.path)
        assert not head.encrypted
        await tenant.close()
        mark(path, head)
        tenant = await started(tmp_path, "raw", cipher())
        assert not traces(tmp_path, range(2, 4))
        await tenant.same(DTYPE, 0, 2)
        await tenant.close()

    run(work())


def place(tenant: Tenant, number: int) -> tuple[Path, int, StoredFrame]:
    """The file and the offset of a block's frame."""
    stored = StoredFrame(*tenant.frames(tenant.ids[DTYPE, number])[0])
    path = Path(tenant.bench.tier.table.segments[stored.segment].path)
    return path, stored.page * PAGE, stored


def forge(path: Path, at: int, header: bytearray, payload: bytes) -> None:
    """Write this frame over another one, with right digests."""
    seal_frame(header, payload)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(header) + payload)


def test_swapped_frames_are_misses(tmp_path: Path) -> None:
    """Also if every digest, and every name in the headers, is right for the place."""

    async def work() -> None:
        tenant = await started(tmp_path, "raw", cipher())
        await saved(tenant, 3)
        frames = []
        for number in range(2):
            path, at, stored = place(tenant, number)
            with path.open("rb") as file:
                file.seek(at)
                frames.append((file.read(PAGE * stored.header_pages), file.read(BLOCK)))
        tenant.running.cancel()
        kill(tenant.bench)  # without a footer, so that a start reads the headers
        for number in range(2):
            header, (other, payload) = bytearray(frames[number][0]), frames[1 - number]
            header[152:224], header[HEADER.size :] = other[152:224], other[HEADER.size :]
            path, at, _ = place(tenant, number)
            forge(path, at, header, payload)
        tenant = await started(tmp_path, "raw", cipher())
        assert tenant.catalog.counts()["framed_blocks"] == 3
        await tenant.close()
        volume = ColdDirectory(tmp_path, None)
        assert not check(volume).wrong and check(volume, keys=(FIRST,)).wrong == {"encryption": 2}
        volume.close()
        tenant = await started(tmp_path, "raw", cipher())
        assert [await tenant.bring(DTYPE, number) for number in range(2)] == [None, None]
        assert tenant.mover.counts["spoilt"] == 2
        await tenant.same(DTYPE, 2, 1)
        await tenant.close()

    run(work())


def test_the_frames_of_another_tenant_are_misses(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = await started(tmp_path, "r32", cipher(tenant="u"))
        await saved(tenant, 2)
        await tenant.close()
        tenant = await started(tmp_path, "r32", cipher())
        assert await tenant.bring(DTYPE, 0) is None
        assert tenant.mover.counts["spoilt"] == 1
        await tenant.close()

    run(work())


@pytest.mark.parametrize("codec", ["raw", "r32"])
def test_blocks_with_a_second_chance_are_copied_encrypted(tmp_path: Path, codec: str) -> None:
    async def work() -> None:
        tenant = await started(tmp_path, codec, cipher())
        await saved(tenant, 8)
        await tenant.same(DTYPE, 0, 8)
        await seal(tenant)
        store = tenant.bench.first.stores["t"]
        tenant.mover.reclaimer.second_chance_bytes = SEGMENT
        before = {number: place(tenant, number)[1:2] for number in range(8)}
        segment = store.log.reclaim()
        assert segment is not None
        tenant.evict_all()
        tenant.mover.reclaimer.reclaim(store, segment)
        await until(lambda: tenant.mover.counts["written_again"] == 8)
        await tenant.mover.reclaimer.idle.wait()
        assert len(before) == 8
        await tenant.same(DTYPE, 0, 8)
        assert not traces(tmp_path, range(8))
        await tenant.close()

    run(work())


def test_a_scrub_finds_encrypted_frames_sound(tmp_path: Path) -> None:
    async def work() -> None:
        tenant = await started(tmp_path, "raw", cipher())
        await saved(tenant, 6)
        await seal(tenant)
        scrub = Scrubber(tenant.bench.tier, {"t": tenant.catalog}, lambda *_: None, rate=1 << 30)
        await scrub.round()
        assert (scrub.counts["frames"], scrub.counts["damaged"]) == (6, 0)
        await tenant.close()

    run(work())


def test_nothing_is_written_when_it_cannot_be_encrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        tenant = await started(tmp_path, "raw", cipher())
        fails = True

        def encrypt(*arguments: object) -> None:
            if fails:
                raise MemoryError

        good = FrameCipher.encrypt

        def tried(self: FrameCipher, *arguments: object) -> None:
            encrypt()
            good(self, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(FrameCipher, "encrypt", tried)
        tenant.save(DTYPE, 0, 4)
        await until(lambda: tenant.bench.tier.coding.failures)
        await until(lambda: not tenant.catalog.demotions.writing)
        assert not tenant.catalog.counts()["framed_blocks"] and not traces(tmp_path, range(4))
        fails = False
        tenant.mover.writes.saved(b"".join(tenant.ids.values()))
        await tenant.on_disk(4)
        await tenant.same(DTYPE, 0, 4)
        await tenant.close()

    run(work())


def test_a_copied_directory_opens_with_the_keys_alone(tmp_path: Path) -> None:
    async def work() -> None:
        (first := tmp_path / "first").mkdir()
        tenant = await started(first, "raw", cipher())
        await saved(tenant, 4)
        await tenant.close()
        shutil.copytree(first, tmp_path / "second")
        tenant = await started(tmp_path / "second", "raw", cipher())
        await tenant.same(DTYPE, 0, 4)
        await tenant.close()

    run(work())


def test_a_segment_that_cannot_be_read_for_a_moment_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would get a footer without its frames, and no forget would reach them."""

    def failing(path: Path, owner: bytes, described: Any, **more: Any) -> Recovered:
        if described is not None:
            raise TierError(f"{path}: cannot be read: Input/output error")
        return recover(path, owner, described, **more)

    async def work() -> None:
        tenant = await started(tmp_path)
        await saved(tenant, 8)
        tenant.running.cancel()
        kill(tenant.bench)
        with monkeypatch.context() as patch:
            patch.setattr(segment_files, "recover", failing)
            tenant = await started(tmp_path)
            assert tenant.catalog.counts()["framed_blocks"] == 0
            assert tenant.bench.first.stores["t"].files.unreadable
            await tenant.close()
        tenant = await started(tmp_path)
        await tenant.same(DTYPE, 0, 8)
        await tenant.close()

    run(work())
