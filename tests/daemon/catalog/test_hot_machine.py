"""Random operations on a tenant's copies in the memory of a GPU, with the bytes that clients write there.

Writers write at any time between their grant and its end, and after their connection is lost until their
process has ended. Readers read slots at any time after they got them. What a reader may believe, by the
generation, must be the block. With one slot size every decision must be that of the model.
"""

from __future__ import annotations

import random
import struct
from array import array
from dataclasses import dataclass, field

import pytest

from kvtier.errors import Refused
from kvtier.key import KEY_BYTES, token_keys
from kvtier.layout import space_id
from kvtier.wire import LEAVING, SLOT, SLOT_BYTES
from kvtier_daemon.catalog import Catalog, LeaseId, SessionId
from kvtier_daemon.catalog.policy import make
from kvtier_kernels import Store
from models.kernels.hot import HotModel
from support.effort import effort
from support.specs import spec_of

PAGE = 4096
GPUS = ("a", "b")
CHAINS, LENGTH = 6, 8
ENGINE = "engine"


@dataclass
class Writing:
    """A grant. `blocks`: the name and the slot of each copy."""

    lease: LeaseId
    session: int
    gpu: str
    number: int
    ids: list[int]
    blocks: list[tuple[bytes, int, int]]  # name, first page, pages


@dataclass
class Reading:
    """Slots of copies that a load got: what must be there while the generation is the same."""

    number: int
    blocks: list[tuple[bytes, int, int, int]] = field(default_factory=list)


