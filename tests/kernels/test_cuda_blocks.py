"""Blocks to and from a device's pages: what is copied, in which order, and that no memory is touched
afterwards.

With a driver without a device, whose streams are asynchronous."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvtier_kernels import Mapping
from kvtier_kernels.cuda import Copier, CopyLane, CudaError, DevicePieces, Event, blocks
from kvtier_kernels.cuda.pins import KEPT_ARENAS
from models import kernels
from support.fake_cuda import Bytes, FakeCuda, soon

PAGE, BLOCKS, LAYERS = 4096, 12, 3
PIECE = 1000
SIZE = LAYERS * PIECE
WAYS = ("batch", "divided", "kernel")  # divided: a batch in several streams


class Rig:
    """Pages of a device, extents, a copier. The second extent is not registered."""

    def __init__(
        self, fake: FakeCuda, copier: Copier, make_mapping: Callable[..., Mapping]
    ) -> None:
        self.fake, self.copier = fake, copier
        numbers = np.random.default_rng(1)
        self.pages: Bytes = fake.device(numbers.integers(0, 256, LAYERS * BLOCKS * 1024, np.uint8))
        before = self.pages.copy()
        layer = BLOCKS * 1024
        self.where = ([self.pages.nbytes] * LAYERS, [n * layer for n in range(LAYERS)],
                      [1024] * LAYERS, [PIECE] * LAYERS)  # fmt: skip
        self.pieces = copier.pieces([self.pages.ctypes.data] * LAYERS, *self.where, blocks=BLOCKS)
        assert np.array_equal(self.pages, before), "a trial has left something in the pages"
        fill = numbers.integers(0, 256, BLOCKS * PAGE, np.uint8).tobytes()
        self.extents: list[Mapping | None] = [
            make_mapping(BLOCKS * PAGE, content=fill) for _ in range(2)
        ]
        first: list[Mapping | None] = self.extents[:1]
        copier.pins.of(first)
        soon(lambda: len(copier.pins.of(first).ready) == 1)
        # The list may grow if the old part is unchanged; an invalid new part is refused.
        fake.library.fake_refuse_registration(1)
        self.extents = first + self.extents[1:]
        first.append(self.extents[1])
        self.extents = first
        copier.pins.of(first)
        soon(lambda: copier.pins.of(first).asked == 2 and copier.pins._refused)
        self.lane: CopyLane = copier.lane()

    def slots(self, *places: tuple[int, int]) -> bytes:
        return b"".join(kernels.SLOT.pack(extent, 0, at * PAGE, 0) for extent, at in places)

    def memory(self) -> list[Bytes]:
        return [np.array(memoryview(one)) for one in self.extents if one is not None]

    def after(self, ids: list[int], slots: bytes, inwards: bool) -> tuple[Bytes, list[Bytes]]:
        """The expected content of the pages and the extents after this copy."""
        pages, memory = self.pages.copy(), self.memory()
        twin = kernels.Pieces([pages] * LAYERS, *self.where[1:])
        (kernels.gather if inwards else kernels.scatter)(twin, ids, memory, slots)
        return pages, memory

    def holds(self, wanted: tuple[Bytes, list[Bytes]]) -> bool:
        return np.array_equal(self.pages, wanted[0]) and all(
            np.array_equal(*both) for both in zip(self.memory(), wanted[1], strict=True)
        )

    def stream(self) -> int:
        return self.copier.driver.stream()


@pytest.fixture(params=WAYS)
def rig(
    request: pytest.FixtureRequest, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch,
    make_mapping: Callable[..., Mapping],
) -> Iterator[Rig]:  # fmt: skip
    way = request.param
    if way == "divided":
        way = "batch"
        monkeypatch.setattr(blocks, "DIVIDED_BYTES", 1)
    copier = fake_cuda.copier(monkeypatch, way)
    rig = Rig(fake_cuda, copier, make_mapping)
    yield rig
    fake_cuda.hold(False)
    copier.close()
    copier.driver.close()


MIXED = ((0, 3), (1, 0), (0, 7), (1, 5), (0, 2))
IDS = [5, 1, 11, 0, 2]


@pytest.mark.parametrize("inwards", [True, False])
@pytest.mark.parametrize("extent", [0, 1, None], ids=["registered", "staged", "both"])
def test_blocks_are_copied_byte_for_byte(rig: Rig, inwards: bool, extent: int | None) -> None:
    rig.fake.delay(200)
    places = [(one if extent is None else extent, at) for one, at in MIXED]
    slots = rig.slots(*places)
    wanted = rig.after(IDS, slots, inwards)
    rig.lane.start(rig.pieces, IDS, rig.extents, slots, inwards, None)
    rig.lane.finish()
    assert rig.holds(wanted)
    assert not rig.fake.broken


@pytest.mark.parametrize("inwards", [True, False])
def test_more_blocks_than_a_staging_buffer_or_a_table_holds(
    rig: Rig, inwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("STAGING_BYTES", 2 * SIZE + 5), ("TABLE_BLOCKS", 2), ("BATCH_COPIES", 7)):
        monkeypatch.setattr(blocks, name, value)
    lane = rig.copier.lane()
    rig.fake.delay(200)
    slots = rig.slots(*((at % 2, at) for at in range(BLOCKS)))
    ids = list(reversed(range(BLOCKS)))
    wanted = rig.after(ids, slots, inwards)
    lane.start(rig.pieces, ids, rig.extents, slots, inwards, None)
    lane.finish()
    assert rig.holds(wanted)


def test_copies_that_were_started_share_a_table(rig: Rig) -> None:
    """The second start does not overwrite the table that the first copy has yet to read."""
    rig.fake.hold()
    starts = [([n], rig.slots((0, n))) for n in range(4)]
    wanted = rig.after([0, 1, 2, 3], rig.slots(*((0, n) for n in range(4))), True)
    for ids, slots in starts:
        rig.lane.start(rig.pieces, ids, rig.extents, slots, True, None)
    rig.fake.hold(False)
    rig.lane.finish()
    assert rig.holds(wanted)


@pytest.mark.parametrize("place", [0, 1], ids=["registered", "staged"])
@pytest.mark.parametrize("inwards", [True, False])
def test_a_copy_begins_after_its_event(rig: Rig, inwards: bool, place: int) -> None:
    """A save includes data that the engine's stream has yet to write; a load does not overwrite data
    that the stream has yet to read."""
    engine, gate = rig.stream(), threading.Event()
    slots = rig.slots((place, 2))
    seen: list[Bytes] = []
    fresh = np.full(rig.pages.nbytes, 7, np.uint8)

    def compute() -> None:
        gate.wait(60)
        seen.append(rig.pages.copy())
        if inwards:
            rig.pages[:] = fresh

    before = rig.pages.copy()
    rig.fake.later(engine, compute)
    event = Event(rig.copier.driver).record(engine)
    started = threading.Thread(
        target=rig.lane.start, args=(rig.pieces, [4], rig.extents, slots, inwards, event)
    )
    started.start()
    started.join(0.05)  # a staged copy waits within the start
    assert np.array_equal(rig.pages, before)
    gate.set()
    started.join(60)
    rig.lane.finish()
    assert np.array_equal(seen[0], before)
    if inwards:
        assert (rig.memory()[place][2 * PAGE : 2 * PAGE + SIZE] == 7).all()
    else:
        assert not np.array_equal(rig.pages, before)
    rig.copier.driver.try_call("cuStreamDestroy_v2", engine)


def test_the_engine_s_stream_goes_on_after_a_load(rig: Rig) -> None:
    """No thread waits: work that is queued next finds the pages filled."""
    engine = rig.stream()
    slots = rig.slots((0, 2))
    wanted, _ = rig.after([4], slots, False)
    seen: list[Bytes] = []
    rig.fake.hold()
    rig.lane.start(rig.pieces, [4], rig.extents, slots, False, None)
    rig.lane.hold(engine)
    rig.fake.later(engine, lambda: seen.append(rig.pages.copy()))
    soon(lambda: rig.fake.held >= 1)
    assert not seen
    rig.fake.hold(False)
    rig.lane.finish()
    rig.copier.driver.call("cuStreamSynchronize", engine)
    assert np.array_equal(seen[0], wanted)
    rig.copier.driver.try_call("cuStreamDestroy_v2", engine)


def test_finish_waits_for_the_last_byte(rig: Rig) -> None:
    rig.fake.hold()
    rig.lane.start(rig.pieces, IDS, rig.extents, rig.slots(*((0, n) for n in range(5))), True, None)
    over = threading.Event()
    waiting = threading.Thread(target=lambda: (rig.lane.finish(), over.set()))
    waiting.start()
    assert not over.wait(0.05)
    rig.fake.hold(False)
    assert over.wait(60)
    waiting.join()


def test_a_divided_batch_ends_with_the_last_of_its_streams(rig: Rig) -> None:
    slots = rig.slots(*((0, n) for n in range(5)))
    rig.lane.start(rig.pieces, IDS, rig.extents, slots, True, None)
    rig.lane.finish()
    over, gates = threading.Event(), [threading.Event() for _ in rig.lane.streams.branches]
    for (stream, _), gate in zip(rig.lane.streams.branches, gates, strict=True):
        rig.fake.later(stream, lambda gate=gate: bool(gate.wait(60)))  # type: ignore[misc]
    rig.lane.start(rig.pieces, IDS, rig.extents, slots, True, None)
    waiting = threading.Thread(target=lambda: (rig.lane.finish(), over.set()))
    waiting.start()
    for gate in gates:
        assert not over.wait(0.05)
        gate.set()
    assert over.wait(60)
    waiting.join()


def test_extents_of_a_user_who_may_only_read_are_registered(
    rig: Rig, make_mapping: Callable[..., Mapping], random_bytes: Callable[..., Bytes]
) -> None:
    content = random_bytes(BLOCKS * PAGE).tobytes()
    extents: list[Mapping | None] = [make_mapping(BLOCKS * PAGE, False, content)]
    soon(lambda: rig.copier.pins.of(extents).ready == {0})
    rig.extents = extents
    slots = rig.slots((0, 4), (0, 2))
    wanted = rig.after([3, 5], slots, False)
    rig.lane.start(rig.pieces, [3, 5], extents, slots, False, None)
    rig.lane.finish()
    assert rig.holds(wanted)


WRONG: dict[str, tuple[list[int], list[tuple[int, int]], type[Exception], str]] = {
    "a block beyond the pages": ([BLOCKS], [(0, 0)], IndexError, "12 is outside of 12 blocks"),
    "a block before them": ([-1], [(0, 0)], IndexError, "block"),
    "fewer slots": ([1, 2], [(0, 0)], ValueError, "3 block ids for 2 slots"),
    "an extent beyond": ([1], [(2, 0)], IndexError, "slot 1: extent 2 of 2"),
    "a slot beyond": (
        [1],
        [(0, BLOCKS)],
        IndexError,
        "slot 1: 3000 bytes at 49152 of an extent of 49152",
    ),
}


@pytest.mark.parametrize("inwards", [True, False])
@pytest.mark.parametrize("what", WRONG)
def test_copies_outside_the_bounds_are_refused(rig: Rig, what: str, inwards: bool) -> None:
    ids, places, error, text = WRONG[what]
    before = rig.pages.copy(), rig.memory()
    with pytest.raises(error, match=text):
        rig.lane.start(
            rig.pieces, [0, *ids], rig.extents, rig.slots((0, 1), *places), inwards, None
        )
    assert rig.holds(before)


def test_a_failed_start_leaves_no_copy_in_progress(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are returned as soon as it has raised, and then contain other data."""
    rig.fake.hold()
    staged = rig.slots((0, 1), (1, 1))
    reached = threading.Event()

    def refuse(*_: Any) -> None:
        reached.set()
        raise CudaError("no")

    monkeypatch.setattr(rig.lane, "_staged", refuse)
    failed: list[BaseException] = []

    def start() -> None:
        try:
            rig.lane.start(rig.pieces, [1, 2], rig.extents, staged, True, None)
        except CudaError as error:
            failed.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    assert reached.wait(60)
    thread.join(0.05)
    assert not failed, "raised while a copy was under way"
    rig.fake.hold(False)
    thread.join(60)
    assert failed
    before = rig.memory()
    rig.lane.finish()
    assert all(np.array_equal(*both) for both in zip(before, rig.memory(), strict=True))


