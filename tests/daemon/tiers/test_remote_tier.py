"""The remote tier fulfils the contract of tiers, with each kind of real store. The store itself bounds what
it holds, and the daemon evicts nothing there: the tests of that do not apply."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import uvloop

from conformance.tier_tests import (
    BLOCK_BYTES,
    LEASE_S,
    ME,
    MEMORY_BYTES,
    PART_BYTES,
    SHARDS,
    Identity,
    ServedTenant,
    TierTests,
    name,
)
from kvtier import wire
from kvtier.errors import TierError
from kvtier.wire import SLOT
from kvtier_daemon.app import MakeLowerTier
from kvtier_daemon.catalog import Found, KnownSpace
from kvtier_daemon.catalog.demotion import WritePlan
from kvtier_daemon.config.current import CurrentConfig
from kvtier_daemon.config.schema import Config, load
from kvtier_daemon.internal_errors import InternalErrors
from kvtier_daemon.observing.events import EventFeed
from kvtier_daemon.observing.histogram import Latencies
from kvtier_daemon.planning import planner
from kvtier_daemon.planning.read_order import STALE_S
from kvtier_daemon.serving.recorder import Recorder
from kvtier_daemon.serving.requests import Requests
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.base import CopiedBlock, NullTier
from kvtier_daemon.tiers.remote import archiving, fetching, probing, sharing
from kvtier_daemon.tiers.remote import families as remote_families
from kvtier_daemon.tiers.remote import warming as remote_warming
from kvtier_daemon.tiers.remote.driver import StoreDriver, StoreProcess
from kvtier_daemon.tiers.remote.families import RETRY_S, TELL_S
from kvtier_daemon.tiers.remote.handing_over import HandingOver
from kvtier_daemon.tiers.remote.known import names_of
from kvtier_daemon.tiers.remote.messages import (
    FAILED,
    Answer,
    GetObject,
    HeadObjects,
    PutObject,
    Request,
    packed,
)
from kvtier_daemon.tiers.remote.objects import object_name
from kvtier_daemon.tiers.remote.places import Place, restorable
from kvtier_daemon.tiers.remote.tier import RemoteTier, SharedBlocks
from kvtier_daemon.tiers.remote.wanted import WantedList, list_identity, list_name
from kvtier_daemon.tiers.remote.warming import Warming
from kvtier_daemon.tiers.tier_keys import TierKeys
from kvtier_daemon.tiers.warm import Extent, WarmTier
from kvtier_kernels import Mapping as MappedExtent
from support.effort import effort
from support.faulty_store import FaultyStore
from support.heads import ranks_spec
from support.mooncake import MooncakePool, master_program
from support.object_store import ObjectStore


class Below(NullTier):
    """The remote tier of one tenant in the place of the tier below memory."""

    def __init__(self, shared: SharedBlocks) -> None:
        super().__init__()
        self.shared = shared
        self.forget = shared.forget  # type: ignore[assignment]
        self.saved = shared.saved  # type: ignore[assignment]


class OnlyRemote:
    """A `LowerTier` that starts and ends the remote tier."""

    name = "remote"
    tier = None
    hangs = False

    def __init__(
        self, settings: CurrentConfig, tenants: Mapping[str, Tenant], warm: WarmTier,
        unforeseen: InternalErrors,
    ) -> None:  # fmt: skip
        self.remote = RemoteTier(settings, tenants)
        self._tenants = tenants

    async def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self.remote.open()
        for tenant in self._tenants.values():
            assert isinstance(tenant.shared, SharedBlocks)
            tenant.tier = Below(tenant.shared)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self.remote.start(tasks)

    def map(self, extent: Extent) -> None:
        self.remote.map(extent)

    def run_periodic(self) -> None:
        self.remote.run_periodic()

    def probe(self) -> None: ...
    def reconfigure(self, config: Config) -> None: ...

    def order(self, tier: str, order: str) -> dict[str, Any]:
        return {}

    def state(self, tier: str) -> str:
        return "on"

    def report(self, tenants: Collection[str]) -> dict[str, Any]:
        return self.remote.report(tenants)

    async def end_moving(self, told: Callable[[str], None]) -> None:
        await self.remote.end()

    async def close(self) -> bool:
        return True

    def mappings(self) -> list[MappedExtent]:
        return []


class ServedShared(ServedTenant):
    """The blocks of a tenant, as one host shares them: they are evicted before each load."""

    def __init__(self, folder: Path, config: str, capacity_bytes: int) -> None:
        super().__init__(folder, OnlyRemote, config, capacity_bytes, False)
        shared = self.tenant.shared
        assert isinstance(shared, SharedBlocks)
        self.shared = shared
        self.driver = shared.fetcher._queue.driver
        self._until(lambda: self.driver.is_on)

    def names(self, identity: Identity) -> bytes:
        places = self.shared.fetcher._places.of(self._space(identity))
        return b"".join(names_of(identity.key, place.mask) for place in places)

    def put(self, identity: Identity, data: bytes) -> bool:
        """Save a block, and wait until the store has it."""
        known, names = self.shared.fetcher._queue.known, self.names(identity)
        if not super().put(identity, data):
            return False
        self._until(lambda: known.present(names) == len(names) // 32)
        return True

    async def _loaded(self, identity: Identity) -> Found:
        catalog, space, shared = self.tenant.catalog, self._space(identity), self.shared
        for group in range(len(space.spec.cache_groups)):
            catalog.blocks.make_room(space.index, group, MEMORY_BYTES // PART_BYTES)
        self._requests += 1
        request = (int(ME), self._requests)
        while True:
            found = catalog.load(ME, space, identity.key, LEASE_S, range(SHARDS), time.monotonic())
            if found.ready or not (count := shared.beyond(space, identity.key, 0)):
                break
            coming, _, why = shared.fetch(
                space, identity.key, 0, count, request=request, within_s=60.0
            )
            if not coming:
                assert why == "not_read", why
                break
            read = asyncio.Event()
            if shared.pending.call_when_read(request, read.set):
                async with asyncio.timeout(60):
                    await read.wait()
        catalog.holds.end(request)
        return found


Store = ObjectStore | MooncakePool


@pytest.fixture(scope="module", params=[ObjectStore, MooncakePool])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    store: Store = request.param(tmp_path_factory.mktemp("store"))
    yield store
    store.stop()


def wait_for_end(pid: int) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)


NICE_DAEMON = """
import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from kvtier_daemon.config.schema import load
from kvtier_daemon.tiers.remote.tier import OpenRemote
from kvtier_daemon.tiers.tier_keys import TierKeys