class Machine:
    def __init__(self, seed: int, sizes: list[int], slots: int) -> None:
        self.random = random.Random(seed)
        self.catalog = Catalog(Store(), make("lru"))
        self.specs = [spec_of(f"size {size}", layers=size) for size in sizes]
        self.spaces = [self.catalog.spaces.open(space_id(one, "t"), one) for one in self.specs]
        self.pages = [-(-one.block_bytes // PAGE) for one in self.specs]
        warm_pages = CHAINS * LENGTH * max(self.pages) * 2 // 3
        self.catalog.add_extent(warm_pages * PAGE, bytearray(warm_pages * 8))
        self.keys = [
            [
                token_keys(bytes(32), list(range(n * 1000, n * 1000 + 16 * LENGTH)), 16).packed
                for n in range(CHAINS)
            ]
            for _ in sizes
        ]
        self.hot_pages = slots * max(self.pages) + 1
        self.tables: dict[int, bytearray] = {}
        self.devices: dict[
            int, dict[int, tuple[bytes, int]]
        ] = {}  # page -> name of the block, page of it
        self.models: dict[str, HotModel] = {}
        self.sessions: dict[int, str] = {}  # with the GPU
        self.lost: dict[int, str] = {}  # disconnected; their processes live
        self.last_session = 0
        self.writings: list[Writing] = []
        self.readings: list[Reading] = []
        self.leases: list[tuple[LeaseId, list[int]]] = []
        self.held: dict[int, int] = {}
        self.reads = self.stale = self.hits = 0
        for gpu in GPUS:
            self.add(gpu)

    # --- operations ------------------------------------------------------------------------------

    def add(self, gpu: str) -> None:
        table = bytearray(self.hot_pages * 8)
        arena = self.catalog.hot.add(gpu, self.hot_pages * PAGE, table)
        assert arena.number not in self.tables, "a number was used again"
        self.tables[arena.number], self.devices[arena.number] = table, {}
        if len(set(self.pages)) == 1:
            self.models[gpu] = HotModel(self.hot_pages // self.pages[0])

    def replace_holder(self) -> None:
        gpu = self.random.choice(GPUS)
        self.catalog.hot.remove(gpu)
        self.models.pop(gpu, None)
        for one in self.writings:
            if one.gpu == gpu:
                one.lease = LeaseId(0)  # it may still write, but not commit
                self.unhold(one.ids)
                one.ids = []
        self.drop_left()
        self.add(gpu)

    def connect(self) -> None:
        self.last_session += 1
        gpu = self.random.choice(GPUS)
        self.sessions[self.last_session] = gpu
        self.catalog.hot.join(SessionId(self.last_session), f"{ENGINE} {gpu}", gpu, [0])

    def lose(self) -> None:
        """A connection is lost, and the process lives or has ended."""
        if self.sessions:
            session = self.random.choice([*self.sessions])
            gone = self.random.random() < 0.3
            gpu = self.sessions.pop(session)
            held = self.catalog.end_session(SessionId(session), gone)
            assert held == (
                not gone and any(one.session == session and one.lease for one in self.writings)
            )
            if gone:
                self.ended(session)
            else:
                self.lost[session] = gpu

    def end_process(self) -> None:
        if self.lost:
            session = self.random.choice([*self.lost])
            del self.lost[session]
            self.catalog.process_gone(SessionId(session))
            self.ended(session)

    def ended(self, session: int) -> None:
        mine = [one for one in self.writings if one.session == session]
        for one in mine:
            self.writings.remove(one)
            self.unhold(one.ids)
        for one in mine:
            self.end_model(one, False)
        self.drop_left()

    def save(self) -> None:
        at, chain = self.chain()
        space, keys = self.spaces[at], self.keys[at][chain]
        count = self.random.randint(1, LENGTH)
        granted = self.catalog.reserve(
            SessionId(999_999), space, 0, 0, b"", keys[: count * KEY_BYTES]
        )
        if granted.lease:
            self.catalog.commit(
                SessionId(999_999), granted.lease, 0, len(granted.slots) // SLOT_BYTES
            )
        self.drop_left()

    def forget(self) -> None:
        at, chain = self.chain()
        first = self.random.randrange(LENGTH)
        self.catalog.forget(self.spaces[at], self.keys[at][chain][first * KEY_BYTES :])
        self.drop_left()

    def load(self) -> None:
        """Load with a lease, which is released now or later; the slots of copies are read later."""
        at, chain = self.chain()
        gpu = self.random.choice(GPUS)
        keys = self.keys[at][chain][: self.random.randint(1, LENGTH) * KEY_BYTES]
        found = self.catalog.load(SessionId(888_888), self.spaces[at], keys, 60.0, [0], 0.0)
        if not found.lease:
            return
        ids = array("I", self.catalog.reading.held(SessionId(888_888), found.lease)).tolist()
        for one in ids:
            self.held[one] = self.held.get(one, 0) + 1
        (part,) = self.catalog.with_copies(f"{ENGINE} {gpu}", found.lease, list(found.parts))
        joined = any(other == gpu for other in self.sessions.values())
        if gpu in self.models and joined:
            model = self.models[gpu]
            found_here = [one in model.ready for one in ids]
            slots = part.hot or bytes(len(part.slots))
            assert found_here == [
                any(slots[n : n + SLOT_BYTES]) for n in range(0, len(slots), SLOT_BYTES)
            ]
            for one in ids:
                model.use(one)
        if part.hot:
            number = self.catalog.hot.arenas[gpu].number
            reading = Reading(number)
            for n, (index, zero, offset, generation) in enumerate(SLOT.iter_unpack(part.hot)):
                if generation:
                    assert (index, zero) == (number, 0) and offset % PAGE == 0
                    name = self.name(at, chain, part.first + n)
                    reading.blocks.append((name, offset // PAGE, self.pages[at], generation))
            self.readings.append(reading)
            self.hits += len(reading.blocks)
            for block in reading.blocks:  # under the lease every copy is there
                assert self.read(number, block) is True
        if self.random.random() < 0.5:
            self.release(found.lease, ids)
        else:
            self.leases.append((found.lease, ids))

    def release_some(self) -> None:
        if self.leases:
            self.release(*self.leases.pop(self.random.randrange(len(self.leases))))

    def release(self, lease: LeaseId, ids: list[int]) -> None:
        self.catalog.release(SessionId(888_888), lease)
        self.unhold(ids)
        self.drop_left()

    def reserve(self) -> None:
        """Ask for copies of blocks by slots that were seen now, or long ago."""
        if not self.sessions:
            return
        session = self.random.choice([*self.sessions])
        gpu = self.sessions[session]
        at, chain = self.chain()
        found = self.catalog.load(
            SessionId(888_888), self.spaces[at], self.keys[at][chain], 60.0, [0], 0.0
        )
        if not found.lease:
            return
        ids = array("I", self.catalog.reading.held(SessionId(888_888), found.lease)).tolist()
        (part,) = found.parts
        picked = sorted(self.random.sample(range(len(ids)), self.random.randint(1, len(ids))))
        slots = b"".join(part.slots[n * SLOT_BYTES : (n + 1) * SLOT_BYTES] for n in picked)
        self.catalog.release(SessionId(888_888), found.lease)
        stale = self.random.random() < 0.1
        if stale:  # as if the slot had another block now
            extent, zero, offset, generation = SLOT.unpack(slots[:SLOT_BYTES])
            slots = SLOT.pack(extent, zero, offset, generation + 1) + slots[SLOT_BYTES:]
        again = self.random.random() < 0.6
        granted = self.catalog.hot.reserve(SessionId(session), slots, again)
        wanted = [ids[n] for n in picked][stale:]
        outcomes = list(granted.outcomes)
        if stale:
            assert outcomes.pop(0) == LEAVING
        if gpu in self.models:
            leased = {one for one, count in self.held.items() if count} | set(wanted)
            assert outcomes == self.models[gpu].reserve(wanted, again, leased)
        if not granted.lease:
            assert 0 not in outcomes
            return
        number = self.catalog.hot.arenas[gpu].number
        names = [self.name(at, chain, part.first + n) for n in picked][stale:]
        taken = [
            (name, one) for name, one, code in zip(names, wanted, outcomes, strict=True) if not code
        ]
        blocks = []
        for (name, _), (index, _, offset, _) in zip(
            taken, SLOT.iter_unpack(granted.slots), strict=True
        ):
            assert index == number and offset // PAGE + self.pages[at] <= self.hot_pages
            blocks.append((name, offset // PAGE, self.pages[at]))
        mine = [one for _, one in taken]
        for one in mine:
            self.held[one] = self.held.get(one, 0) + 1
        self.writings.append(Writing(granted.lease, session, gpu, number, mine, blocks))

    def write(self) -> None:
        """A writer writes, whatever has happened to its connection and to the holder."""
        if self.writings:
            one = self.random.choice(self.writings)
            self.write_all(one)

    def write_all(self, one: Writing) -> None:
        device = self.devices[one.number]
        for name, first, pages in one.blocks:
            for page in range(pages):
                device[first + page] = (name, page)

    def end_write(self) -> None:
        mine = [one for one in self.writings if one.session in self.sessions]
        if not mine:
            return
        one = self.random.choice(mine)
        self.writings.remove(one)
        good = self.random.random() < 0.8
        if good:
            self.write_all(one)
        if not one.lease:
            return
        self.catalog.hot.end(SessionId(one.session), one.lease, good)
        self.finish(one, good)

    def end_another(self) -> None:
        """No session ends a lease of another one."""
        if self.writings and (one := self.random.choice(self.writings)).lease:
            with pytest.raises(Refused, match="not a lease"):
                self.catalog.hot.end(SessionId(777_777), one.lease, True)

    def finish(self, one: Writing, good: bool) -> None:
        self.unhold(one.ids)
        self.end_model(one, good)
        self.drop_left()

    def end_model(self, one: Writing, good: bool) -> None:
        if one.lease and one.gpu in self.models:
            self.models[one.gpu].end(one.ids, good)

    def read_later(self) -> None:
        if self.readings:
            at = self.random.randrange(len(self.readings))
            reading = self.readings[at]
            for block in reading.blocks:
                self.reads += 1
                self.stale += self.read(reading.number, block) is None
            if self.random.random() < 0.2:
                self.readings.pop(at)

    def read(self, number: int, block: tuple[bytes, int, int, int]) -> bool | None:
        """True if these are the block's bytes, None if the generation says that they need not be."""
        name, first, pages, generation = block
        seen = [self.devices[number].get(first + page) for page in range(pages)]
        (now,) = struct.unpack_from("<Q", self.tables[number], first * 8)
        if now != generation:
            return None
        assert seen == [(name, page) for page in range(pages)], "wrong bytes"
        return True

    # --- helpers of the test -----------------------------------------------------------------------

    def chain(self) -> tuple[int, int]:
        return self.random.randrange(len(self.spaces)), self.random.randrange(CHAINS)

    def name(self, at: int, chain: int, block: int) -> bytes:
        return bytes([at]) + self.keys[at][chain][block * KEY_BYTES : (block + 1) * KEY_BYTES]

    def unhold(self, ids: list[int]) -> None:
        for one in ids:
            self.held[one] -= 1

    def drop_left(self) -> None:
        """Let the models drop the copies of blocks that left memory. Their ids may be those of others now."""
        for gpu, model in self.models.items():
            arena = self.catalog.hot.arenas[gpu]
            ids = array("I", model.ready).tobytes()
            if ids:
                slots = self.catalog.blocks.store.copies(arena.number, ids, False)
                for n, one in enumerate([*model.ready]):
                    if not any(slots[n * SLOT_BYTES : (n + 1) * SLOT_BYTES]):
                        assert not self.held.get(one), "a held block lost its copy"
                        model.drop(one)

    def check(self) -> None:
        store = self.catalog.blocks.store
        store.check()
        for gpu, arena in self.catalog.hot.arenas.items():
            counts = store.hot_counts(arena.number)
            if gpu in self.models:
                model = self.models[gpu]
                assert counts["blocks"] == len(model.ready) and counts["writing"] == len(
                    model.writing
                )
                assert counts["evicted"] == model.evicted
            writers = [one for one in self.writings if one.gpu == gpu and one.lease]
            assert counts["writing"] == sum(len(one.ids) for one in writers)
            quarantined = sum(len(one.ids) for one in writers if one.session in self.lost)
            assert self.catalog.hot.quarantined_blocks(arena) == quarantined

    OPERATIONS = (
        (save, 20), (load, 24), (reserve, 24), (write, 10), (end_write, 22), (read_later, 12),
        (release_some, 10), (forget, 4), (connect, 4), (lose, 3), (end_process, 3), (end_another, 1),
        (replace_holder, 0.2),
    )  # fmt: skip

    def run(self, operations: int) -> None:
        kinds, weights = zip(*self.OPERATIONS, strict=True)
        for at, operation in enumerate(self.random.choices(kinds, weights, k=operations)):
            operation(self)
            if len(self.sessions) > 6:
                self.lose()
            if len(self.readings) > 50:
                self.readings.pop(0)
            if at % 200 == 0:
                self.check()
        self.check()

    def settle(self) -> None:
        """End everything: nothing is left."""
        while self.sessions:
            self.lose()
        while self.lost:
            self.end_process()
        while self.leases:
            self.release(*self.leases.pop())
        assert not self.writings and not any(self.held.values())
        self.check()
        for at, space in enumerate(self.spaces):
            for keys in self.keys[at]:
                self.catalog.forget(space, keys)
        self.catalog.blocks.store.check()
        assert len(self.catalog.leases) == 0
        for arena in self.catalog.hot.arenas.values():
            counts = self.catalog.blocks.store.hot_counts(arena.number)
            assert (counts["blocks"], counts["writing"], counts["used_bytes"]) == (0, 0, 0)
        assert self.catalog.counts()["blocks"]["ready"] == 0


ONE_SIZE, MIXED = [1], [1, 3, 7]


def run(seed: int, sizes: list[int], slots: int, operations: int) -> Machine:
    machine = Machine(seed, sizes, slots)
    try:
        machine.run(operations)
        machine.settle()
    except BaseException as error:
        error.add_note(f"seed {seed}, sizes {sizes}, {slots} slots")
        raise
    return machine


@pytest.mark.parametrize("sizes", [ONE_SIZE, MIXED], ids=["one size", "mixed sizes"])
def test_random_operations_never_show_wrong_bytes_and_leak_nothing(sizes: list[int]) -> None:
    reads = stale = hits = 0
    for seed in range(4):
        machine = run(seed, sizes, (2, 9, 30, 100)[seed], effort(2500, 25_000, 100_000))
        reads, stale, hits = reads + machine.reads, stale + machine.stale, hits + machine.hits
    assert hits > 300 and reads > 1000 and 0 < stale < reads, "the operations did not meet"


@pytest.mark.slow
def test_a_million_operations_never_show_wrong_bytes_and_leak_nothing() -> None:
    for seed in range(100, 120):
        run(seed, (ONE_SIZE, MIXED)[seed % 2], (2, 5, 12, 30, 100)[seed % 5], 50_000)
