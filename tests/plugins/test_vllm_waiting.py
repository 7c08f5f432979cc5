"""The waits of the engine's thread and their limits: for answers when a request is queued, and for
loads when the engine is idle."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier import Keys, space
from kvtier.client import Reader, Saving
from kvtier.key import KEY_BYTES
from kvtier.recompute import Recompute
from kvtier_vllm import daemon as plugin_daemon
from kvtier_vllm import lookups, worker
from kvtier_vllm.daemon import WakeupListener, _parse_cores, nearby
from kvtier_vllm.forecast import LIMIT_UNLEARNED, Forecast
from kvtier_vllm.messages import Copied, Hole, RankMapping, RankPages, RankReport, Save
from kvtier_vllm.options import Options
from kvtier_vllm.prompt import LookupQuery, Prompt
from kvtier_vllm.saves import Saves, fresh_pages
from kvtier_vllm.worker import Overwritten, SaveCopy
from support.daemons import Daemon
from support.fake_engine import BLOCK, FakeEngine, layout_of

PROMPT = range(8 * BLOCK + 3)
EngineOf = Callable[..., FakeEngine]


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_an_available_answer_is_received(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b"x")
    assert WakeupListener().wait(pipe[0])


def test_after_a_timeout_the_next_wait_is_skipped(pipe: tuple[int, int]) -> None:
    """After a timeout the plugin does not wait for the daemon again until it has received an answer."""
    ears = WakeupListener()
    assert not ears.wait(pipe[0])
    ears.next_step()
    os.write(pipe[1], b"x")
    assert not ears.wait(pipe[0])
    ears.answered()
    assert ears.wait(pipe[0])


def test_waiting_is_limited_by_the_time_of_a_step(pipe: tuple[int, int]) -> None:
    """Even if many answers arrive, each of them in time."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.4 * plugin_daemon.WAIT_IN_STEP_S
        return now

    os.write(pipe[1], b"x")
    ears = WakeupListener(clock)
    assert [ears.wait(pipe[0]) for _ in range(4)] == [True, True, True, False]
    ears.next_step()
    assert ears.wait(pipe[0])


def test_blocks_in_memory_are_promised_at_the_first_lookup(
    shared_daemon: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_daemon, "WAIT_IN_STEP_S", 10.0)
    engine = engine_of(shared_daemon)
    engine.serve(PROMPT)
    again = engine.serve(PROMPT)
    assert (again.cached, again.steps_asked) == (8 * BLOCK, 1)