async def encode():
    settings = SimpleNamespace(config=load(Path(sys.argv[1]), environ={}).config)
    remote = OpenRemote(settings.config.remote, TierKeys("remote", settings, []), Path(sys.argv[2]))
    if sys.argv[3] == "filtered":
        nice = os.nice
        os.nice = lambda by: nice(by) if not by else os.close(-1)  # fails
    else:
        os.nice(15)
        if not os.geteuid():
            os.setuid(65534)  # who may not make a thread less nice
    print(await asyncio.get_running_loop().run_in_executor(remote.encoder, os.nice, 0))


asyncio.run(encode())
"""


@pytest.mark.parametrize(("daemon", "by"), [("nice", 19), ("filtered", 0)])
def test_blocks_are_encoded_also_in_a_daemon_that_cannot_be_nicer(
    tmp_path: Path, daemon: str, by: int
) -> None:
    """It was started as nice, or the service's system call filter forbids it."""
    file = tmp_path / "kvtier.toml"
    file.write_text(f'state = "{tmp_path}"\n[warm]\nsize = "64MiB"\n[remote]\nbucket = "blocks"\n')
    command = [sys.executable, "-c", NICE_DAEMON, str(file), str(tmp_path), daemon]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    assert ended.stdout == f"{by + os.nice(0) if daemon == 'filtered' else by}\n"


@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_call_that_waits_actively_lets_all_other_threads_go_before_it(
    monkeypatch: pytest.MonkeyPatch, is_allowed: bool
) -> None:
    """Unless the service's system call filter forbids it."""
    master_program()  # skips without the client
    from kvtier_daemon.tiers.remote.mooncake import Batches

    nice = os.nice

    def filtered(by: int) -> int:
        if not is_allowed:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return nice(by)

    async def call() -> int:
        calls = Batches[PutObject](lambda some: [nice(0) for _ in some], lambda one: 1, 5, 30.0)
        return await calls.result(PutObject(1, "a", 0, 1))

    monkeypatch.setattr(os, "nice", filtered)
    before = nice(0)
    assert asyncio.run(asyncio.wait_for(call(), 60)) == min(before + 5 * is_allowed, 19)
    assert nice(0) == before


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_requests_to_a_process_that_has_just_ended_fail(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop], store: Store,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The driver learns of the end some turns of the loop later."""
    file = tmp_path / "kvtier.toml"
    file.write_text(f'state = "{tmp_path}"\n[warm]\nsize = "64MiB"\n{store.config()}')
    settings = cast(CurrentConfig, SimpleNamespace(config=load(file, environ={}).config))
    config = settings.config.remote
    assert config is not None
    answers: list[Answer] = []

    async def ask() -> None:
        driver = StoreDriver(config, TierKeys("remote", settings, []), lambda: None)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(driver.run())
            while not driver.is_on:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            pid = driver.pid
            os.kill(pid, signal.SIGKILL)
            wait_for_end(pid)  # the loop does not turn
            sent = 0
            while driver.pid == pid:
                driver.ask(HeadObjects(driver.next_id(), ["a"]), answers.append)
                sent += 1
                await asyncio.sleep(0)
            assert sent > 1
            while len(answers) < sent:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            running.cancel()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(ask())
    assert {one.outcome for one in answers} == {FAILED}
    assert "Exception in callback" not in caplog.text


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_stop_while_the_process_starts_ends_it_and_logs_no_traceback(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop], fails: bool,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A daemon that stops cancels the driver, and its loop ends at once."""
    file = tmp_path / "kvtier.toml"
    remote = '[remote]\nbucket = "fleet"\nendpoint = "http://127.0.0.1:1"\n'
    file.write_text(f'state = "{tmp_path}"\n[warm]\nsize = "64MiB"\n{remote}')
    settings = cast(CurrentConfig, SimpleNamespace(config=load(file, environ={}).config))
    config = settings.config.remote
    assert config is not None
    starts, stopped = threading.Event(), threading.Event()
    started: list[StoreProcess] = []

    def start(buffer_bytes: int) -> StoreProcess:
        starts.set()
        assert stopped.wait(30)
        time.sleep(0.1)  # the loop ends meanwhile
        if fails:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(StoreProcess(buffer_bytes))
        return started[0]

    monkeypatch.setattr("kvtier_daemon.tiers.remote.driver.StoreProcess", start)

    async def stop() -> None:
        driver = StoreDriver(config, TierKeys("remote", settings, []), lambda: None)
        running = asyncio.create_task(driver.run())
        while not starts.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.wait([running])
        stopped.set()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(stop())
    assert not caplog.records
    assert all(one._process.poll() is not None for one in started)
    assert len(started) == (not fails)


def test_requests_of_one_turn_of_the_loop_are_sent_together_or_never(
    tmp_path: Path, store: Store
) -> None:
    """Places of a buffer are those of one process: the next one gets no request of the one before it."""
    file = tmp_path / "kvtier.toml"
    file.write_text(f'state = "{tmp_path}"\n[warm]\nsize = "64MiB"\n{store.config()}')
    settings = cast(CurrentConfig, SimpleNamespace(config=load(file, environ={}).config))
    config = settings.config.remote
    assert config is not None

    async def ask() -> None:
        driver, answers = StoreDriver(config, TierKeys("remote", settings, []), lambda: None), []
        ends: list[socket.socket] = []

        async def connect() -> None:
            end, process = socket.socketpair()
            ends.append(process)
            process.setblocking(False)
            _, driver._writer = await asyncio.open_connection(sock=end)

        def request() -> GetObject:
            return GetObject(driver.next_id(), "a", 0, 10)

        await connect()
        requests = [request() for _ in range(3)]
        for one in requests:
            driver.ask(one, answers.append)
        with pytest.raises(BlockingIOError):
            ends[0].recv(1 << 16)
        await asyncio.sleep(0)
        assert ends[0].recv(1 << 16) == b"".join(map(packed, requests))
        driver.ask(request(), answers.append)
        await driver._end("it ended")
        await connect()
        last = request()
        driver.ask(last, answers.append)
        await asyncio.sleep(0)
        assert ends[1].recv(1 << 16) == packed(last)
        assert [one.outcome for one in answers] == [FAILED] * 4
        driver._writer.close()
        for end in ends:
            end.close()

    asyncio.run(ask())


