"""Compressed memory in a daemon: blocks that have left their slots are read without a disk, and are the saved
ones or misses."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from sys import getsizeof
from typing import Any, NoReturn

import numpy as np
import pytest

from conformance.codec_tests import kv
from kvtier import Client
from kvtier.frame import R32, pages
from kvtier_daemon.app import App
from kvtier_daemon.catalog.compressed import CompressedOrder
from kvtier_daemon.catalog.policy import NO_PARENT, make
from kvtier_daemon.tiers.cold.compressor import CHECK_S, IN_MEMORY, PLANES, Compressor, codec_here
from kvtier_daemon.tiers.cold.frame_memory import (
    GIVE_BYTES,
    GIVE_LEAST,
    CompressedFrame,
    CompressedFrames,
    FrameMemory,
)
from kvtier_daemon.tiers.cold.mover import Mover
from kvtier_kernels import cpu_features, implementations
from support.apps import served
from support.daemons import kvtier, start_daemon
from support.specs import spec_of

PROMPT = 8  # blocks
WARM_PROMPTS = 8  # that fill the slots: 4 MiB in blocks of 64 KiB
WAIT_MS = 20_000
PAGE = 4096
COMPRESSED = 'compressed = "8MiB"\n'
DISK = '[cold]\ndirectories = ["{}/disk"]\nsize = "64MiB"\nsegment = "1MiB"\n'


class Prompts:
    """A client and its prompts, whose blocks can be told from each other."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.space = client.open(spec_of("compressed"))
        self._drawn = np.frombuffer(kv("bfloat16", self.space.block_bytes), np.uint16)

    def keys(self, number: int) -> list[bytes]:
        return list(self.space.keys([number] * PROMPT * self.space.spec.block_tokens))

    def block(self, key: bytes) -> bytes:
        seed = int.from_bytes(key[:8], "little")
        rolled = np.roll(self._drawn, seed % len(self._drawn))
        rolled[:4] = np.frombuffer(key[:8], np.uint16)
        return rolled.tobytes()

    def save(self, *numbers: int) -> None:
        for number in numbers:
            keys = self.keys(number)
            self.space.save(keys, [self.block(key) for key in keys], wait_s=20)

    def load(self, number: int, wait_ms: int = WAIT_MS) -> int:
        """Return how many blocks of the prompt are loaded; each must be the saved one."""
        keys = self.keys(number)
        with self.space.load(keys, 5000, wait_ms=wait_ms) as blocks:
            for key, block in zip(keys, blocks, strict=False):
                assert bytes(block) == self.block(key)
            return len(blocks)

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        until = time.monotonic() + 30
        while not holds(stats := self.client.stats()["tiers"]):
            assert time.monotonic() < until, stats
            time.sleep(0.01)
        return stats

    def cooled(self, first: int = 0, prompts: int = WARM_PROMPTS) -> dict[str, Any]:
        """Save prompts until the first ones have left their slots, and are in compressed memory."""
        for number in range(first, first + 2 * prompts):
            self.save(number)
            self.until(is_written)
            time.sleep(0.02)
        return self.until(lambda tiers: tiers["warm"]["compressed"]["block_bytes"] > 0)


def is_written(tiers: dict[str, Any]) -> bool:
    """Whether all blocks are on disk, and those that leave next are compressed."""
    cold, warm = tiers["cold"], tiers["warm"]
    return bool(
        cold["blocks"] >= warm["blocks"]
        and not cold["writing"]
        and (warm["compressed"]["blocks"] >= 4 or warm["used_bytes"] < 3 << 20)
    )


def in_process(
    folder: Path,
    work: Callable[[Prompts, Mover], None],
    compressed: str = COMPRESSED,
    cold: str = "",
) -> None:
    """Run a daemon in this process, whose objects `work` may look at."""

    async def serve(app: App) -> None:
        tier = app.tenants["default"].tier
        assert isinstance(tier, Mover)

        def client() -> None:
            with Client.connect(str(folder / "s"), populate=False) as connected:
                connected.wait_ready()
                work(Prompts(connected), tier)

        await asyncio.to_thread(client)

    served(folder, serve, cold, warm=compressed)


def frames_of(mover: Mover) -> CompressedFrames:
    assert isinstance(mover._compressor, Compressor)
    return mover._compressor.frames