def test_extents_stay_registered_while_a_copy_uses_them(
    rig: Rig, make_mapping: Callable[..., Mapping]
) -> None:
    """Also if they belong to an earlier run of the daemon."""
    others: list[list[Mapping | None]] = [[make_mapping(PAGE)] for _ in range(KEPT_ARENAS + 1)]
    rig.fake.hold()
    rig.lane.start(rig.pieces, [1], rig.extents, rig.slots((0, 1)), True, None)
    for other in others:
        rig.copier.pins.of(other)
    soon(lambda: all(len(rig.copier.pins.of(one).ready) == 1 for one in others[-KEPT_ARENAS:]))
    soon(lambda: rig.fake.live()["registered"] == KEPT_ARENAS + 1)
    rig.fake.hold(False)
    rig.lane.finish()
    assert not rig.fake.broken
    soon(lambda: rig.fake.live()["registered"] == KEPT_ARENAS)


def test_no_caller_of_the_pins_unregisters_anything(
    rig: Rig, make_mapping: Callable[..., Mapping], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unmapping much memory takes seconds, and a step of an engine is one of the callers."""
    threads: list[str] = []
    try_call = rig.copier.driver.try_call

    def seen(name: str, *arguments: Any) -> None:
        if name == "cuMemHostUnregister":
            threads.append(threading.current_thread().name)
        try_call(name, *arguments)

    monkeypatch.setattr(rig.copier.driver, "try_call", seen)
    rig.fake.hold()
    rig.lane.start(rig.pieces, [1], rig.extents, rig.slots((0, 1)), True, None)
    for _ in range(KEPT_ARENAS + 2):
        rig.copier.pins.of([make_mapping(PAGE)])
    rig.fake.hold(False)
    rig.lane.finish()
    soon(lambda: len(threads) == 3 and rig.fake.live()["registered"] == KEPT_ARENAS)
    assert threads == ["kvtier-pin"] * 3


def test_a_broken_device_is_an_error(rig: Rig) -> None:
    rig.fake.library.fake_break()
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        rig.lane.start(rig.pieces, [1], rig.extents, rig.slots((0, 1)), True, None)
    rig.fake.library.fake_mend()


def test_both_ways_are_measured_and_one_is_chosen(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = fake_cuda.device(np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8))
    before = pages.copy()
    where = ([pages.ctypes.data], [1 << 16], [0], [4096], [4096])
    copier = fake_cuda.copier(monkeypatch)
    for gain, way in ((0.0, "kernel"), (1e9, "batch")):
        monkeypatch.setattr(blocks, "KERNEL_GAIN", gain)
        assert copier.pieces(*where, blocks=16).ways == {True: way, False: way}
        assert np.array_equal(pages, before)
    copier.close()
    copier.driver.close()


def test_a_kernel_that_copies_wrongly_is_not_used(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = fake_cuda.device(np.zeros(1 << 16, np.uint8))
    copier = fake_cuda.copier(monkeypatch)
    split = DevicePieces.split

    def shifted(self: DevicePieces) -> Any:
        table = split(self)
        table["nbytes"] -= 8
        return table

    monkeypatch.setattr(DevicePieces, "split", shifted)
    with pytest.raises(CudaError, match="copied different bytes"):
        copier.pieces([pages.ctypes.data], [1 << 16], [0], [4096], [4096], blocks=16)
    copier.close()
    copier.driver.close()


def test_without_a_compiler_the_driver_copies(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(text: str, architecture: str) -> bytes:
        raise CudaError("NVRTC is not installed")

    monkeypatch.setattr(blocks, "compile_kernel", missing)
    copier = Copier(fake_cuda.driver())
    pages = fake_cuda.device(np.zeros(1 << 16, np.uint8))
    pieces = copier.pieces([pages.ctypes.data], [1 << 16], [0], [4096], [4096], blocks=16)
    assert pieces.ways == {True: "batch", False: "batch"}
    copier.close()
    with pytest.raises(CudaError, match="cannot copy: NVRTC is not installed"):
        Copier(copier.driver, "kernel")
    copier.driver.close()