class TestRemoteTier(TierTests):
    capacity_bytes = 16 * BLOCK_BYTES
    turns = effort(40, 300, 600)
    test_a_full_tier_evicts_old_blocks_for_new_ones = None  # type: ignore[assignment]
    test_a_held_block_stays_under_pressure = None  # type: ignore[assignment]

    @pytest.fixture
    def tier(self, tmp_path: Path, store: Store) -> Iterator[ServedTenant]:
        # Each test has a prefix of its own.
        config = store.config(more='write = "all"\n').replace('"fleet"', f'"{tmp_path.name}"')
        tier = ServedShared(tmp_path, config, self.capacity_bytes)
        yield tier
        tier.close()

    def make_lower(self) -> MakeLowerTier:
        return OnlyRemote

    @pytest.mark.sampled(1)
    def test_a_tier_full_of_held_blocks_refuses_new_ones_and_keeps_the_held_ones(
        self, tier: ServedTenant
    ) -> None:
        super().test_a_tier_full_of_held_blocks_refuses_new_ones_and_keeps_the_held_ones(tier)

    def test_a_block_that_memory_lost_comes_from_the_store(self, tier: ServedShared) -> None:
        identity = Identity(key=bytes([7]) * 32)
        assert tier.put(identity, self.data(tier, 7))
        assert tier.get(identity) == self.data(tier, 7)
        assert tier.shared.fetcher.counts["read"] == 4


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[FaultyStore]:
    with FaultyStore(tmp_path) as store:
        yield store


@pytest.fixture
def alone(tmp_path: Path, faulty: FaultyStore) -> Iterator[ServedShared]:
    """A tenant whose store holds nothing."""
    tier = ServedShared(tmp_path, faulty.config, 16 * BLOCK_BYTES)
    yield tier
    tier.close()


def test_a_long_prefix_that_is_in_the_store_does_not_hold_the_loop(alone: ServedShared) -> None:
    sharer, known = alone.shared.sharer, alone.shared.fetcher._queue.known
    space, keys = alone._space(Identity()), os.urandom(32 * 8192)
    for place in alone.shared.fetcher._places.of(space):
        known.note(names_of(keys, place.mask), True)
    in_store = sum(
        sum(known.good(names_of(keys, place.mask)))
        for place in alone.shared.fetcher._places.of(space)
    )
    assert in_store > 8192  # the others were replaced in the set, and memory has none of them
    sharer.used(space, keys)
    pauses = list(sharer._next())
    assert pauses == [b""] * 8


def test_a_prefix_that_is_in_the_store_is_looked_up_once_in_some_seconds(
    alone: ServedShared,
) -> None:
    sharer, known = alone.shared.sharer, alone.shared.fetcher._queue.known
    space, keys, now = alone._space(Identity()), os.urandom(32 * 4), [1000.0]
    sharer._clock = lambda: now[0]

    def looks() -> int:
        """How many prefixes are looked up after a use of this one."""
        sharer.used(space, keys)
        queued = sharer.queued
        for _ in range(queued):
            assert set(sharer._next()) == {b""}
        return queued

    assert (looks(), looks()) == (1, 1), "the store lacks it"
    for place in alone.shared.fetcher._places.of(space):
        known.note(names_of(keys, place.mask), True)
    assert (looks(), looks(), looks()) == (1, 0, 0)
    now[0] += sharing.LATELY_S
    assert (looks(), looks()) == (1, 0)
    alone.shared.forget(space, keys[:32], None)
    assert (looks(), looks()) == (1, 1)