def frame_of(mover: Mover, prompts: Prompts, key: bytes) -> CompressedFrame | None:
    found = [one for one in list(frames_of(mover)._of.values()) if one.name[3] == key]
    return found[0] if found else None


def bytes_in(place: tuple[Any, int], nbytes: int) -> bytes:
    memory, at = place
    return bytes(memory[at : at + nbytes])


def reads_of(prompts: Prompts) -> tuple[int, int]:
    """Blocks that were read from disk, and from compressed memory."""
    tiers = prompts.client.stats()["tiers"]
    return tiers["cold"]["states"]["read"], tiers["warm"]["compressed"]["read"]


def alone(mover: Mover, prompts: Prompts) -> list[int]:
    """The prompts whose blocks are all in compressed memory, and have no slots."""
    frames = frames_of(mover)

    def is_alone(key: bytes) -> bool:
        frame = frame_of(mover, prompts, key)
        return frame is not None and frame.id in frames.order.alone

    return [number for number in range(40) if all(map(is_alone, prompts.keys(number)))]


def test_blocks_that_left_their_slots_are_read_without_the_disk(tmp_path: Path) -> None:
    def work(prompts: Prompts, mover: Mover) -> None:
        compressed = prompts.cooled()["warm"]["compressed"]
        number = 2 * WARM_PROMPTS
        while compressed["effective"] <= 1.05:  # a busy machine compresses fewer of them in time
            assert number < 40, compressed
            compressed = prompts.cooled(number, 1)["warm"]["compressed"]
            number += 2
        assert compressed["used_bytes"] < 7 / 8 * compressed["blocks"] * prompts.space.block_bytes
        found = alone(mover, prompts)
        assert found, "no whole prompt is compressed"
        disk, memory = reads_of(prompts)
        assert prompts.load(found[0]) == PROMPT
        assert reads_of(prompts) == (disk, memory + PROMPT)
        assert prompts.load(found[0], 0) == PROMPT, "it has slots again"
        assert prompts.client.stats()["tiers"]["cold"]["states"]["loaded"] <= disk, "from the disk"

    in_process(tmp_path, work)


def test_a_load_that_waits_asks_few_times_and_lets_other_threads_use_the_client(
    tmp_path: Path,
) -> None:
    def work(prompts: Prompts, mover: Mover) -> None:
        prompts.cooled()
        number, loaded, held = alone(mover, prompts)[0], list[int](), list[Any]()
        assert isinstance(mover._compressor, Compressor)
        threads, loop, link = (
            mover._compressor._threads,
            mover._compressor._loop,
            prompts.space.link,
        )
        read = threads.read
        threads.read = lambda *what: held.append(what)  # type: ignore[method-assign]
        waiting = threading.Thread(target=lambda: loaded.append(prompts.load(number)))
        waiting.start()
        until, first = time.monotonic() + 30, link._last_id
        while not held:
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.3)
        assert link._last_id - first <= 4, "it asks again and again"
        began = time.monotonic()
        for _ in range(20):
            prompts.client.ping()
        assert time.monotonic() - began < WAIT_MS / 2000, (
            "it keeps other threads from the connection"
        )
        assert waiting.is_alive() and not loaded
        threads.read = read  # type: ignore[method-assign]
        for what in held:
            loop.call_soon_threadsafe(read, *what)
        waiting.join(30)
        assert loaded == [PROMPT]

    in_process(tmp_path, work)


@pytest.mark.parametrize(
    ("levels", "features", "codec"),
    [
        (["avx512vbmi", "avx2", "scalar"], {"fast_pdep": True}, PLANES),
        (["avx2", "scalar"], {"fast_pdep": True}, PLANES),
        (["avx2", "scalar"], {"fast_pdep": False}, R32),  # Zen 2
        (["scalar"], {"fast_pdep": True}, R32),
        (["scalar"], {}, R32),  # not x86
    ],
)
def test_frames_in_memory_have_the_codec_that_this_processor_decodes_fastest(
    levels: list[str], features: dict[str, object], codec: int
) -> None:
    assert codec_here(levels, features) == codec
    assert codec_here(implementations("codec"), cpu_features()) == IN_MEMORY