def test_a_lookup_is_sent_at_the_end_of_the_step(
    shared_daemon: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(shared_daemon)
    engine.serve(PROMPT)
    request = engine.add(PROMPT)
    engine.until(lambda: not engine.scheduler.in_flight["tickets"])
    engine.scheduler.new_generation()  # the earlier answer is now invalid
    asked = []
    plain = engine.scheduler._decisions._send
    monkeypatch.setattr(
        engine.scheduler._decisions, "_send", lambda *args: asked.append(plain(*args))
    )
    assert engine.scheduler.matched(request, 0) == (None, False)
    assert not asked
    engine.carry_out({}, {}, [])
    assert len(asked) == 1
    assert engine.run(request).cached == 0


def test_a_daemon_without_outstanding_answers_is_not_polled_in_every_step(
    shared_daemon: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "POLL_S", 1e9)
    engine = engine_of(shared_daemon)
    engine.serve(PROMPT)
    session = engine.scheduler._daemon.session
    assert session is not None
    polls = []
    plain = session.client.poll
    monkeypatch.setattr(session.client, "poll", lambda: (polls.append(1), plain())[1])
    for _ in range(5):
        engine.carry_out({}, {}, [])
    assert not polls
    assert engine.serve(PROMPT).cached == 8 * BLOCK and polls
    monkeypatch.setattr(lookups, "POLL_S", 0.0)
    before = len(polls)
    engine.carry_out({}, {}, [])
    assert len(polls) == before + 1


def test_bytes_that_the_socket_did_not_accept_are_sent_in_a_later_step(
    daemon_of: Callable[..., Daemon], engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although no answer is outstanding."""
    monkeypatch.setattr(lookups, "POLL_S", 1e9)
    daemon = daemon_of()
    engine = engine_of(daemon)
    engine.serve(PROMPT)
    session = engine.scheduler._daemon.session
    assert session is not None
    connection = session.client.link.connection
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        for number in range(1 << 20):
            session.space.cancel(1000 + number)
            if connection._backlog:
                break
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert connection._backlog
    engine.until(lambda: not connection._backlog)


def test_a_report_contains_only_changes() -> None:
    """Each rank sends a report in every step, and most of them are empty."""
    full = RankReport(
        7, {0: RankMapping(b"run", b"space", 2)}, {1: 1}, {2: 1}, {0: RankPages("x")}, {3},
        {4: Hole(True, Counter({"drop:lost": 2}))}, {"saved": 1}, [Copied(1, 0, 0.5, 1.0, 9, True)],
        [Copied(2, 0, 0.5, 1.0, 9, True)], 9, 0.5,
    )  # fmt: skip
    for report in (full, RankReport(8)):
        assert pickle.loads(pickle.dumps(report)) == report  # noqa: S301  # the test created it
    assert b"Counter" not in pickle.dumps(RankReport(8))


def test_reports_of_ranks_are_added_up() -> None:
    one, other = (
        RankReport(8, loads={1: 1}, saves={2: 1, 3: 1}),
        RankReport(7, loads={1: 1}, saves={2: 1}),
    )
    one.count({"saved": 2})
    one.count({"saved": 1, "not_saved:present": 1})
    other.count({"saved": 4})
    both = one.add(other)
    assert (both.step, both.loads, both.saves) == (8, {1: 2}, {2: 2, 3: 1})
    assert both.counts == {"saved": 7, "not_saved:present": 1}


def test_a_page_with_two_pending_saves_names_both_until_each_ends() -> None:
    """A block that was not saved in one rank is saved again while another rank still copies."""
    saves = Saves(layout_of(), Options(), Counter())
    request: Any = SimpleNamespace(
        request_id="r", num_computed_tokens=0, num_tokens=2 * BLOCK, num_prompt_tokens=2 * BLOCK
    )
    state = SimpleNamespace(get_block_ids=lambda name: ([1, 2],), boundary_state_offloads={})
    scheduled: Any = SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=SimpleNamespace(req_ids=[]),
        kv_connector_block_state=state,
    )  # fmt: skip
    prompt, keys = Prompt(request, b"", True, True), Keys(bytes(2 * KEY_BYTES))
    saves.served(prompt)
    for number in (7, 8):
        prompt.save.save_again(number - 7)
        saves.filled(prompt, 2 * BLOCK, scheduled, lambda: keys, 9, partial(int, number))
    assert [
        saves.overwritten(fresh_pages(layout_of(), scheduled, {page})) for page in (1, 2, 3)
    ] == [
        [7],
        [7, 8],
        [],
    ]
    saves.reported(RankReport(saves={7: 1}))
    assert [saves.overwritten(fresh_pages(layout_of(), scheduled, {page})) for page in (1, 2)] == [
        [],
        [8],
    ]
    saves.reported(RankReport(saves={8: 1}))
    assert not any(saves.in_flight.values())


def test_step_times_are_evaluated_lazily() -> None:
    """The engine waits for the end of each step, so steps are only queued; the queue is bounded."""
    forecast, recompute = Forecast(), Recompute()
    for number in range(100):
        step = 100 + number, 10.0 * number, 0.01 + 0.001 * number
        forecast.stepped(*step)
        recompute.stepped(*step)
        assert len(forecast._unlearned) < LIMIT_UNLEARNED
        if number in (0, 3, 70):
            assert forecast.prefill == recompute.fit
    assert forecast.recompute_s(50, 7) == recompute.seconds(50, 7)
    assert forecast.prefill == recompute.fit


class SlowLoads:
    """Loads of an engine that begin when the test releases them."""

    def __init__(self, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let = threading.Event()
        plain = engine.workers[0].loads._load

        def load(one: Any) -> bool:
            assert self.let.wait(60)
            return plain(one)

        monkeypatch.setattr(engine.workers[0].loads, "_load", load)


def test_an_idle_step_waits_for_the_load(
    shared_daemon: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_daemon, "WAIT_IN_STEP_S", 60.0)
    monkeypatch.setattr(worker, "IDLE_WAIT_S", 60.0)
    engine = engine_of(shared_daemon, load="async")
    engine.serve(PROMPT)
    slow = SlowLoads(engine, monkeypatch)
    request = engine.add(PROMPT)
    threading.Timer(0.05, slow.let.set).start()
    began = time.monotonic()
    engine.step()
    assert not request.loading and time.monotonic() - began < worker.IDLE_WAIT_S


def test_a_computing_step_does_not_wait_for_loads(
    shared_daemon: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_daemon, "WAIT_IN_STEP_S", 10.0)
    monkeypatch.setattr(worker, "IDLE_WAIT_S", 10.0)
    engine = engine_of(shared_daemon, load="async")
    engine.serve(PROMPT)
    slow = SlowLoads(engine, monkeypatch)
    request = engine.add(PROMPT)
    other = engine.add(range(500, 510))
    engine.step()
    assert other.done and request.loading
    slow.let.set()
    assert engine.run(request).cached == 8 * BLOCK


def test_a_daemon_that_hangs_during_a_load_delays_only_requests_that_wait_for_it(
    daemon_of: Callable[..., Daemon], engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promised blocks are loaded, a request without a lookup is computed, and one that waits is limited
    by its patience."""
    daemon = daemon_of()
    engine = engine_of(daemon, load="async", patience_ms=1500)
    engine.until(lambda: engine.serve(PROMPT).cached > 0)
    # A request stops waiting one longest step before its patience ends; the daemon is given up when
    # it ends.
    monkeypatch.setattr(engine.scheduler._forecast, "longest_step_s", lambda: 0.0)
    slow = SlowLoads(engine, monkeypatch)
    loading = engine.add(PROMPT)
    engine.until(lambda: loading.loading)
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        waiting = engine.add([*PROMPT, 1])
        other = engine.add(range(500, 510))
        engine.step()
        assert other.done and not waiting.done and not loading.done
        slow.let.set()
        engine.run(loading)
        assert (loading.cached, loading.failed, waiting.done) == (8 * BLOCK, False, False)
        engine.run(waiting)
        assert waiting.cached == 0 and time.monotonic() - began >= 1.5
        assert engine.scheduler.counts["lost"]
    finally:
        daemon.process.send_signal(signal.SIGCONT)


def test_a_short_load_runs_within_the_step_unless_other_requests_would_wait(
    shared_daemon: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One load may take a whole step if no other request runs; the next load of that step runs between
    steps."""
    monkeypatch.setattr(plugin_daemon, "WAIT_IN_STEP_S", 10.0)
    engine = engine_of(shared_daemon)
    for first in (0, 1000):
        engine.serve(range(first, first + 8 * BLOCK + 3))
    forecast = engine.scheduler._forecast
    monkeypatch.setattr(forecast, "step_s", lambda: 1.0)
    monkeypatch.setattr(forecast, "load_s", lambda nbytes: 0.6)
    one, other = (engine.add(range(first, first + 8 * BLOCK + 3)) for first in (0, 1000))
    engine.step()
    assert (one.between, other.between) == (False, True)
    engine.until(lambda: other.done)
    served = engine.add(range(2000, 2010))
    engine.step()
    third = engine.add(PROMPT)
    engine.step()
    assert served.done and third.between
    engine.finish(served)
    engine.until(lambda: third.done)
    engine.finish(third)
    engine.finish(one)
    engine.finish(other)
    fourth = engine.add(PROMPT)
    engine.step()
    assert not fourth.between


@pytest.mark.parametrize(
    "load, busy, nice", [("sync", True, 0), ("async", False, 0), ("async", True, worker.NICE)]
)
def test_only_a_load_during_a_computing_step_has_a_low_priority(
    shared_daemon: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch,
    load: str, busy: bool, nice: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(plugin_daemon, "WAIT_IN_STEP_S", 60.0)
    engine = engine_of(shared_daemon, load=load)
    engine.serve(PROMPT)
    found = []
    copying = threading.Event()
    plain, start_saves = Reader.scatter, engine.workers[0].start_saves

    def scatter(reader: Reader, *args: Any) -> int:
        found.append(args[4])
        copying.set()
        return plain(reader, *args)

    def compute_until_copying(saves: Any) -> None:
        assert not busy or copying.wait(60)
        start_saves(saves)

    monkeypatch.setattr(Reader, "scatter", scatter)
    monkeypatch.setattr(engine.workers[0], "start_saves", compute_until_copying)
    request = engine.add(PROMPT)
    if busy:
        engine.add(range(500, 510))
    engine.run(request)
    assert (request.cached, found) == (8 * BLOCK, [nice])


def test_saves_have_a_low_priority(
    shared_daemon: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    plain = Saving.gather

    def gather(saving: Saving, *args: Any, **options: Any) -> None:
        found.append(options["nice"])
        plain(saving, *args, **options)

    monkeypatch.setattr(Saving, "gather", gather)
    engine_of(shared_daemon).serve(range(7000, 7000 + 2 * BLOCK))
    assert found == [worker.NICE]


@pytest.mark.parametrize(
    ("windows", "share", "most_s", "saved"),
    [(True, 1e3, 10.0, 8), (True, 1e3, 0.001, 0), (True, 0.0, 10.0, 0), (False, 1e3, 10.0, 0)],
)
def test_a_step_waits_briefly_for_saves_of_window_pages_that_it_overwrites(
    shared_daemon: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch,
    windows: bool, share: float, most_s: float, saved: int,
) -> None:  # fmt: skip
    """It waits for a share of the time since the last such wait, with an upper limit, because a daemon
    may hang."""
    monkeypatch.setattr(worker, "CANCEL_SHARE", share)
    monkeypatch.setattr(worker, "CANCEL_MOST_S", most_s)
    engine = engine_of(shared_daemon)
    engine.until(lambda: engine.scheduler._daemon.session is not None)
    held = threading.Event()
    engine.workers[0].saves._windows = [windows]
    engine.workers[0].state.tasks.put(lambda: bool(held.wait(60)))
    # A prompt that no other case has saved.
    first = int(20_000 + 500 * windows + share + 1000 * most_s)
    request = engine.run(engine.add(range(first, first + 8 * BLOCK)))
    pages = [page for ids in request.pages for page in ids]
    timer = threading.Timer(0.2 if saved else 4.0, held.set)
    timer.start()
    given = SimpleNamespace(block_ids=[pages], num_computed_tokens=0)
    engine.carry_out({}, {}, [given])
    held.set()
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    assert engine.scheduler.counts["saved"] == saved
    timer.cancel()


def test_a_step_waits_once_for_a_save_that_it_overwrites() -> None:
    """The next step may overwrite more of it: that copy was cancelled, and ends later."""
    copying = SaveCopy(Save(1, []), None, fleeting=True)
    copying.cancel(0.001)
    step = threading.Thread(target=copying.cancel, args=(60.0,), daemon=True)
    step.start()
    step.join(60)
    assert not step.is_alive()


def test_the_end_of_a_save_waits_for_the_piece_that_is_being_copied() -> None:
    """When `end` returns, the pages belong to another request, and no further piece is copied."""
    copying, order = SaveCopy(Save(1, []), None, fleeting=False), []
    come = threading.Event()  # `end` has reached its wait before the piece is copied

    class Watched:
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.acquire, self.release = self.lock.acquire, self.lock.release

        def __enter__(self) -> None:
            come.set()
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    def end() -> None:
        copying.cancel()
        order.append("given away")
        come.set()

    copying._piece = Watched()  # type: ignore[assignment]
    with copying:
        step = threading.Thread(target=end, daemon=True)
        step.start()
        assert come.wait(60)
        order.append("copied")
    step.join(60)
    assert order == ["copied", "given away"]
    with pytest.raises(Overwritten), copying:
        pass


def test_the_daemon_reports_coming_blocks_without_polling(
    shared_daemon: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request keeps its ready blocks until the daemon reports that more are ready."""
    engine = engine_of(shared_daemon)
    engine.serve(range(8000, 8000 + 8 * BLOCK))
    side = engine.scheduler
    request = engine.add(range(8000, 8000 + 8 * BLOCK + 1))
    prompt, session = side._prompts[request.request_id], side._daemon.session
    engine.waiting.remove(request)
    engine.until(lambda: not side.in_flight["tickets"])
    assert session is not None
    monkeypatch.setattr(side._forecast, "recompute_s", lambda tokens, before: 1e9)
    asked, released = [], []
    some: Any = SimpleNamespace(
        ready=3, coming=5, eta_ms=1.0, refused="", release=lambda: released.append(1)
    )
    prompt.lookup.lease, prompt.lookup.sent_at = some, side._clock() - 1.0
    prompt.lookup.answered = LookupQuery(read_disk=True)
    plain = session.space.begin_lease

    def begin_lease(*args: Any, **more: Any) -> int:
        asked.append(more["wait_ms"])
        return plain(*args, **more)

    monkeypatch.setattr(session.space, "begin_lease", begin_lease)
    with monkeypatch.context() as patch:
        patch.setattr(session.client, "poll", dict)
        for _ in range(5):
            assert side.matched(request, 0) == (None, False)
            engine.carry_out({}, {}, [])
            assert prompt.lookup.ticket and prompt.lookup.lease is some and not released
    assert asked == [50]
    engine.until(lambda: not prompt.lookup.ticket)
    assert released == [1] and prompt.lookup.lease is not None and prompt.lookup.lease.ready == 8
    engine.waiting.append(request)
    assert engine.run(request).cached == 8 * BLOCK
    engine.finish(request)
    engine.settle()


def test_polling_for_many_blocks_is_limited_in_frequency(
    shared_daemon: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(shared_daemon)
    engine.serve(range(8000, 8000 + 8 * BLOCK))
    side = engine.scheduler
    request = engine.add(range(9000, 9000 + 8 * BLOCK + 1))
    prompt = side._prompts[request.request_id]
    engine.until(lambda: not side.in_flight["tickets"])
    monkeypatch.setattr(side._forecast, "recompute_s", lambda tokens, before: 1e9)
    now = side._clock()
    monkeypatch.setattr(side._decisions, "_clock", lambda: now)
    assert prompt.lookup.lease is not None

    def is_asked(after_s: float) -> bool:
        nonlocal now
        prompt.lookup.lease = SimpleNamespace(ready=0, coming=8, eta_ms=30.0, release=lambda: None)
        prompt.lookup.answered = LookupQuery(read_disk=True)
        prompt.lookup.sent_at = prompt.lookup.leased_at = now
        now += after_s
        side._lookups._for_step.clear()
        assert side.matched(request, 0) == (None, False)
        return bool(side._lookups._for_step)

    assert (is_asked(0.002), is_asked(0.003)) == (False, True)
    side._prompts |= {f"other {number}": prompt for number in range(2 * 8)}
    assert (is_asked(0.003), is_asked(0.007)) == (False, True)
    for number in range(2 * 8):
        del side._prompts[f"other {number}"]
    prompt.lookup.lease = None


def test_copies_run_on_cores_that_the_engine_does_not_use(
    shared_daemon: Daemon, engine_of: EngineOf
) -> None:
    """An engine on a CPU has bound the thread that starts this side's threads to one core."""
    all_ = os.sched_getaffinity(0)
    if len(all_) < 2:
        pytest.skip("one core")
    os.sched_setaffinity(0, {min(all_)})
    try:
        engine = engine_of(shared_daemon)
        engine.serve(PROMPT)
        side = engine.workers[0]
        assert side.mappings.connection is not None
        threads = [
            thread.native_id
            for thread in (
                side.loads.thread,
                side.saves.thread,
                side.mappings.connection._thread,
            )
        ]
        found = [os.sched_getaffinity(number) for number in threads if number]
    finally:
        os.sched_setaffinity(0, all_)
    assert found == [os.sched_getaffinity(os.getppid()) | {min(all_)}] * 3


def test_a_large_copy_uses_at_most_as_many_threads_as_cores(
    shared_daemon: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a step the copy runs in the engine's own thread, which is bound to one core; between steps
    in the plugin's."""
    all_ = os.sched_getaffinity(0)
    if len(all_) < 2:
        pytest.skip("one core")
    found: list[int] = []
    scatter = Reader.scatter

    def seen(reader: Reader, slots: Any, pieces: Any, pages: Any, threads: int, *more: Any) -> int:
        found.append(threads)
        return scatter(reader, slots, pieces, pages, threads, *more)

    monkeypatch.setattr(Reader, "scatter", seen)
    monkeypatch.setattr(space, "LARGE_COPY_BYTES", 1)
    os.sched_setaffinity(0, {min(all_)})
    try:
        for load in ("sync", "async"):
            engine = engine_of(shared_daemon, load=load)
            engine.serve(PROMPT)
            assert engine.serve(PROMPT).cached
    finally:
        os.sched_setaffinity(0, all_)
    assert found[0] == 1 and found[-1] == 2


def test_copies_run_on_the_numa_node_of_the_computing_cores() -> None:
    nodes = [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert nearby({1}, {0, 1, 2, 4, 5}, nodes) == {0, 1, 2}
    assert nearby({3, 4}, {0, 1, 4, 5}, nodes) == {0, 1, 3, 4, 5}
    assert nearby({1}, {0, 1, 9}, []) == {0, 1, 9}
    assert _parse_cores("0-3,8\n") == {0, 1, 2, 3, 8} and _parse_cores("\n") == set()


def test_the_first_request_after_a_restart_of_the_daemon_is_a_hit(
    daemon_of: Callable[..., Daemon], engine_of: EngineOf, tmp_path: Path
) -> None:
    """The engine is idle meanwhile: it makes no step, and sends no request."""
    cold = tmp_path / "cold"
    cold.mkdir()
    config = f'[warm]\nsize = "16MiB"\n[cold]\ndirectories = ["{cold}"]\nsize = "256MiB"\nwrite = "through"\n'
    daemon = daemon_of(folder=tmp_path, config=config)
    engine = engine_of(daemon, patience_ms=20_000, load="async")
    engine.serve(PROMPT)
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] >= 8)
    lines = [
        engine.scheduler._daemon.connection,
        *(worker.mappings.connection for worker in engine.workers),
    ]
    before = [line.session for line in lines if line is not None]
    daemon.stop()
    daemon = daemon_of(folder=tmp_path, config=config)
    deadline = time.monotonic() + 60
    while any(line is None or line.session in (None, *before) for line in lines):
        assert time.monotonic() < deadline, "an idle engine is not connected again"
        time.sleep(0.01)
    daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] >= 8)
    # The engine has too few measurements to prefer a read from disk.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forecast, "recompute_s", lambda *_: float("inf"))
        patch.setattr(Forecast, "prefill", (0.0, 0.0))
        assert engine.serve(PROMPT).cached == 8 * BLOCK
    counts = engine.scheduler.counts
    assert counts["lost"] == 1 and not counts["miss:no_daemon"] and not counts["miss:rank_away"]


@pytest.mark.parametrize("how", ["awaits", "does not", "awaits, and weights changed"])
def test_a_decoder_waits_for_blocks_that_a_prefill_engine_saves(
    daemon_of: Callable[..., Daemon], engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The router passes the parameters of the first response on to the second engine. The blocks of an engine
    whose weights changed are its own: then the decoder computes at once."""
    monkeypatch.setattr(plugin_daemon, "WAIT_IN_STEP_S", 10.0)
    # The engines compute in no time: then the decoder would rightly not wait.
    monkeypatch.setattr(lookups.PromptLookups, "_send_prefill", lambda *_: None)
    monkeypatch.setattr(lookups, "UNKNOWN_WAIT_S", 60.0)
    daemon = daemon_of()
    options = {"patience_ms": 60_000}
    prefill = engine_of(daemon, loads=False, **options)
    decode = engine_of(daemon, **options)
    prefill.until(lambda: prefill.scheduler._daemon.session is not None)
    if "changed" in how:
        prefill.scheduler.new_generation(weights=True)
    let, begun = threading.Event(), threading.Event()
    plain = Saving.gather

    def gather(self: Saving, *args: Any, **more: Any) -> Any:
        begun.set()
        assert let.wait(60)
        return plain(self, *args, **more)

    monkeypatch.setattr(Saving, "gather", gather)
    told: list[Any] = []

    def prefills() -> None:
        first = prefill.add(PROMPT)
        prefill.run(first)
        prefill.until(begun.is_set)
        told.append(prefill.scheduler.finished(first))
        prefill.until(lambda: not prefill.scheduler.in_flight["saves"])

    saving = threading.Thread(target=prefills)
    saving.start()
    try:
        until = time.monotonic() + 60
        while not told and time.monotonic() < until:
            time.sleep(0.01)
        assert told == [{"kvtier": {"await": True}}]
        given = {"kvtier": {}} if how == "does not" else told[0]
        second = decode.add(PROMPT, kv_transfer_params=given)
        decode.until(lambda: not decode.scheduler.in_flight["tickets"])
        if how == "awaits":
            for _ in range(5):
                assert decode.scheduler.matched(second, 0) == (None, False)
                decode.carry_out({}, {}, [])
            let.set()
        assert decode.run(second).cached == (8 * BLOCK if how == "awaits" else 0)
    finally:
        let.set()
        saving.join()