def test_a_slow_or_late_store_is_measured_by_reads_that_no_request_waits_for(
    tmp_path: Path, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is promised from an assumption. A store whose reads were late is used again when they are in
    time, and one that was slow when it was measured again."""
    for module in (probing, planner):
        monkeypatch.setattr(module, "LATE_S", 60.0)  # the machine may be busy
    tier = ServedShared(tmp_path, faulty.config + 'write = "all"\n', 16 * BLOCK_BYTES)
    fetcher, requests = tier.shared.fetcher, 0
    link, names = fetcher._queue.link, [Identity(key=bytes([at]) * 32) for at in range(1, 6)]
    for one in names:
        assert tier.put(one, os.urandom(BLOCK_BYTES))
    space = tier._space(names[0])
    space.prefill = (1.0, 0.0)

    def ask(number: int) -> str:
        """The reason of the answer to a request for a block that memory does not have."""
        nonlocal requests
        requests += 1
        for group in range(len(space.spec.cache_groups)):
            tier.tenant.catalog.blocks.make_room(space.index, group, MEMORY_BYTES // PART_BYTES)
        link._probed_at = float("-inf")  # the pause between two probes is over

        async def fetch() -> str:
            return fetcher.fetch(
                space, names[number].key, 0, 1, request=(int(ME), requests), within_s=60.0,
                recompute_s=space.recompute_s(1, 0),
            )[2]  # fmt: skip

        why = tier.loop.run_until_complete(fetch())
        tier._until(lambda: not fetcher._queue.parts and not link.reading)
        return why

    try:
        assert link.is_guessed
        assert [ask(0), ask(1)] == ["unreliable", "faster"]
        for _ in range(2):
            link.forecast_ended(False)
        assert [ask(number) for number in (2, 3, 4)] == ["unreliable"] * 3
        assert link.is_reliable
        assert ask(0) == "faster"
        link._busy_s, link._read_bytes = 1e6, 1.0
        assert ask(1) == "slower"
        link._last_at -= STALE_S
        assert [ask(2), ask(3)] == ["slower", "faster"]
    finally:
        tier.close()


def test_an_answer_that_nothing_comes_ends_the_reads_of_its_request(
    tmp_path: Path, faulty: FaultyStore
) -> None:
    """One of the objects of a block is gone: the others are of no use."""
    tier = ServedShared(tmp_path, faulty.config + 'write = "all"\n', 16 * BLOCK_BYTES)
    queue, catalog, one = tier.shared.fetcher._queue, tier.tenant.catalog, Identity(key=name(1))
    server: Any = SimpleNamespace(
        clock=time.monotonic, recorder=Recorder(tmp_path, time.monotonic), loop=tier.loop,
        events=EventFeed(time.monotonic), latencies=Latencies(),
    )  # fmt: skip
    session: Any = SimpleNamespace(id=ME, name="one", verifies=False)
    requests, space = Requests(session, server), tier._space(one)

    def ask() -> tuple[int, int]:
        """How many blocks are ready, and how many come."""

        async def load() -> tuple[int, int]:
            asked = wire.Load(1, space.number, one.key, 1000, [0], 7, 60_000)
            reply = requests.handlers[wire.Load](tier.tenant, asked)
            requests.settle()
            assert isinstance(reply, wire.Loaded)
            return reply.ready, reply.coming

        return tier.loop.run_until_complete(load())

    try:
        assert tier.put(one, os.urandom(BLOCK_BYTES))
        for group in range(len(space.spec.cache_groups)):
            catalog.blocks.make_room(space.index, group, MEMORY_BYTES // PART_BYTES)
        faulty.objects.popitem()
        faulty.pauses_s = 60.0
        assert ask() == (0, 1)
        parts = len(queue.parts)
        tier._until(lambda: len(queue.parts) < parts)
        assert ask() == (0, 0)
        faulty.pauses_s = 0.0
        tier._until(lambda: not queue.parts)
        assert not catalog.holds.of, "blocks are held for a request that does not wait"
    finally:
        tier.close()


def test_a_write_that_is_cancelled_leaves_nothing_as_being_written(
    alone: ServedShared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forget would wait for its end: `kvtier tier on remote` cancels a hand-over."""
    identity, writer, begun = Identity(), alone.shared.writer, threading.Event()
    assert ServedTenant.put(alone, identity, os.urandom(BLOCK_BYTES))
    space = alone._space(identity)
    (place, *_) = alone.shared.fetcher._places.of(space)
    ids = alone.tenant.catalog.blocks.store.present(
        space.index, place.group, place.shard, identity.key
    )
    assert ids
    encode, cancelled = writer._encode, threading.Event()

    def slow(*given: Any) -> list[int]:
        begun.set()
        cancelled.wait()
        return encode(*given)

    monkeypatch.setattr(writer, "_encode", slow)

    async def cancel() -> None:
        sharing = asyncio.create_task(writer.share(ids))
        while not begun.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert writer.sending == 1
        sharing.cancel()
        cancelled.set()
        await asyncio.wait([sharing])

    alone.loop.run_until_complete(cancel())
    child = alone.driver.child
    assert child is not None and child.writes.used == writer.sending == 0


def test_blocks_that_were_forgotten_while_they_waited_are_left_out(
    alone: ServedShared, caplog: pytest.LogCaptureFixture
) -> None:
    """Their ids are free. Those that wait with them are written."""
    gone, kept = Identity(), Identity(key=name(2))
    alone.shared.sharer.accepts = False
    for identity in (gone, kept):
        assert ServedTenant.put(alone, identity, os.urandom(BLOCK_BYTES))
    space, store = alone._space(gone), alone.tenant.catalog.blocks.store
    ids = b"".join(
        store.present(space.index, place.group, place.shard, identity.key)
        for place in alone.shared.fetcher._places.of(space) for identity in (gone, kept)
    )  # fmt: skip
    alone.forget(gone)
    alone.loop.run_until_complete(alone.shared.writer.share(ids))
    known, names = alone.shared.fetcher._queue.known, alone.names(kept)
    alone._until(lambda: known.present(names) == len(names) // 32)
    assert "internal error" not in caplog.text


def test_an_internal_error_in_a_write_leaves_nothing_behind_and_later_blocks_are_written(
    alone: ServedShared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer, child = alone.shared.writer, alone.driver.child
    encode, failed = writer._encode, threading.Event()

    def fail_once(*given: Any) -> list[int]:
        if failed.is_set():
            return encode(*given)
        failed.set()
        raise RuntimeError("planted")

    alone.shared.sharer.write = sharing.ALL
    monkeypatch.setattr(sharing, "FAILED_S", 0.01)
    monkeypatch.setattr(writer, "_encode", fail_once)
    assert ServedTenant.put(alone, Identity(), os.urandom(BLOCK_BYTES))
    alone._until(failed.is_set)
    assert alone.put(Identity(key=os.urandom(32)), os.urandom(BLOCK_BYTES))
    assert "planted" in caplog.text
    assert child is not None and child.writes.used == writer.sending == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"nbytes": -1},
        {"nbytes": 1 << 40},
        {"first_s": float("nan")},
        {"first_s": -1.0},
        {"first_s": 1e300},
    ],
)
def test_a_senseless_answer_of_the_process_is_a_miss(
    alone: ServedShared, wrong: dict[str, Any]
) -> None:
    identity = Identity()
    queue, space = alone.shared.fetcher._queue, alone._space(identity)
    queue.known.note(alone.names(identity), True)
    ask = alone.driver.ask

    def lie(request: Request, done: Callable[[Answer], None]) -> None:
        if isinstance(request, GetObject):
            asyncio.get_running_loop().call_soon(
                done, msgspec.structs.replace(Answer(request.id), **wrong)
            )
        else:
            ask(request, done)

    alone.driver.ask = lie  # type: ignore[method-assign]

    async def fetch() -> tuple[int, float, str]:
        return alone.shared.fetch(space, identity.key, 0, 1, request=(1, 1))

    assert alone.loop.run_until_complete(fetch())[0] == 1
    alone._until(lambda: not queue.parts)
    assert queue.driver.child is not None and queue.driver.child.reads.used == 0
    assert 0 <= queue.latency_s < 60
    assert alone.shared.fetcher.counts["read"] == 0
    queue.cost(1)  # of the next lookup


