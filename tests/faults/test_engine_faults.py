"""Engines go on while things happen to their daemon, in an order drawn from a seed: no request fails, every
page has the content that the engine would have computed, and no call of the plugin blocks an engine for
longer than a second.

The engines compute nothing and know the content of every page (`support/fake_engine.py`); both sides of the
plugin, the daemon, its memory and its disk are real. ENGINE_FAULTS_SEED=N repeats the order of seed N, and
ENGINE_FAULTS=N injects N faults.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier_vllm.layout import Layout
from support.disks import mounted
from support.effort import effort
from support.fake_engine import BLOCK, FakeEngine, FakeRequest, layout_of
from support.faulted import AGAIN_S, KEEP_S, KINDS, NEEDS_DISK, Daemons, killed, restarted

SEED = int(os.environ.get("ENGINE_FAULTS_SEED", "7"))
FAULTS = int(os.environ.get("ENGINE_FAULTS", effort(4, 40, 1000)))
STALL_S = 1.0
MIB = 1 << 20
LIVE = 3  # requests of one engine at once
BLOCKS = 12  # of the longest prompt
TOKEN_S = 0.0002  # to compute one: longer than to read it from the disk
# Engines of the first two layouts share their blocks.
LAYOUTS = (layout_of(), layout_of(), layout_of([0, 2 * BLOCK - 1], ranks=2))
OPTIONS = ({"load": "async"}, {"load": "sync"}, {"load": "auto"})
PARAMETERS = ({}, {}, {}, {"pin": 1.0}, {"priority": 0.5}, {"ttl": 2.0}, {"warm": True})
CALLS = ("queued", "matched", "allocated", "hit_of", "finished", "step", "reported")
RANK_CALLS = ("begin", "start_saves", "report")
LOAD_CALLS = ("start", "bad_blocks", "received")


def prompt(chance: random.Random) -> list[int]:
    """One of 160 prompts: 8 heads of 5 blocks with 20 continuations each."""
    head, rest = chance.randrange(8), chance.randrange(20)
    return [
        *range(head * 10_000, head * 10_000 + 5 * BLOCK),
        *range(rest * 1000, rest * 1000 + 3 * BLOCK + (rest * 5) % (4 * BLOCK)),
    ]


class BusyEngine(FakeEngine):
    """An engine that serves several requests at once, gives the pages of a request away as soon as it has
    ended, and measures how long each call of the plugin blocks it."""

    def __init__(self, socket: str, layout: Layout, **options: Any) -> None:
        super().__init__(
            socket, layout, pages=1 + LIVE * (BLOCKS + 1) * len(layout.groups), **options
        )
        self.longest_s: dict[str, float] = defaultdict(float)
        self.live: list[FakeRequest] = []
        self.outcomes: Counter[str] = Counter()
        self._schedstat = -1
        for side, names in (
            (self.scheduler, CALLS),
            *((worker, RANK_CALLS) for worker in self.workers),
            *((worker.loads, LOAD_CALLS) for worker in self.workers),
        ):
            for name in names:
                setattr(side, name, self._timed(name, getattr(side, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began, waited = time.monotonic(), self._waited_s()
            try:
                return call(*args)
            finally:
                took_s = time.monotonic() - began - (self._waited_s() - waited)
                self.longest_s[name] = max(self.longest_s[name], took_s)

        return timed

    def _waited_s(self) -> float:
        """How long this thread has been ready to run without a processor: a busy machine is no stall."""
        if self._schedstat < 0:
            path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
            self._schedstat = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9

    def compute(self, request: FakeRequest, start: int, stop: int) -> None:
        super().compute(request, start, stop)
        time.sleep(TOKEN_S * (stop - start))

    def turn(self, chance: random.Random) -> None:
        """Add requests, run a step, and end what is done, or what its user aborts."""
        while len(self.live) < LIVE and chance.random() < 0.5:
            given = chance.choice(PARAMETERS)
            self.live.append(self.add(prompt(chance), kv_transfer_params={"kvtier": given}))
        before = dict(self.loading)
        self.step()
        for request in list(self.live):
            ended = request.request_id in before and request.request_id not in self.loading
            if request.aborted and (ended or request.request_id not in self.loading):
                self._free(request)
            elif request.done and not request.aborted:
                self.outcomes["served"] += 1
                self.outcomes["loaded blocks"] += request.cached // BLOCK
                failed = {n: c for n, c in self.scheduler.counts.items() if "load_failed" in n}
                assert not (request.failed or self.bad_pages or failed), f"a load failed: {failed}"
                assert not (wrong := self.wrong_pages(request)), f"wrong pages: {wrong}"
                self.scheduler.finished(request)
                self._free(request)
            elif not request.aborted and chance.random() < 0.002:
                self._abort(request)

    def _abort(self, request: FakeRequest) -> None:
        """Its pages stay until a load into them has ended."""
        self.outcomes["aborted"] += 1
        request.aborted = True
        if request in self.waiting:
            self.waiting.remove(request)
        self.scheduler.finished(request)
        if request.request_id not in self.loading:
            self._free(request)

    def _free(self, request: FakeRequest) -> None:
        self.live.remove(request)
        self.free = [page for pages in request.pages for page in pages if page] + self.free

    def close(self) -> None:
        super().close()
        if self._schedstat >= 0:
            os.close(self._schedstat)


class Traffic(threading.Thread):
    """Serves requests in an engine until it is told to end; then until nothing is in flight."""

    def __init__(self, engine: BusyEngine, seed: str) -> None:
        super().__init__(daemon=True)
        self.engine = engine
        self.failure: BaseException | None = None
        self.turned_at = time.monotonic()
        self._chance = random.Random(seed)
        self._ending = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            while not self._ending.is_set():
                self.engine.turn(self._chance)
                self.turned_at = time.monotonic()
            self.engine.until(self._is_quiet)
        except BaseException as error:  # noqa: BLE001  # the test reports it
            self.failure = error

    def _is_quiet(self) -> bool:
        for request in [one for one in self.engine.live if one.done and not one.aborted]:
            self.engine.scheduler.finished(request)
            self.engine._free(request)
        return not any(self.engine.scheduler.in_flight.values())

    def hits(self) -> int:
        counts = self.engine.scheduler.counts
        return counts["hit_tokens:warm"] + counts["hit_tokens:cold"]

    def end(self) -> None:
        self._ending.set()
        self.join(AGAIN_S)
        assert not self.is_alive(), "the engine does not become quiet"


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    with contextlib.ExitStack() as stack:
        disk = None
        try:
            disk = stack.enter_context(mounted(tmp_path, 192 * MIB))
        except pytest.skip.Exception as why:
            print(f"there is no disk to fill: {why}")
        daemons = Daemons(tmp_path, disk, warm="4MiB", keep_s=KEEP_S)
        stack.callback(daemons.close)
        yield daemons
        _, raised, what = daemons.now.log.read_text().partition("Traceback")
        assert not raised, what[:4000]


def mappings() -> int:
    """How many extents and tables of daemons this process has mapped."""
    return Path("/proc/self/maps").read_text().count("/memfd:kvtier")


def test_engines_go_on_whatever_happens_to_their_daemon(
    daemons: Daemons, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)  # records that are kept keep no connection
    before, fds = mappings(), len(os.listdir("/proc/self/fd"))
    run(daemons)
    until = time.monotonic() + AGAIN_S
    while mappings() > before or len(os.listdir("/proc/self/fd")) > fds:
        # The threads of the plugin end on their own.
        gc.collect()
        left = f"{mappings()} mappings and {len(os.listdir('/proc/self/fd'))} descriptors"
        assert time.monotonic() < until, f"{left}, before there were {before} and {fds}"
        time.sleep(0.05)
        gc.collect()


def run(daemons: Daemons) -> None:
    with contextlib.ExitStack() as stack:
        traffics = []
        for number, (layout, options) in enumerate(zip(LAYOUTS, OPTIONS, strict=True)):
            engine = BusyEngine(daemons.now.socket, layout, **options)
            stack.callback(engine.close)
            traffics.append(Traffic(engine, f"{SEED} {number}"))
            stack.callback(traffics[-1].end)
        happened = inject(daemons, traffics, random.Random(SEED))
        for traffic in traffics:
            traffic.end()
            assert traffic.failure is None, traffic.failure
        daemons.now.wait_for(lambda stats: nothing_is_held(stats, daemons.slots_of_disks()))
        print(f"{daemons.slots_of_disks()} slots are not used, because a disk may write to them")
        report(daemons, traffics, happened)


def inject(daemons: Daemons, traffics: list[Traffic], chance: random.Random) -> Counter[str]:
    kinds = [kind for kind in KINDS if daemons.disk is not None or kind not in NEEDS_DISK]
    happened: Counter[str] = Counter()
    order = chance.sample(kinds, len(kinds))
    for number in range(FAULTS):
        # Every kind once before any is repeated; most often a daemon that ends and leaves its memory.
        few = chance.choice([killed, restarted, *kinds])
        kind = order[number] if number < len(order) else few
        what = f"fault {number}, {kind.__name__}, seed {SEED}"
        happened[kind.__name__] += 1
        hits = [traffic.hits() for traffic in traffics]
        kind(daemons, chance)
        deadline = time.monotonic() + AGAIN_S
        again = chance.random() < 0.7 or number == FAULTS - 1
        while True:
            for traffic in traffics:
                if traffic.failure is not None:
                    raise AssertionError(f"{what}: {daemons.said()}") from traffic.failure
                assert time.monotonic() < traffic.turned_at + AGAIN_S, f"{what}: an engine hangs"
            assert daemons.now.process.poll() is None, f"{what}: it ended: {daemons.said()}"
            found = [traffic.hits() > one for traffic, one in zip(traffics, hits, strict=True)]
            if not again or all(found):
                break
            assert time.monotonic() < deadline, f"{what}: no hits any more: {daemons.said()}"
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.1))
    return happened


def nothing_is_held(stats: dict[str, Any], left: int) -> bool:
    """Except these slots."""
    states, tenant = stats["tiers"]["warm"]["states"], stats["tenants"]["default"]
    return not tenant["leases"] and not states["writing"] and states["quarantined"] == left


def report(daemons: Daemons, traffics: list[Traffic], happened: Counter[str]) -> None:
    counts: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    longest: dict[str, float] = defaultdict(float)
    for traffic in traffics:
        counts.update(traffic.engine.scheduler.counts)
        outcomes.update(traffic.engine.outcomes)
        for name, took_s in traffic.engine.longest_s.items():
            longest[name] = max(longest[name], took_s)
    print(f"{sum(happened.values())} faults: {dict(happened)}")
    print(dict(outcomes), dict(sorted(counts.items())))
    print({name: f"{took_s * 1000:.1f} ms" for name, took_s in longest.items()})
    assert outcomes["loaded blocks"] and counts["saved"]
    assert not any(name.startswith("load_failed") for name in counts), counts
    assert max(longest.values()) <= STALL_S, longest