def test_instead_of_a_damaged_frame_the_one_on_disk_is_read(tmp_path: Path) -> None:
    def work(prompts: Prompts, mover: Mover) -> None:
        prompts.cooled()
        number = alone(mover, prompts)[0]
        for at, key in enumerate(prompts.keys(number)):
            frame = frame_of(mover, prompts, key)
            assert frame is not None
            memory, start = frame.place
            place = start + (frame.nbytes - 1) * at // PROMPT  # anywhere in the payload
            # Single bits may be unused.
            memory[place : place + 16] = bytes(
                byte ^ 1 << at for byte in memory[place : place + 16]
            )
        assert prompts.load(number) == PROMPT
        stats = prompts.client.stats()["tiers"]
        assert stats["warm"]["compressed"]["spoilt"] == PROMPT
        assert not stats["warm"]["compressed"]["read"]
        assert stats["cold"]["states"]["read"] == PROMPT
        assert not stats["cold"]["states"]["spoilt"]

    in_process(tmp_path, work)


def test_a_damaged_header_is_noticed(tmp_path: Path) -> None:
    def work(prompts: Prompts, mover: Mover) -> None:
        prompts.cooled()
        number = alone(mover, prompts)[0]
        for at, key in enumerate(prompts.keys(number)):
            frame = frame_of(mover, prompts, key)
            assert frame is not None
            header = bytearray(frame.header)
            header[len(header) * at // PROMPT] ^= 1
            frame.header = bytes(header)
        assert prompts.load(number) == PROMPT
        assert prompts.client.stats()["tiers"]["warm"]["compressed"]["spoilt"] == PROMPT
        assert reads_of(prompts) == (PROMPT, 0)

    in_process(tmp_path, work)


def test_nothing_remains_of_the_frames_of_forgotten_blocks(tmp_path: Path) -> None:
    def work(prompts: Prompts, mover: Mover) -> None:
        prompts.cooled()
        number = alone(mover, prompts)[0]
        places = []
        for key in prompts.keys(number):
            frame = frame_of(mover, prompts, key)
            assert frame is not None
            assert any(bytes_in(frame.place, frame.nbytes))
            places.append((frame.place, frame.block_bytes))
        assert prompts.space.forget(prompts.keys(number)) == PROMPT
        assert not any(frame_of(mover, prompts, key) for key in prompts.keys(number))
        until = time.monotonic() + 20
        while any(any(bytes_in(*place)) for place in places):
            assert time.monotonic() < until, "their memory is not given to the system"
            time.sleep(0.01)
        assert prompts.load(number) == 0
        prompts.save(number)
        assert prompts.load(number) == PROMPT

    in_process(tmp_path, work)


def test_a_block_that_is_forgotten_while_it_is_compressed_gets_no_frame(tmp_path: Path) -> None:
    """The thread that compresses waits until the block is forgotten."""

    def work(prompts: Prompts, mover: Mover) -> None:
        compressor = mover._compressor
        assert isinstance(compressor, Compressor)
        begun, go_on = asyncio.Event(), asyncio.Event()
        encode = compressor._threads.encode

        def late(job: Callable[[], Any]) -> asyncio.Future[Any]:
            async def wait() -> Any:
                begun.set()
                await go_on.wait()
                return await encode(job)

            return asyncio.ensure_future(wait())

        compressor._threads.encode = late  # type: ignore[method-assign]
        for number in range(WARM_PROMPTS):
            prompts.save(number)
        until = time.monotonic() + 30
        while not begun.is_set():
            assert time.monotonic() < until
            time.sleep(0.01)
        for number in range(WARM_PROMPTS):
            prompts.space.forget(prompts.keys(number))
        prompts.until(lambda tiers: tiers["warm"]["blocks"] == 0)
        compressor._threads.encode = encode  # type: ignore[method-assign]
        loop = compressor._loop
        loop.call_soon_threadsafe(go_on.set)
        prompts.until(lambda tiers: tiers["warm"]["states"]["doomed"] == 0)
        assert not len(frames_of(mover)) and not frames_of(mover).used_bytes
        assert sum(prompts.load(number) for number in range(WARM_PROMPTS)) == 0

    in_process(tmp_path, work)


def test_a_frame_that_is_being_read_stays_until_the_end_of_the_read() -> None:
    order = CompressedOrder(make("lru"), make("lru"))
    frames, found = CompressedFrames(order, 10 * PAGE), list[CompressedFrame]()
    frames.open(lambda: None)
    for number in range(2):
        one = array("I", [number]).tobytes()
        order.added(one, bytes(8), one)
        place = frames.memory.take(4 * PAGE)
        place[0][place[1] : place[1] + 4 * PAGE] = b"x" * 4 * PAGE
        name = (0, 0, 0, bytes(32))
        found.append(CompressedFrame(number, name, 4 * PAGE, 0, b"", PAGE, 4 * PAGE, b"", place))
        assert frames.add(found[number])
        order.left(one)
    frames.hold(found[:1])
    frames.make_room(6 * PAGE, (), 0)
    assert list(frames._of) == [0], "the colder one is being read"
    order.gone(array("I", [0]).tobytes())
    assert not len(frames) and not frames.used_bytes
    assert bytes_in(found[0].place, 4 * PAGE) == b"x" * 4 * PAGE
    assert frames.memory.take(4 * PAGE) != found[0].place
    frames.memory.clear()
    assert frames.memory.take(4 * PAGE) == found[1].place
    frames.release(found[0], True)
    frames.memory.clear()
    assert not any(bytes_in(found[0].place, 4 * PAGE))
    assert frames.memory.take(4 * PAGE) == found[0].place


def test_pages_behind_a_frame_and_those_of_dropped_frames_are_cleared() -> None:
    frames = FrameMemory()
    place = frames.take(10 * PAGE)
    memory, at = place
    memory[at : at + 10 * PAGE] = b"x" * 10 * PAGE
    frames.trim(place, 10 * PAGE, 6 * PAGE + 1)
    assert bytes_in(place, 10 * PAGE) == b"x" * 7 * PAGE + bytes(3 * PAGE)
    frames.give(place, 10 * PAGE)
    other = frames.take(10 * PAGE)
    assert other != place, "it may have its bytes still"
    assert not frames.clear()
    assert not any(bytes_in(place, 10 * PAGE))
    assert frames.take(10 * PAGE) == place


def many(count: int, nbytes: int) -> CompressedFrames:
    """So many frames of blocks without slots."""
    order = CompressedOrder(make("lru"), make("lru"))
    frames = CompressedFrames(order, 2 * count * nbytes)
    frames.open(lambda: None)
    for number in range(count):
        one = array("I", [number]).tobytes()
        order.added(one, array("Q", [number + 1]).tobytes(), array("I", [NO_PARENT]).tobytes())
        place = frames.memory.take(nbytes)
        name = (0, 0, 0, bytes(32))
        assert frames.add(CompressedFrame(number, name, nbytes, 0, b"", PAGE, nbytes, b"", place))
        order.left(one)
    return frames


@pytest.mark.parametrize(("count", "nbytes"), [(1024, PAGE), (64, 2 << 20)])
def test_the_memory_of_frames_is_given_to_the_system_in_portions(count: int, nbytes: int) -> None:
    """2 GiB at once would stop the event loop for 0.2 s."""
    frames = many(count, nbytes)
    frames.order.gone(array("I", range(count // 2)).tobytes())
    assert len(frames) == count // 2
    assert frames.memory.clear(), "all was given to the system at once"
    while frames.memory.clear():
        pass

    async def turns() -> int:
        closing, found = asyncio.ensure_future(frames.close()), 0
        while not closing.done():
            await asyncio.sleep(0)
            found += 1
        return found

    assert asyncio.run(turns()) > count // 2 * max(nbytes, GIVE_LEAST) / GIVE_BYTES
    assert not len(frames) and not frames.used_bytes
    assert len(frames.memory._free[nbytes]) == count


@pytest.mark.parametrize("size", ["1MiB", "2MiB"])
def test_memory_is_bounded_and_blocks_that_leave_it_are_on_disk(tmp_path: Path, size: str) -> None:
    def work(prompts: Prompts, mover: Mover) -> None:
        frames, most = frames_of(mover), 0
        add = frames.add

        def watched(frame: CompressedFrame) -> bool:
            nonlocal most
            added = add(frame)
            most = max(most, frames.used_bytes)
            assert frames.used_bytes == sum(one.used_bytes for one in frames._of.values())
            return added

        frames.add = watched  # type: ignore[method-assign]
        chance, saved = random.Random(1), list[int]()
        for number in range(5 * WARM_PROMPTS):
            prompts.save(number)
            saved.append(number)
            prompts.until(is_written)
            if number % 3 == 0:
                assert prompts.load(chance.choice(saved)) == PROMPT
        assert frames.counts["dropped"] > 0
        assert 0 < most <= frames.capacity_bytes
        assert frames.counts["spoilt"] == 0
        for number in saved[-2 * WARM_PROMPTS :]:
            assert prompts.load(number) == PROMPT

    in_process(tmp_path, work, f'compressed = "{size}"\n')


def test_the_notes_about_a_frame_count_as_compressed_memory(tmp_path: Path) -> None:
    def work(prompts: Prompts, mover: Mover) -> None:
        prompts.cooled()
        for frame in list(frames_of(mover)._of.values()):
            own = (frame.name, frame.name[3], frame.header, frame.raw_digest)
            notes = sum(map(getsizeof, (frame, frame.id, frame.place, frame.place[1], *own)))
            assert notes <= frame.used_bytes - pages(frame.nbytes) <= 2 * notes

    in_process(tmp_path, work)


def test_blocks_that_do_not_shrink_are_not_compressed(tmp_path: Path) -> None:
    def work(prompts: Prompts, mover: Mover) -> None:
        chance = np.random.default_rng(1)
        blocks: dict[bytes, bytes] = {}

        def random_bytes(key: bytes) -> bytes:
            if key not in blocks:
                blocks[key] = chance.bytes(prompts.space.block_bytes)
            return blocks[key]

        prompts.block = random_bytes  # type: ignore[method-assign]
        for number in range(2 * WARM_PROMPTS):
            prompts.save(number)
            prompts.until(lambda tiers: not tiers["cold"]["writing"])
        stats = prompts.until(lambda tiers: tiers["warm"]["compressed"]["not_worth"] > 0)
        assert not stats["warm"]["compressed"]["blocks"]
        assert not stats["warm"]["compressed"]["used_bytes"]
        compressor = mover._compressor
        assert isinstance(compressor, Compressor)
        until = time.monotonic() + 20
        while not compressor._skips:
            assert time.monotonic() < until, "the kind is not skipped"
            time.sleep(0.01)
        order, looks = compressor.frames.order, Counter[str]()
        find = order.next_to_compress

        def counted(most: int) -> bytes:
            looks["at all"] += 1
            return find(most)

        order.next_to_compress = counted  # type: ignore[method-assign]
        began = time.monotonic()
        time.sleep(1)
        most = 1 + (time.monotonic() - began) / CHECK_S
        assert looks["at all"] <= most, "it looks at blocks of which it can compress none"

    in_process(tmp_path, work)


def test_a_block_that_does_not_shrink_disables_no_others(tmp_path: Path) -> None:
    def work(prompts: Prompts, mover: Mover) -> None:
        chance, block = np.random.default_rng(1), prompts.block
        worst = {prompts.keys(number)[3] for number in range(0, 2 * WARM_PROMPTS, 2)}
        drawn = {key: chance.bytes(prompts.space.block_bytes) for key in worst}
        prompts.block = lambda key: drawn.get(key) or block(key)  # type: ignore[method-assign]
        saved = 2 * WARM_PROMPTS
        for number in range(saved):
            prompts.save(number)
            prompts.until(is_written)
            time.sleep(0.02)
        stats = prompts.client.stats()["tiers"]["warm"]["compressed"]
        assert 0 < stats["not_worth"] <= len(worst), "each is counted once"
        assert stats["compressed"] > saved * PROMPT // 2 - len(worst)
        for number in range(saved):
            assert prompts.load(number) == PROMPT

    in_process(tmp_path, work)


def test_a_restart_finds_the_blocks_on_disk_and_a_purge_leaves_no_frames(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    config = f'[warm]\nsize = "4MiB"\n{COMPRESSED}' + DISK.format(tmp_path)
    daemon = start_daemon(tmp_path, config=config)
    try:
        with daemon.connect() as client:
            prompts = Prompts(client)
            prompts.cooled()
    finally:
        daemon.stop()
    daemon = start_daemon(tmp_path, config=config)
    try:
        daemon.wait_for_disks()
        with daemon.connect() as client:
            prompts = Prompts(client)
            assert client.stats()["tiers"]["warm"]["compressed"]["blocks"] == 0
            for number in range(2 * WARM_PROMPTS):
                assert prompts.load(number) == PROMPT
            prompts.cooled(100)
            done = kvtier("purge", "--all", "--yes", "--socket", daemon.socket)
            assert done.returncode == 0, done.stderr
            compressed = client.stats()["tiers"]["warm"]["compressed"]
            assert compressed["blocks"] == compressed["used_bytes"] == 0
            for number in range(100, 100 + 2 * WARM_PROMPTS):
                assert prompts.load(number, 0) == 0
    finally:
        assert daemon.stop() == 0


def test_switching_the_tier_off_and_on_keeps_the_counters(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    config = f'[warm]\nsize = "4MiB"\n{COMPRESSED}' + DISK.format(tmp_path)
    daemon = start_daemon(tmp_path, config=config)
    try:
        daemon.wait_for_disks()
        with daemon.connect() as client:
            prompts = Prompts(client)
            before = prompts.cooled()["warm"]["compressed"]["compressed"]
            for state in ("off", "on"):
                done = kvtier("tier", state, "cold", "--socket", daemon.socket)
                assert done.returncode == 0, done.stderr
                tiers = prompts.until(lambda tiers, state=state: tiers["cold"]["state"] == state)  # type: ignore[misc]
                if state == "off":
                    assert tiers["warm"]["compressed"]["blocks"] == 0
                assert tiers["warm"]["compressed"]["compressed"] >= before
            for number in range(2 * WARM_PROMPTS):
                assert prompts.load(number) == PROMPT
    finally:
        assert daemon.stop() == 0


def test_tenants_share_the_memory_by_their_quotas(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    tenants = (
        '[tenants.a]\nuids = ["*"]\nquota = "75%"\n[tenants.b]\nuids = [12345]\nquota = "25%"\n'
    )
    config = f'[warm]\nsize = "8MiB"\n{COMPRESSED}' + DISK.format(tmp_path) + tenants
    daemon = start_daemon(tmp_path, config=config)
    try:
        with daemon.connect() as client:
            assert client.stats()["tiers"]["warm"]["compressed"]["capacity_bytes"] >= 6 << 20
    finally:
        assert daemon.stop() == 0


def test_a_stop_with_reads_in_progress_drops_all_frames(tmp_path: Path) -> None:
    kept: list[CompressedFrames] = []

    def work(prompts: Prompts, mover: Mover) -> None:
        prompts.cooled()
        kept.append(frames_of(mover))
        found = alone(mover, prompts)
        assert found
        for number in found:
            prompts.space.match(prompts.keys(number), request=number)

    in_process(tmp_path, work)
    assert not len(kept[0]) and not kept[0].used_bytes


def test_a_block_of_another_name_is_not_taken_for_that_of_a_frame(tmp_path: Path) -> None:
    def work(prompts: Prompts, mover: Mover) -> None:
        prompts.cooled()
        first, second = alone(mover, prompts)[:2]
        frames = frames_of(mover)
        for key, other in zip(prompts.keys(first), prompts.keys(second), strict=True):
            one, two = frame_of(mover, prompts, key), frame_of(mover, prompts, other)
            assert one is not None and two is not None
            one.id, two.id = two.id, one.id  # as if an id had been reused unnoticed
            frames._of[one.id], frames._of[two.id] = one, two
        assert prompts.load(first) == PROMPT
        assert prompts.load(second) == PROMPT
        assert reads_of(prompts) == (2 * PROMPT, 0)
        assert frames.counts["spoilt"] == 0, "they were not even read"

    in_process(tmp_path, work)


@pytest.mark.parametrize("codec", ["raw", "r32"])
def test_a_sound_frame_with_the_content_of_another_block_is_not_loaded(
    tmp_path: Path, codec: str
) -> None:
    def work(prompts: Prompts, mover: Mover) -> None:
        prompts.cooled()
        first, second = alone(mover, prompts)[:2]
        for key, other in zip(prompts.keys(first), prompts.keys(second), strict=True):
            one, two = frame_of(mover, prompts, key), frame_of(mover, prompts, other)
            assert one is not None and two is not None
            for field in ("header", "nbytes", "raw_digest", "place"):
                mine, its = getattr(one, field), getattr(two, field)
                setattr(one, field, its)
                setattr(two, field, mine)
        assert prompts.load(first) == PROMPT
        assert prompts.load(second) == PROMPT
        assert frames_of(mover).counts["spoilt"] == 2 * PROMPT
        assert reads_of(prompts) == (2 * PROMPT, 0)

    in_process(tmp_path, work, COMPRESSED, f'codec = "{codec}"\n')


def test_a_failure_to_compress_disables_nothing_else(tmp_path: Path) -> None:
    def work(prompts: Prompts, mover: Mover) -> None:
        prompts.cooled()

        def fail(_: int) -> NoReturn:
            raise OSError(errno.ENOMEM, "no memory")

        frames_of(mover).memory.take = fail  # type: ignore[method-assign]
        for number in range(100, 100 + 2 * WARM_PROMPTS):
            prompts.save(number)
        prompts.until(lambda tiers: not tiers["warm"]["compressed"]["blocks"])
        for number in range(2 * WARM_PROMPTS):
            assert prompts.load(number) == PROMPT
        assert prompts.client.stats()["tiers"]["cold"]["on"]

    in_process(tmp_path, work)


def test_a_batch_has_ended_when_its_last_thread_has(tmp_path: Path) -> None:
    """A thread that has not ended may still write to a slot."""

    def work(prompts: Prompts, mover: Mover) -> None:
        prompts.cooled()
        assert isinstance(mover._compressor, Compressor)
        threads = mover._compressor._threads
        submit, go_on, late = threads._decoders.submit, threading.Event(), list[str]()

        def with_a_late_one(job: Callable[[], Any]) -> Any:
            def ends_late() -> None:
                job()
                go_on.wait(30)

            if late:
                return submit(job)
            late.append("the first of the batch")
            return submit(ends_late)

        threads.decoders = 2
        threads._decoders.submit = with_a_late_one  # type: ignore[method-assign, assignment]
        try:
            assert prompts.load(0, wait_ms=300) < PROMPT and late
        finally:
            go_on.set()
        assert prompts.load(0) == PROMPT

    in_process(tmp_path, work)


def test_a_failure_to_start_a_job_leaves_no_holds_and_no_pieces(tmp_path: Path) -> None:
    def work(prompts: Prompts, mover: Mover) -> None:
        compressor = mover._compressor
        assert isinstance(compressor, Compressor)

        def fail(_: Callable[[], Any]) -> NoReturn:
            raise RuntimeError("cannot schedule new futures")

        compressor._threads.encode = fail  # type: ignore[method-assign]
        for number in range(WARM_PROMPTS):
            prompts.save(number)
        until = time.monotonic() + 20
        while compressor.frames.is_open:
            assert time.monotonic() < until, "it was not called"
            time.sleep(0.01)
        for number in range(WARM_PROMPTS):
            prompts.space.forget(prompts.keys(number))
        prompts.until(lambda tiers: tiers["warm"]["states"]["doomed"] == 0)
        ((size, free),) = compressor.frames.memory._free.items()
        assert free and len(free) == compressor.frames.memory._rest[size][1] // size

    in_process(tmp_path, work)


def test_blocks_that_left_their_slots_because_an_engine_holds_them_have_no_frames(
    tmp_path: Path,
) -> None:
    def work(prompts: Prompts, mover: Mover) -> None:
        prompts.cooled()
        for number in range(2 * WARM_PROMPTS):
            prompts.space.tell_resident(0, prompts.keys(number))
        for number in range(50, 50 + WARM_PROMPTS):
            prompts.save(number)
            prompts.until(is_written)
        resident = prompts.client.stats()["hot"]["resident"]
        assert resident["away_blocks"] > 0, "none has left because of that"
        order, store = frames_of(mover).order, mover._blocks.store
        until = time.monotonic() + 20
        while True:
            with_slots = array("I", list(order.paired)).tobytes()
            if not store.clean(with_slots, in_memory=False):
                break
            assert time.monotonic() < until, "frames of these blocks are never dropped"
            time.sleep(0.05)
        stats = prompts.client.stats()["tiers"]["warm"]["compressed"]
        assert stats["compressed"] == stats["blocks"] + stats["dropped"]
        for number in range(2 * WARM_PROMPTS):
            assert prompts.load(number) == PROMPT

    in_process(tmp_path, work)