# --- warm-up ---------------------------------------------------------------------------------------


class SlowRecovery:
    """The recovery of the tenants except the one that is served ends when told."""

    ended = False

    def is_complete(self, below: Below) -> bool:
        return self.ended or below.shared.fetcher.tenant == "it"


@pytest.fixture
def recovery(monkeypatch: pytest.MonkeyPatch) -> SlowRecovery:
    one = SlowRecovery()
    monkeypatch.setattr(Below, "is_complete", property(one.is_complete))
    return one


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tenants whose warm-up has begun."""
    tenants, run = list[str](), Warming.run

    async def noted(self: Warming) -> None:
        tenants.append(self._tenant.name)
        await run(self)

    monkeypatch.setattr(Warming, "run", noted)
    return tenants


@pytest.fixture
def warming(tmp_path: Path, recovery: SlowRecovery, warmed: list[str]) -> Iterator[ServedShared]:
    with FaultyStore(tmp_path) as store:
        tier = ServedShared(tmp_path, f"{store.config}warm_up_percent = 50\n", 16 * BLOCK_BYTES)
        yield tier
        tier.close()


def pass_time(tier: ServedShared, seconds: float) -> None:
    until = time.monotonic() + seconds
    tier._until(lambda: time.monotonic() > until)


@pytest.mark.parametrize("change", ["reload", "hand-over", "off", "none"])
def test_what_changes_before_the_first_warm_up_does_not_end_the_daemon(
    warming: ServedShared, recovery: SlowRecovery, warmed: list[str], change: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    remote = cast(OnlyRemote, warming.lower).remote
    assert remote._remote is not None
    pass_time(warming, 0.5)  # it waits for the recovery
    if change == "reload":
        remote.reconfigure(msgspec.structs.replace(remote._remote.config, warm_up_percent=0))
    elif change == "off":
        remote.order("off")
    elif change == "hand-over":
        monkeypatch.setattr(HandingOver, "run", lambda self: asyncio.sleep(60))
        remote.order("hand-over")
    recovery.ended = True
    pass_time(warming, 0.5)
    assert not warming._serving.done()
    if change == "none":
        warming._until(lambda: warmed == ["it", "another"])
    else:
        assert not warmed


def test_blocks_of_one_tenant_do_not_prevent_the_warm_up_of_others(
    warming: ServedShared, recovery: SlowRecovery, warmed: list[str]
) -> None:
    assert ServedTenant.put(warming, Identity(), os.urandom(BLOCK_BYTES))
    warming._until(lambda: warming.shared._saved == 4)
    warming.shared._saved = 0  # as if it were from before the start
    recovery.ended = True
    warming._until(lambda: bool(warmed))
    pass_time(warming, 0.1)
    assert warmed == ["another"]


def test_what_is_saved_before_the_first_warm_up_does_not_prevent_it(
    warming: ServedShared, recovery: SlowRecovery, warmed: list[str]
) -> None:
    assert ServedTenant.put(warming, Identity(), os.urandom(BLOCK_BYTES))
    warming._until(lambda: warming.shared._saved == 4)  # the tier has learned of it
    recovery.ended = True
    warming._until(lambda: warmed == ["it", "another"])


def test_a_failure_in_one_tenant_does_not_end_the_warm_up_of_others(
    alone: ServedShared, monkeypatch: pytest.MonkeyPatch, warmed: list[str]
) -> None:
    remote = cast(OnlyRemote, alone.lower).remote
    monkeypatch.setattr(alone.shared.warming, "_lists", None)
    work = remote._do("warm-up", remote._of.values())
    alone.loop.run_until_complete(work)
    assert warmed == ["it", "another"]


def test_lists_wait_for_room_in_the_buffer(alone: ServedShared) -> None:
    objects, child = alone.shared.warming.objects, alone.driver.child
    assert child is not None
    spec, of = alone._space(Identity()).spec, list_identity(bytes(32), bytes(32))
    one = WantedList(of.space, spec, (bytes(32),), array("d", [1.0]), array("I", [0]))
    for part in (child.reads, child.writes):
        all_of_it = part.size - part.used
        at = part.take(all_of_it)
        assert at is not None
        alone.loop.call_later(0.2, part.give, at, all_of_it)

    async def both() -> tuple[bool, bytes]:
        name = list_name(bytes(32), of)
        return await objects.put(name, one.spec, of, b"a list"), await objects.get(name, of)

    assert alone.loop.run_until_complete(both()) == (True, b"a list")


def test_a_warm_up_looks_at_a_part_of_a_long_chain_at_once(
    alone: ServedShared, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def noted(space: KnownSpace, places: list[Place], has: list[bytes], first: int) -> int:
        looks.append(len(has[0]))
        return restorable(space, places, has, first)

    monkeypatch.setattr("kvtier_daemon.tiers.remote.warming.restorable", noted)
    identity = Identity()
    assert ServedTenant.put(alone, identity, os.urandom(BLOCK_BYTES))
    keys = identity.key + os.urandom(32 * 1200)
    alone.loop.run_until_complete(alone.shared.warming._read(alone._space(identity), keys))
    assert looks and max(looks) <= 1024


class Leaves:
    """A place with blocks of memory, as a `TierLeaving` and its `LeavingBlocks`. `errors` are raised by the
    next looks and reads."""

    def __init__(self, tier: ServedShared, blocks: int) -> None:
        for number in range(blocks):
            assert ServedTenant.put(tier, Identity(key=name(number)), os.urandom(BLOCK_BYTES))
        self.name = 1, 1
        self.is_there = self.is_next = True
        self.errors_of_next: list[Exception] = []
        self.errors_of_read: list[Exception] = []
        self._tier = tier
        self._catalog = tier.tenant.catalog
        space, keys = tier._space(Identity()), b"".join(map(name, range(blocks)))
        self._ids = b"".join(
            self._catalog.blocks.store.present(space.index, one.group, one.shard, keys)
            for one in tier.shared.fetcher._places.of(space)
        )
        self.count = len(self._ids) // 4
        assert self.count == blocks * SHARDS * 2

    def keep(self, count: int) -> None:
        """Of the first group and shard."""
        self._ids, self.count = self._ids[: 4 * count], count

    def next(self) -> list[Leaves]:
        if self.errors_of_next:
            raise self.errors_of_next.pop()
        return [self] if self.is_next else []

    def ids(self, used: bool) -> bytes:
        return self._ids

    def plans(self, ids: bytes) -> dict[int, WritePlan]:
        described = self._catalog.demotions.described(ids, self._catalog.blocks.store.slots(ids))
        return dict(zip(array("I", ids), described, strict=True))

    async def read(self, plans: Mapping[int, WritePlan]) -> dict[int, CopiedBlock]:
        if self.errors_of_read:
            raise self.errors_of_read.pop()
        parts = ((number, plan, SLOT.unpack(plan.slot)) for number, plan in plans.items())
        memory = self._tier.shared.memory
        return {
            number: CopiedBlock(memoryview(memory[extent])[at : at + PART_BYTES], plan.checksum)
            for number, plan, (extent, _, at, _) in parts
        }


@pytest.fixture
def leaves(alone: ServedShared, monkeypatch: pytest.MonkeyPatch) -> Leaves:
    """Memory of a host with an archive is about to be reused."""
    for value in ("ARCHIVE_S", "FAILED_S"):
        monkeypatch.setattr(archiving, value, 0.01)
    leaves = Leaves(alone, 8)
    alone.tenant.tier.leaving = leaves  # type: ignore[misc]
    return leaves


def test_an_error_in_the_archive_does_not_end_the_daemon_or_lose_a_block(
    alone: ServedShared, leaves: Leaves
) -> None:
    """More errors than the tries of a block that the store refuses."""
    archiver = alone.shared.archiver
    leaves.errors_of_next = [OSError(errno.ENOMEM, "no memory")] * 2
    leaves.errors_of_read = [TierError("cold: the disks number extents differently")] * 4
    archiver.archive = "all"
    alone._until(lambda: archiver.counts["archived"] == leaves.count)
    assert not leaves.errors_of_next and not leaves.errors_of_read
    assert archiver.counts["not_archived"] == 0


def test_blocks_of_a_place_that_was_reused_while_the_store_was_off_are_counted_once(
    alone: ServedShared, leaves: Leaves
) -> None:
    archiver = alone.shared.archiver
    alone.driver.switch(False)
    alone._until(lambda: not alone.driver.is_on)
    archiver.archive = "all"
    alone._until(lambda: bool(archiver._places_of))
    leaves.is_there = leaves.is_next = False
    alone._until(lambda: archiver.counts["not_archived"] > 0)
    leaves.name, leaves.is_there, leaves.is_next = (1, 2), True, True
    alone._until(lambda: (1, 2) in archiver._places_of)
    assert archiver.counts["not_archived"] == leaves.count
    alone.driver.switch(True)
    alone._until(lambda: archiver.counts["archived"] == leaves.count)
    leaves.is_next = False
    alone._until(lambda: not archiver._places_of)
    assert archiver.counts["not_archived"] == leaves.count


def test_blocks_that_are_not_written_when_their_place_is_reused_are_counted(
    alone: ServedShared, leaves: Leaves, faulty: FaultyStore
) -> None:
    """Of a place that is reused between two looks, and while its blocks are being written."""
    archiver, faulty.put_s = alone.shared.archiver, 0.5
    archiver.archive = "all"
    alone._until(lambda: alone.shared.writer.sending > 0)
    leaves.is_there = leaves.is_next = False
    alone._until(lambda: not (archiver._places_of or alone.shared.writer.sending))
    archived = archiver.counts["archived"]
    assert 0 < archived < leaves.count
    assert archiver.counts["not_archived"] == leaves.count - archived


def test_a_hand_over_does_not_wait_for_the_writes_of_the_archive(
    alone: ServedShared, leaves: Leaves, faulty: FaultyStore
) -> None:
    shared, keys = alone.shared, b"".join(map(name, range(8)))
    (place, *_) = places = shared.fetcher._places.of(alone._space(Identity()))
    faulty.put_s = 5.0
    leaves.keep(4)
    shared.archiver.archive = "all"
    alone._until(lambda: faulty.puts == shared.writer.sending == 4)
    assert shared.left == 0, "there are always writes of the archive"
    faulty.put_s = 0.0
    shared.writer._known.note(names_of(keys, place.mask), True)
    alone.loop.run_until_complete(shared.handing_over.run())
    assert shared.writer.copying == 4
    assert shared.writer.counts["written"] == 8 * (len(places) - 1)
    shared.accept(False)
    assert shared.left > 0, "a drain waits for the last ones"
    alone._until(lambda: shared.left == 0)


def test_the_archive_pauses_during_a_hand_over(
    alone: ServedShared, leaves: Leaves, faulty: FaultyStore
) -> None:
    shared, faulty.put_s = alone.shared, 0.3
    leaves.is_there, shared.archiver.archive = False, "all"
    alone._until(lambda: bool(shared.archiver._places_of))

    async def hand_over() -> dict[str, int]:
        running = asyncio.create_task(shared.handing_over.run())
        while not shared.handing_over.left:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        leaves.is_there = True
        await running
        return dict(shared.archiver.counts)

    counts = alone.loop.run_until_complete(hand_over())
    assert counts == {"archived": 0, "not_archived": 0}
    assert shared.writer.counts["written"] == leaves.count
    assert not shared.archiver.is_paused


@pytest.fixture
def tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts write their lists at once."""
    monkeypatch.setattr(remote_warming, "TELL_S", 0.05)


def test_a_forget_waits_for_a_list_that_is_on_its_way(
    tells: None, alone: ServedShared, faulty: FaultyStore
) -> None:
    """The list may name the block: it is deleted after its write."""
    warming, space, keys, ended = (
        alone.shared.warming,
        alone._space(Identity()),
        name(1),
        list[str](),
    )
    alone._until(lambda: alone.driver.is_writable)
    warming.share, faulty.put_s = 0.5, 0.5
    warming.used(space, keys)

    async def forget() -> None:
        alone.tenant.shared.forget(space, keys, ended.append)

    alone._until(lambda: faulty.puts > 0)
    alone.loop.run_until_complete(forget())
    alone._until(lambda: bool(ended) and not warming.is_telling)
    assert ended == [""] and faulty.objects == {}


def opened(alone: ServedShared, *ranks: int, heads: int = 4) -> list[KnownSpace]:
    """Spaces of one family."""
    alone.tenant.reshards = True
    alone._until(lambda: alone.driver.is_writable)
    specs = [ranks_spec(one, {"heads": heads}) for one in ranks]
    catalog = alone.tenant.catalog
    return [catalog.spaces.open(alone.tenant.identity_of(spec), spec, ME) for spec in specs]


def test_a_description_is_written_until_that_succeeds_and_then_once_an_hour(
    alone: ServedShared, faulty: FaultyStore
) -> None:
    families, (space,) = alone.shared.families, opened(alone, 2)
    now = 0.0
    families._clock = lambda: now

    def describe() -> tuple[bool, bool]:
        assert families.must_describe(space)
        alone._until(lambda: alone.driver.is_writable)
        alone.loop.run_until_complete(families.describe(space))
        assert not families.must_describe(space)
        return families.is_described(space), bool(faulty.objects)

    faulty.refuses_puts = True
    assert describe() == (False, False)
    faulty.refuses_puts, now = False, now + RETRY_S
    assert describe() == (True, True)
    now += TELL_S - 1
    assert not families.must_describe(space)
    faulty.refuses_puts, now = True, now + 1
    faulty.objects.clear()
    assert describe() == (True, False)  # hosts that read it have it still


def test_a_forget_deletes_objects_that_are_too_large_for_the_buffer(
    alone: ServedShared, faulty: FaultyStore
) -> None:
    """A host with a larger buffer can read them; those of siblings, and of the space itself."""
    (ours, theirs), places = opened(alone, 4, 1), alone.shared.fetcher._places
    alone.loop.run_until_complete(alone.shared.families.describe(theirs))
    told = set(faulty.objects)
    for limit in (places.of(ours)[0].headers.most_bytes, 1):
        faulty.objects |= {
            f"/blocks/{object_name(place.identity(space, name(1)))}": b"?"
            for space in (ours, theirs) for place in places.every(space)
        }  # fmt: skip
        places.limit(limit)
        assert places.of(theirs) == []
        ended = list[str]()

        async def forget(ended: list[str] = ended) -> None:
            assert alone.shared.forget(ours, name(1), ended.append)

        alone.loop.run_until_complete(forget())
        alone._until(lambda ended=ended: bool(ended))
        assert ended == [""] and set(faulty.objects) == told


@pytest.mark.parametrize("reshards", [True, False])
def test_a_purge_ends_if_the_buffer_becomes_too_small_meanwhile(
    alone: ServedShared, reshards: bool
) -> None:
    (space,), ended = opened(alone, 2), list[str]()
    alone.tenant.reshards = reshards

    async def purge() -> None:
        assert alone.shared.purge(space, name(1), ended.append)
        alone.shared.fetcher._places.limit(1)

    alone.loop.run_until_complete(purge())
    alone._until(lambda: bool(ended))
    assert ended == [""]


def test_a_family_is_not_read_completely_if_it_is_too_large_or_the_buffer_has_no_room(
    alone: ServedShared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then forgets fail. Neither says that a description is wrong."""
    families, spaces, child = alone.shared.families, opened(alone, 1, 2, 4), alone.driver.child
    kin = families.kin(spaces[0])
    assert kin is not None and child is not None
    for space in spaces:
        alone.loop.run_until_complete(families.describe(space))

    def read() -> str:
        return alone.loop.run_until_complete(families.read(kin))

    monkeypatch.setattr(remote_warming, "ROOM_S", 0.0)
    taken, size = list[tuple[int, int]](), 8 << 20
    while size:
        if (at := child.reads.take(size)) is not None:
            taken.append((at, size))
        else:
            size //= 2
    assert "cannot be read now: the buffer has no room" in read()
    assert not kin.ignored and "is ignored" not in caplog.text
    for at, nbytes in taken:
        child.reads.give(at, nbytes)
    monkeypatch.setattr(remote_families, "MOST_NAMES", 2)
    assert read().endswith("has more than 2 descriptions")
    monkeypatch.setattr(remote_families, "MOST_NAMES", 3)
    assert read() == "" and len(kin.others) == families.siblings == 2


@pytest.fixture
def looked(alone: ServedShared, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts lookups of objects: in what is known, and in what is read."""
    counts, known, at_of = Counter[str](), alone.shared.fetcher._queue.known, fetching.at_of
    which = known.which

    def counted(names: bytes) -> bytes:
        counts["known"] += len(names) // 32
        return which(names)

    def counted_at(packed: bytes, at: int) -> bytes:
        counts["read"] += 1
        return at_of(packed, at)

    monkeypatch.setattr(known, "which", counted)
    monkeypatch.setattr(fetching, "at_of", counted_at)
    return counts


def test_a_lookup_costs_little_more_if_there_are_siblings(
    alone: ServedShared, looked: Counter[str]
) -> None:
    """None if the own objects suffice; once for each object, and until the first gap, if they do not; and
    what is read for other spaces costs nothing."""
    shared, known = alone.shared, alone.shared.fetcher._queue.known
    ours, *others = opened(alone, 8, 1, 2, 4, heads=8)
    kin = shared.families.kin(ours)
    assert kin is not None
    for space in others:
        alone.loop.run_until_complete(shared.families.describe(space))
    assert alone.loop.run_until_complete(shared.families.read(kin)) == ""
    assert len(shared.families.siblings_of(ours, b"")) == 3
    keys = b"".join(name(number) for number in range(1, 101))

    def note(space: KnownSpace, keys: bytes) -> None:
        for place in shared.fetcher._places.of(space):
            known.note(names_of(keys, place.mask), True)

    def beyond(keys: bytes) -> int:
        looked.clear()
        return shared.beyond(ours, keys, 0, asks=False)

    note(ours, keys[: 32 * 50])
    for space in others:
        note(space, keys[:32])
    assert beyond(keys[: 32 * 50]) == 50
    assert looked["known"] == 50 * 8 and not looked["read"]
    reading = shared.fetcher._queue.names
    reading[shared.fetcher.tenant, others[0].identity] = {bytes(32)}  # for another space
    # The siblings have nothing after the first block: one place of each is looked up, after the 50.
    assert beyond(keys) == 50
    assert looked["known"] == 100 * 8 + 3 * 50 and not looked["read"]
    note(others[1], keys[: 32 * 80])  # two places, of which all eight are made
    assert beyond(keys) == 80
    assert looked["known"] <= 100 * 8 + 2 * 50 + (50 + 30) and not looked["read"]
    reading.clear()


def test_a_request_reads_few_objects_at_once_however_many_a_block_is_made_of(
    alone: ServedShared, faulty: FaultyStore
) -> None:
    shared, known = alone.shared, alone.shared.fetcher._queue.known
    ours, theirs = opened(alone, 1, 32, heads=32)
    kin = shared.families.kin(ours)
    assert kin is not None
    alone.loop.run_until_complete(shared.families.describe(theirs))
    assert alone.loop.run_until_complete(shared.families.read(kin)) == ""
    keys = b"".join(name(number) for number in range(1, 201))
    for place in shared.fetcher._places.of(theirs):
        known.note(names_of(keys, place.mask), True)
    assert shared.beyond(ours, keys, 0, asks=False) == 200
    faulty.waits_s = 1.0

    async def fetch() -> int:
        shared.fetch(ours, keys, 0, 200, within_s=60.0)
        return len(shared.fetcher._queue.parts)

    assert 0 < alone.loop.run_until_complete(fetch()) <= fetching.LIMIT_PARTS
    faulty.waits_s = 0.0
    alone._until(lambda: not shared.fetcher._queue.parts)
    assert not shared.fetcher._queue.names


@pytest.mark.parametrize("theirs", [False, True])
def test_blocks_that_are_being_read_need_no_more_room(
    alone: ServedShared, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch, theirs: bool
) -> None:
    shared, known = alone.shared, alone.shared.fetcher._queue.known
    ours, sibling = opened(alone, 1, 2)
    kin = shared.families.kin(ours)
    assert kin is not None
    alone.loop.run_until_complete(shared.families.describe(sibling))
    assert alone.loop.run_until_complete(shared.families.read(kin)) == ""
    keys = b"".join(name(number) for number in range(8))
    for place in shared.fetcher._places.of(sibling if theirs else ours):
        known.note(names_of(keys, place.mask), True)
    monkeypatch.setattr(fetching, "LIMIT_BYTES", 4 * sum(ours.block_bytes))
    faulty.waits_s = 1.0

    async def fetch() -> list[int]:
        """How many blocks come for a request, for it again, for another one, and after them."""
        asked = [(1, 0), (1, 0), (2, 0), (3, 4)]
        return [
            shared.fetch(ours, keys, first, 8 - first, request=(int(ME), number), within_s=60.0)[0]
            for number, first in asked
        ]

    assert alone.loop.run_until_complete(fetch()) == [4, 4, 4, 0]
    faulty.waits_s = 0.0
    alone._until(lambda: not shared.fetcher._queue.parts)


def test_a_block_with_only_one_part_in_memory_needs_room(
    alone: ServedShared, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (space,) = opened(alone, 2)
    fetcher, keys = alone.shared.fetcher, b"".join(name(number) for number in range(8))
    first, second = fetcher._places.of(space)
    for place in (first, second):
        fetcher._queue.known.note(names_of(keys, place.mask), True)
    arrivals = alone.tenant.catalog.arrivals
    taken, _ = arrivals.reserve(space, first.group, first.shard, b"", keys)
    assert len(taken) == 8
    for block in taken:
        arrivals.arrived(block, bytes(16), [], time.monotonic())
    monkeypatch.setattr(fetching, "LIMIT_BYTES", 4 * sum(space.block_bytes))
    faulty.waits_s = 1.0

    async def fetch() -> int:
        return alone.shared.fetch(space, keys, 0, 8, request=(int(ME), 1), within_s=60.0)[0]

    assert alone.loop.run_until_complete(fetch()) == 4
    assert len(fetcher._queue.parts) == 4
    faulty.waits_s = 0.0
    alone._until(lambda: not fetcher._queue.parts)


def test_no_sibling_is_used_while_a_forget_looks_for_unknown_ones(
    alone: ServedShared, faulty: FaultyStore
) -> None:
    """What it finds may have blocks that are forgotten: it is used when their deletion has begun."""
    families, shared, ended = alone.shared.families, alone.shared, list[str]()
    theirs, ours = opened(alone, 4, 2)
    kin = families.kin(ours)
    assert kin is not None and families.must_describe(theirs)
    alone.loop.run_until_complete(families.describe(theirs))
    assert not families.must_describe(theirs) and len(faulty.objects) == 1
    assert alone.loop.run_until_complete(families.read(kin)) == ""
    (sibling,) = families.siblings_of(ours, b"")
    assert sibling.space.identity == theirs.identity
    for place in shared.fetcher._places.of(theirs):
        shared.fetcher._queue.known.note(names_of(name(1) + name(2), place.mask), True)
    assert shared.beyond(ours, name(1), 0) == shared.beyond(ours, name(2), 0) == 1
    faulty.waits_s = 0.2

    async def forget() -> None:
        assert shared.forget(ours, name(1), ended.append)

    alone.loop.run_until_complete(forget())
    assert shared.beyond(ours, name(2), 0, asks=False) == 0
    alone._until(lambda: bool(ended))
    assert ended == [""]
    assert shared.beyond(ours, name(2), 0) == 1
    assert shared.beyond(ours, name(1), 0) == 0
