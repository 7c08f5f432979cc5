"""Both sides of the vLLM plugin with a real daemon, in an engine that computes nothing."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier import wire
from kvtier.client import Lease
from kvtier.key import KEY_BYTES, Keys
from kvtier.layout import Kind
from kvtier.link import BothMappings, Link
from kvtier.saving import Saving
from kvtier_vllm import daemon as plugin_daemon
from kvtier_vllm import worker as kvtier_worker
from kvtier_vllm.forecast import Forecast
from kvtier_vllm.layout import Cached, Layout, Pages, Shards
from kvtier_vllm.messages import Hole, LoadOrder, RankMapping, RankReport, Save, Step
from kvtier_vllm.options import Options
from kvtier_vllm.prompt import LookupQuery, Prompt
from kvtier_vllm.saves import TRIES, Saves, fresh_pages, runs
from kvtier_vllm.scheduler import SchedulerSide
from kvtier_vllm.worker import WorkerSide
from support.daemons import Daemon
from support.fake_engine import (
    BLOCK,
    PAGE_BYTES,
    FakeEngine,
    FakeRequest,
    in_stages,
    layout_of,
    smaller_stage,
    spec_for,
)

PROMPT = range(8 * BLOCK + 3)
KINDS: tuple[Kind, ...] = ("full", "state")
EngineOf = Callable[..., FakeEngine]
SHAPES = {
    "one group": layout_of(),
    "two ranks": layout_of(ranks=2),
    "two ranks of like pages": layout_of(ranks=2, replicas=2),
    "a window": layout_of([2 * BLOCK - 1]),
    "blocks of different sizes": layout_of([20, 0, 7], parts=[2, 1, 4]),
    "six groups": layout_of([0, 20, 20, 0, 40, 20], ranks=2),
}


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_is_loaded_as_it_was_saved(
    shared: Daemon, engine_of: EngineOf, shape: str, load: str
) -> None:
    """Every page of every layer and rank, in a second engine."""
    layout = SHAPES[shape]
    engine = engine_of(shared, layout, load=load)
    assert engine.serve(PROMPT).cached == 0
    again = engine_of(shared, layout, load=load)
    assert again.serve(PROMPT).cached == 8 * BLOCK
    for one in (engine, again):
        one.settle()


def test_one_token_is_left_to_compute(shared: Daemon, engine_of: EngineOf) -> None:
    engine = engine_of(shared)
    engine.serve(range(4 * BLOCK))
    assert engine.serve(range(4 * BLOCK)).cached == 3 * BLOCK
    assert engine.serve(range(4 * BLOCK + 1)).cached == 4 * BLOCK


@pytest.mark.parametrize("load", ["sync", "async"])
def test_the_last_tokens_are_computed_if_an_option_says_so(
    shared: Daemon, engine_of: EngineOf, load: str
) -> None:
    """New tokens at the end of a prompt count, so a prompt that goes on loads more."""
    engine_of(shared, load=load).serve(range(6 * BLOCK))
    engine = engine_of(shared, load=load, compute_last=2 * BLOCK)
    assert engine.serve(range(6 * BLOCK)).cached == 4 * BLOCK
    assert engine.serve(range(6 * BLOCK + 1)).cached == 4 * BLOCK
    assert engine.serve(range(7 * BLOCK - 1)).cached == 4 * BLOCK
    assert engine.serve([*range(6 * BLOCK), *range(900, 900 + 2 * BLOCK)]).cached == 6 * BLOCK
    assert engine.serve(range(2 * BLOCK)).cached == engine.serve(range(BLOCK)).cached == 0


def test_a_longer_prompt_loads_the_common_prefix(shared: Daemon, engine_of: EngineOf) -> None:
    engine = engine_of(shared)
    engine.serve(range(4 * BLOCK))
    other = [*range(3 * BLOCK), *range(900, 900 + 3 * BLOCK)]
    assert engine.serve(other).cached == 3 * BLOCK
    assert engine.serve([*other, 1]).cached == 6 * BLOCK


def test_a_tail_is_saved_with_its_head_as_parent(shared: Daemon, engine_of: EngineOf) -> None:
    engine = engine_of(shared)
    engine.serve(range(4 * BLOCK))
    engine.serve(range(6 * BLOCK))
    head, tail = engine.writes
    # The last block of the first prompt was not loaded, because one token must be computed. It is
    # known, and not saved again.
    assert (head.parent, len(head.block_ids), len(tail.block_ids)) == (b"", 4, 2)
    assert tail.parent == head.keys[-KEY_BYTES:]


def test_only_blocks_with_a_page_are_saved() -> None:
    group = layout_of().groups[0]
    assert list(runs(group, [0, 0, 3, 4, 0, 5, 0], 0, 7)) == [(2, 4), (5, 6)]
    assert list(runs(group, [7, 8, 9], 1, 3)) == [(1, 3)]
    assert list(runs(group, [0, 0], 0, 2)) == []


def test_a_block_is_saved_with_all_of_its_pages_or_not_at_all() -> None:
    """A window may have released some of the pages: another engine would load data that was never written."""
    group = layout_of([20], parts=[2]).groups[0]
    assert list(runs(group, [0, 3, 4, 5, 6, 0, 7, 8], 0, 4)) == [(1, 2), (3, 4)]


def test_a_page_that_was_reused_names_its_save() -> None:
    """Also if the page belongs to a group that is not saved; but not if a request shares pages that
    were computed earlier."""
    layout = layout_of([20, 0], parts=[2, 1])
    saves = Saves(layout, Options(), Counter())
    pages = ([1, 2, 3, 4], [5, 6])
    request: Any = SimpleNamespace(
        request_id="r", num_computed_tokens=0, num_tokens=2 * BLOCK, num_prompt_tokens=2 * BLOCK
    )

    def scheduled(computed: int = 0, *ids: list[int]) -> Any:
        new = SimpleNamespace(block_ids=ids, num_computed_tokens=computed)
        return SimpleNamespace(
            scheduled_new_reqs=[new], scheduled_cached_reqs=SimpleNamespace(req_ids=[]),
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: pages),
        )  # fmt: skip

    keys = Keys(bytes(range(2 * KEY_BYTES)))
    prompt = Prompt(request, b"", True, True)
    saves.served(prompt)
    numbers = iter((7, 8, 9))
    found = saves.filled(prompt, 2 * BLOCK, scheduled(), lambda: keys, 9, lambda: next(numbers))
    assert [[write.block_ids for write in save.writes] for save in found] == [
        [[1, 2]], [[3, 4]], [[5, 6]],
    ]  # fmt: skip
    for page, save in zip(range(1, 7), (7, 7, 8, 8, 9, 9), strict=True):
        assert saves.overwritten(fresh_pages(layout, scheduled(0, [], [], [page]), set())) == [save]
        assert saves.overwritten(fresh_pages(layout, scheduled(), {page})) == [save]
    assert (
        saves.overwritten(fresh_pages(layout, scheduled(BLOCK, [1, 2, 8, 9], [5, 10], []), set()))
        == []
    )
    assert saves.overwritten(fresh_pages(layout, scheduled(BLOCK, [1, 2, 3], [5], []), set())) == [
        8
    ]


@pytest.mark.parametrize(
    ("resumed", "computed", "ids", "named"),
    [
        (False, 2 * BLOCK, [3, 8], [7]),  # a running request gets two more pages: both are new
        (False, 2 * BLOCK, [], []),
        (
            True,
            2 * BLOCK,
            [1, 2, 8],
            [],
        ),  # it shares the first two pages, whose tokens are computed
        (True, BLOCK, [8, 2, 9], [7]),
        (True, 0, [3, 8], [7]),
    ],
)
def test_a_page_given_to_a_running_or_resumed_request_names_its_save(
    resumed: bool, computed: int, ids: list[int], named: list[int]
) -> None:
    """The engine lists only the new pages of a running request, and all pages of a resumed one."""
    saves = Saves(layout_of(), Options(), Counter())
    request: Any = SimpleNamespace(
        request_id="r", num_computed_tokens=0, num_tokens=3 * BLOCK, num_prompt_tokens=3 * BLOCK
    )
    state = SimpleNamespace(get_block_ids=lambda name: ([1, 2, 3],), boundary_state_offloads={})
    prompt, keys = Prompt(request, b"", True, True), Keys(bytes(3 * KEY_BYTES))
    saves.served(prompt)
    scheduled: Any = SimpleNamespace(kv_connector_block_state=state)
    saves.filled(prompt, 3 * BLOCK, scheduled, lambda: keys, 9, lambda: 7)
    scheduled.scheduled_new_reqs = []
    scheduled.scheduled_cached_reqs = SimpleNamespace(
        req_ids=["other"], new_block_ids=[(ids,) if ids else None], num_computed_tokens=[computed],
        resumed_req_ids={"other"} if resumed else set(),
    )  # fmt: skip
    assert saves.overwritten(fresh_pages(layout_of(), scheduled, set())) == named


def filled_with_windows() -> tuple[Saves, Prompt, list[Save]]:
    """Four blocks of a model with full attention and two windows are being saved."""
    layout = layout_of([0, 2 * BLOCK - 1, 0, 3 * BLOCK])
    saves = Saves(layout, Options(), Counter())
    pages = [[at * 10 + block for block in range(1, 5)] for at in range(4)]
    request: Any = SimpleNamespace(
        request_id="r", num_computed_tokens=0, num_tokens=4 * BLOCK + 5, num_prompt_tokens=9
    )
    state = SimpleNamespace(get_block_ids=lambda name: pages)
    scheduled = SimpleNamespace(kv_connector_block_state=state)
    keys = Keys(bytes(range(4 * KEY_BYTES)))
    prompt = Prompt(request, b"", True, True)
    saves.served(prompt)
    numbers = iter((7, 8, 9))
    found = saves.filled(prompt, 4 * BLOCK + 5, scheduled, lambda: keys, 9, lambda: next(numbers))
    return saves, prompt, found


def test_more_blocks_than_one_reserve_takes_are_written_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier_vllm.saves.LIMIT_RESERVED", 3)
    _, _, found = filled_with_windows()
    keys = bytes(range(4 * KEY_BYTES))
    first, rest = [write for save in found for write in save.writes if write.group == 0]
    assert (first.block_ids, first.keys, first.parent) == ([1, 2, 3], keys[: 3 * KEY_BYTES], b"")
    assert (rest.block_ids, rest.keys) == ([4], keys[3 * KEY_BYTES :])
    assert rest.parent == first.keys[-KEY_BYTES:]


def test_blocks_that_leave_a_window_are_saved_first_and_separately() -> None:
    """After 69 tokens one window begins with token 38, in the third block, and the other with token 21,
    in the second."""
    saves, _, found = filled_with_windows()
    assert [[(write.group, write.block_ids) for write in save.writes] for save in found] == [
        [(1, [11, 12]), (3, [31])], [(1, [13, 14]), (3, [32, 33, 34])],
        [(0, [1, 2, 3, 4]), (2, [21, 22, 23, 24])],
    ]  # fmt: skip
    other = Save(10, [])
    saves._pending[10] = saves._pending[9]
    assert [save.number for save in saves.in_order([found[2], other, *found[:2]])] == [7, 8, 9, 10]


def test_a_failed_save_of_blocks_that_left_a_window_is_not_retried() -> None:
    """Such a hole does not prevent later blocks from being saved: a hit that ends there does not need it."""
    saves, prompt, _ = filled_with_windows()
    hole = Hole(True, Counter({"drop:overwritten": 4}))
    prompt.request.num_computed_tokens = 4 * BLOCK + 5
    saves.reported(RankReport(saves=Counter([7]), holes={7: hole}))
    assert (prompt.save.saved, prompt.save.tries, saves._counts) == (4, 0, {"drop:overwritten": 4})
    # A lost connection, and pages that were taken from a request, are handled differently.
    saves.reported(RankReport(saves=Counter([8]), holes={8: Hole(True, Counter({"drop:lost": 4}))}))
    assert (prompt.save.saved, prompt.save.tries) == (0, 1)
    saves, prompt, _ = filled_with_windows()
    saves.reported(RankReport(saves=Counter([7]), holes={7: hole}))
    assert (prompt.save.saved, prompt.save.tries) == (0, 1)


def test_a_failed_save_of_blocks_in_a_window_is_retried() -> None:
    """Its request was preempted and continued, or the saves of its step were cancelled. Not if the
    window has moved on."""
    hole = Hole(True, Counter({"drop:overwritten": 5}))
    for more, expected in ((0, (0, 1, {})), (BLOCK, (4, 0, {"drop:overwritten": 5}))):
        saves, prompt, _ = filled_with_windows()
        prompt.request.num_computed_tokens = 4 * BLOCK + 5 + more
        saves.reported(RankReport(saves=Counter([8]), holes={8: hole}))
        assert (prompt.save.saved, prompt.save.tries, saves._counts) == expected


def test_blocks_that_leave_a_window_without_room_are_counted() -> None:
    """Counted once, by the step in which the window moves on: 8 blocks, and one more. The engine is not
    asked for pages in this case, because it lists all pages of a request."""
    saves = Saves(layout_of([0, 2 * BLOCK]), Options(saving=1), counts := Counter())
    request: Any = SimpleNamespace(
        request_id="r", num_computed_tokens=0, num_tokens=12 * BLOCK, num_prompt_tokens=12 * BLOCK
    )
    scheduled = SimpleNamespace()
    prompt = Prompt(request, b"", True, True)
    saves.served(prompt)
    keys = Keys(bytes(12 * KEY_BYTES))
    for tokens, left in ((10 * BLOCK, 8), (BLOCK, 9), (5, 9)):
        assert saves.filled(prompt, tokens, scheduled, lambda: keys, 99, lambda: 7) == []
        assert counts == {"drop:overwritten": left}
        request.num_computed_tokens += tokens


def test_a_state_is_saved_when_the_engine_reports_it_complete() -> None:
    """Only if the request still has the page: not within a block, not for a group that is not saved,
    not if it was loaded."""
    pages = (("0", PAGE_BYTES),)
    groups = (Cached(0, "full", 0, pages), Cached(1, "state", 0, pages))
    saves = Saves(Layout(BLOCK, BLOCK // 2, groups, Shards(1, 1)), Options(), Counter())
    request: Any = SimpleNamespace(
        request_id="r", num_computed_tokens=BLOCK, num_tokens=4 * BLOCK, num_prompt_tokens=4 * BLOCK
    )
    offered = [
        (1, 20, BLOCK), (1, 21, 2 * BLOCK), (1, 22, 3 * BLOCK), (1, 23, 4 * BLOCK), (1, 23, 4 * BLOCK),
        (1, 24, 3 * BLOCK + BLOCK // 2), (2, 25, 4 * BLOCK), (1, 0, 3 * BLOCK), (1, 26, 5 * BLOCK),
    ]  # fmt: skip
    state = SimpleNamespace(
        get_block_ids=lambda name: ([1, 2, 3, 4], [20, 0, 9, 23], [0, 0, 0, 25]),
        boundary_state_offloads={"r": offered},
    )
    scheduled = SimpleNamespace(kv_connector_block_state=state)
    keys = Keys(bytes(range(4 * KEY_BYTES)))
    prompt = Prompt(request, b"", True, True)
    saves.served(prompt)
    (save,) = saves.filled(prompt, 3 * BLOCK, scheduled, lambda: keys, 9, lambda: 7)
    assert [(w.group, w.block_ids, w.keys) for w in save.writes] == [
        (0, [2, 3, 4], keys[1:].packed), *[(1, [23], keys[3:].packed)] * 2,
    ]  # fmt: skip
    assert [write.parent for write in save.writes] == [keys[0], keys[2], keys[2]]
    # The page was named twice and is released once.
    saves.reported(RankReport(saves={7: 1}))
    assert not any(saves.in_flight.values())


def test_a_state_is_saved_though_its_blocks_have_no_room_yet() -> None:
    """A state is named only once. The states of blocks without room do not use the room of attention
    blocks."""
    pages = (("0", PAGE_BYTES),)
    groups = (Cached(0, "full", 0, pages), *(Cached(at, "state", 0, pages) for at in (1, 2, 3)))
    layout = Layout(BLOCK, BLOCK, groups, Shards(1, 1))
    saves = Saves(layout, Options(saving=2 * PAGE_BYTES), Counter())
    request: Any = SimpleNamespace(
        request_id="r", num_computed_tokens=0, num_tokens=4 * BLOCK, num_prompt_tokens=4 * BLOCK
    )
    state = SimpleNamespace(
        get_block_ids=lambda name: ([1, 2, 3, 4], *([0, 0, 0, page] for page in (5, 6, 7))),
        boundary_state_offloads={"r": [(at, 4 + at, 4 * BLOCK) for at in (1, 2, 3)]},
    )
    scheduled = SimpleNamespace(kv_connector_block_state=state)
    keys = Keys(bytes(range(4 * KEY_BYTES)))
    prompt = Prompt(request, b"", True, True)
    saves.served(prompt)
    (save,) = saves.filled(prompt, 4 * BLOCK, scheduled, lambda: keys, 9, lambda: 7)
    assert [(write.group, write.block_ids) for write in save.writes] == [
        (0, [1, 2]), (1, [5]), (2, [6]), (3, [7]),
    ]  # fmt: skip
    state.boundary_state_offloads = {"r": [(1, 8, 3 * BLOCK)]}
    state.get_block_ids = lambda name: ([1, 2, 3, 4], [0, 0, 8, 5], [0, 0, 0, 6], [0, 0, 0, 7])
    (save,) = saves.filled(prompt, 4 * BLOCK, scheduled, lambda: keys, 9, lambda: 9)
    assert [(write.group, write.block_ids) for write in save.writes] == [(1, [8])], "no room at all"
    saves.reported(RankReport(saves={7: 1, 9: 1}))
    state.boundary_state_offloads = {}
    (save,) = saves.filled(prompt, 4 * BLOCK, scheduled, lambda: keys, 9, lambda: 8)
    assert [(write.group, write.block_ids) for write in save.writes] == [(0, [3, 4])]


def with_states() -> Layout:
    groups = [Cached(at, kind, 0, ((f"{at}.0", PAGE_BYTES),) * 2) for at, kind in enumerate(KINDS)]
    return Layout(BLOCK, BLOCK, tuple(groups), Shards(1, 1))


def test_a_state_is_saved_though_its_request_is_not_served_by_the_step_that_names_it(
    shared: Daemon, engine_of: EngineOf
) -> None:
    """The state was complete when an earlier step ended, and no later step names it."""
    engine = engine_of(shared, with_states())
    engine.until(lambda: engine.scheduler._daemon.session is not None)
    request = engine.run(engine.add(PROMPT))
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    request.tokens += range(2000, 2000 + BLOCK)
    request.num_computed_tokens = len(request.tokens)
    engine.extend(request)
    engine.compute(request, 8 * BLOCK, 9 * BLOCK)
    engine.whole_states = {request.request_id: [(1, request.pages[1][8], 9 * BLOCK)]}
    engine.carry_out({request.request_id: request}, {}, [])
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    engine.finish(request)
    again = engine_of(shared, with_states())
    found = again.serve([*request.tokens, 1])
    assert found.cached == 9 * BLOCK and not found.failed


def test_a_state_that_can_not_be_saved_is_counted(
    shared: Daemon, engine_of: EngineOf, tmp_path: Path
) -> None:
    """Its page already belongs to another request, or there is no daemon."""
    for socket, why in ((shared.socket, "overwritten"), (str(tmp_path / "no"), "no_daemon")):
        engine = engine_of(socket, with_states(), patience_ms=1)
        line = engine.scheduler._daemon.connection
        assert line is not None and bool(line.wait_first()) == (why == "overwritten")
        request = engine.add(range(2 * BLOCK), kv_transfer_params={"kvtier": {"load": False}})
        engine.whole_states = {request.request_id: [(1, 50, 2 * BLOCK)]}
        engine.run(request)
        assert drops(engine) == {f"drop:{why}": 1}


def test_a_request_may_disable_loads_and_saves(shared: Daemon, engine_of: EngineOf) -> None:
    engine = engine_of(shared)
    engine.serve(PROMPT, kv_transfer_params={"kvtier": {"save": False}})
    assert engine.serve(PROMPT).cached == 0
    assert engine.serve(PROMPT, kv_transfer_params={"kvtier": {"load": False}}).cached == 0
    assert engine.serve(PROMPT, skip_reading_prefix_cache=True).cached == 0
    assert engine.serve(PROMPT).cached == 8 * BLOCK


def test_a_new_generation_finds_no_block_of_the_old_one(
    shared: Daemon, engine_of: EngineOf
) -> None:
    engine = engine_of(shared)
    engine.serve(PROMPT)
    engine.scheduler.new_generation()
    assert engine.serve(PROMPT).cached == 0
    assert engine.serve(PROMPT).cached == 8 * BLOCK


def test_without_a_daemon_requests_miss_and_a_later_daemon_is_used(
    daemon_of: Callable[..., Daemon], engine_of: EngineOf, tmp_path: Any
) -> None:
    folder = tmp_path / "later"
    engine = engine_of(str(folder / "kvtier.sock"))
    for _ in range(3):
        assert engine.serve(PROMPT).cached == 0
    assert engine.scheduler.counts["miss:no_daemon"] == 3
    daemon_of(folder=folder)
    engine.until(lambda: engine.serve(PROMPT).cached > 0)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_promised_blocks_are_loaded_from_the_memory_of_a_dead_daemon(
    own_daemon: Daemon, engine_of: EngineOf, load: str
) -> None:
    engine = engine_of(own_daemon, load=load)
    engine.serve(PROMPT)
    request = engine.add(PROMPT)
    while engine.scheduler.matched(request, 0)[0] is None:
        engine.carry_out({}, {}, [])
    own_daemon.process.kill()
    own_daemon.process.wait()
    engine.run(request)
    assert request.cached == 8 * BLOCK and not request.failed
    assert not engine.wrong_pages(request)


def test_a_save_waits_for_the_first_connection(shared: Daemon, engine_of: EngineOf) -> None:
    engine = engine_of(shared)
    assert (
        engine.scheduler._daemon.connection is not None
        and engine.scheduler._daemon.connection.wait_first() is not None
    )
    # The rank connects in the same step that has the first save for it.
    for worker in engine.workers:
        assert worker.mappings.connection is None
    request = engine.add(PROMPT, kv_transfer_params={"kvtier": {"load": False}})
    engine.step()
    assert request.done
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    assert engine.scheduler.counts["saved"] == 8


def test_a_hung_daemon_delays_one_request_by_its_patience_and_the_next_not_at_all(
    own_daemon: Daemon, engine_of: EngineOf, waits: list[str]
) -> None:
    engine = engine_of(own_daemon, patience_ms=300)
    engine.serve(PROMPT)
    waits.clear()
    own_daemon.process.send_signal(signal.SIGSTOP)
    try:
        assert engine.serve(PROMPT).cached == 0
        later = engine.run(engine.add(PROMPT))
        assert later.cached == 0 and later.steps_asked == 1
        engine.finish(later)
        assert not waits, "the scheduler's thread waited for the daemon"
    finally:
        own_daemon.process.send_signal(signal.SIGCONT)
    engine.until(lambda: engine.serve(PROMPT).cached > 0)
    engine.settle()


def test_a_request_waits_for_a_daemon_that_is_slow_to_accept_a_new_engine(
    own_daemon: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, connecting may take longer than one attempt."""
    engine_of(own_daemon).serve(PROMPT)
    monkeypatch.setattr(plugin_daemon, "CONNECT_S", 0.05)
    own_daemon.process.send_signal(signal.SIGSTOP)
    try:
        engine = engine_of(own_daemon, patience_ms=60_000)
        connection = engine.scheduler._daemon.connection
        assert connection is not None
        engine.until(lambda: bool(connection._lost_reason))
        request = engine.add(PROMPT)
        assert engine.scheduler.matched(request, 0)[0] is None
    finally:
        own_daemon.process.send_signal(signal.SIGCONT)
    engine.run(request)
    assert request.cached == 8 * BLOCK, engine.scheduler.counts
    engine.finish(request)


def test_a_daemon_that_does_not_accept_a_new_engine_delays_it_by_the_patience_in_all(
    own_daemon: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_daemon, "CONNECT_S", 0.05)
    own_daemon.process.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        engine = engine_of(own_daemon, patience_ms=300)
        assert engine.serve(PROMPT).cached == 0
        engine.until(lambda: engine.scheduler._daemon.tried)
        assert time.monotonic() - began >= 0.2
        later = engine.run(engine.add(PROMPT))
        assert later.cached == 0 and later.steps_asked == 1
        engine.finish(later)
    finally:
        own_daemon.process.send_signal(signal.SIGCONT)


def test_a_restarted_daemon_is_used_again(
    daemon_of: Callable[..., Daemon], engine_of: EngineOf, tmp_path: Any
) -> None:
    folder = tmp_path / "again"
    daemon = daemon_of(folder=folder)
    engine = engine_of(daemon, layout_of(ranks=2))
    engine.serve(PROMPT)
    daemon.process.kill()
    daemon.process.wait()
    assert engine.serve(PROMPT).cached == 0
    daemon_of(folder=folder)
    engine.until(lambda: engine.serve(PROMPT).cached > 0)
    engine.settle()


def arenas() -> set[str]:
    """The mapped memory of daemons in this process, by inode."""
    maps = Path("/proc/self/maps").read_text()
    return {line.split()[4] for line in maps.splitlines() if "memfd:" in line}


def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait while the engine makes no step."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.01)


def test_arenas_of_earlier_daemons_are_unmapped(
    daemon_of: Callable[..., Daemon], engine_of: EngineOf, tmp_path: Path
) -> None:
    folder = tmp_path / "again"
    engine = engine_of(str(folder / "kvtier.sock"))

    before = arenas()
    for _ in range(3):
        daemon = daemon_of(folder=folder)
        engine.until(lambda: engine.serve(PROMPT).cached > 0)
        assert arenas() - before
        waits = engine.add(PROMPT)
        engine.step()
        daemon.process.kill()
        daemon.process.wait()
        # Also if a request is still running.
        engine.until(lambda: not arenas() - before)  # other tests' arenas may be unmapped meanwhile
        engine.finish(waits)


def test_an_idle_engine_unmaps_the_arena_of_a_daemon_that_ended(
    daemon_of: Callable[..., Daemon], engine_of: EngineOf, tmp_path: Path
) -> None:
    """No step is made: the next daemon needs the memory, and the next request would wait for it."""
    folder = tmp_path / "again"
    daemon = daemon_of(folder=folder)
    others = arenas()
    engine = engine_of(daemon, layout_of(ranks=2))
    engine.serve(PROMPT)
    engine.settle()
    for end in (Daemon.stop, lambda daemon: daemon.process.kill()):
        old = arenas() - others
        assert old
        end(daemon)
        wait_until(lambda old=old: not old & arenas())  # type: ignore[misc]
        daemon = daemon_of(folder=folder)
        engine.until(lambda: engine.serve(PROMPT).cached > 0)
        engine.settle()


def test_a_rank_keeps_promised_blocks_of_a_daemon_that_ended_mapped(
    shared: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank may be told to load between two steps, which may take any time."""
    engine = engine_of(shared, load="async")
    engine.serve(PROMPT)
    engine.settle()
    (worker,) = engine.workers
    monkeypatch.setattr(kvtier_worker, "IDLE_AFTER_S", 0.0)
    (run,) = worker.mappings.readers
    worker.begin(Step(worker._step, b"", run, 1, [], [], [], False))
    worker.mappings.on_idle(None)
    assert run in worker.mappings.readers, "within a step"
    worker.report()
    with worker.state.lock:
        worker.state.pending_loads[run] += 1
    worker.mappings.on_idle(None)
    assert run in worker.mappings.readers, "while a load is on its way"
    with worker.state.lock:
        worker.state.pending_loads -= Counter((run,))
    assert worker.mappings.connection is not None and worker.mappings.connection.session is not None
    worker.mappings.on_idle(worker.mappings.connection.session)
    assert run in worker.mappings.readers, "while its daemon is there"
    worker.mappings.on_idle(None)
    assert not worker.mappings.readers
    assert engine.serve(PROMPT).cached == 8 * BLOCK, "the next step has it again"


def test_a_step_names_the_daemon_whose_blocks_may_still_be_promised(
    own_daemon: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost while the scheduler makes a step: ranks keep that daemon's memory mapped until
    the step in which the scheduler gives up its leases."""
    engine = engine_of(own_daemon, load="async")
    engine.serve(PROMPT)
    side, (worker,) = engine.scheduler, engine.workers
    (run,) = worker.mappings.readers
    request = engine.add(PROMPT)
    engine.until(lambda: not side.in_flight["tickets"])
    scheduler_line, rank_line = side._daemon.connection, worker.mappings.connection
    assert scheduler_line is not None and rank_line is not None
    step = side._decisions.next_step

    def lost_meanwhile() -> None:
        step()
        own_daemon.process.kill()
        own_daemon.process.wait()
        wait_until(lambda: scheduler_line.session is None and rank_line.session is None)

    monkeypatch.setattr(side._decisions, "next_step", lost_meanwhile)
    monkeypatch.setattr(side, "matched", lambda request, computed: (None, False))
    engine.step()
    assert run in worker.mappings.readers
    monkeypatch.undo()
    engine.run(request)
    assert request.cached == 8 * BLOCK and not request.failed and not engine.wrong_pages(request)


def test_a_rank_reports_only_memory_that_its_loads_can_use(
    shared: Daemon, engine_of: EngineOf
) -> None:
    """It connects during a step, and loses the daemon before the next one."""
    engine = engine_of(shared)
    engine.serve(PROMPT)
    (worker,) = engine.workers
    mappings = worker.mappings
    (run,) = mappings.readers
    mappings._reported = None
    reader = mappings.readers.pop(run)
    assert mappings.changed() is None
    mappings.readers[run] = reader
    assert mappings.changed() is not None


def test_a_rank_reports_that_memory_is_unmapped_before_it_unmaps_it(
    own_daemon: Daemon, engine_of: EngineOf
) -> None:
    """A daemon that hung is connected again as the same one, by the scheduler before a rank."""
    engine = engine_of(own_daemon)
    engine.serve(PROMPT)
    (worker,) = engine.workers
    mappings = worker.mappings
    (run,) = mappings.readers
    line = mappings.connection
    assert line is not None
    own_daemon.process.kill()
    own_daemon.process.wait()
    wait_until(lambda: line.session is None)

    def step(loads: list[LoadOrder]) -> dict[int, RankMapping]:
        worker.begin(Step(worker._step + 1, b"", b"", 0, loads, [], [], False))
        return worker.report().mappings

    assert step([])[0].daemon_run == b"" and run in mappings.readers
    # The scheduler had not got the report yet.
    assert step([LoadOrder(1, "r", run, True, [[]])]) == {} and run in mappings.readers
    assert step([]) == {} and run in mappings.readers
    assert step([]) == {} and not mappings.readers


def test_an_idle_rank_keeps_the_memory_of_a_daemon_that_hangs_mapped(
    own_daemon: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler may not know that it hangs, and promise its blocks when it goes on."""
    monkeypatch.setattr(kvtier_worker, "IDLE_AFTER_S", 0.0)
    monkeypatch.setattr("kvtier_vllm.daemon.CONNECT_S", 0.05)
    engine = engine_of(own_daemon)
    engine.serve(PROMPT)
    (worker,) = engine.workers
    (run,) = worker.mappings.readers
    line = worker.mappings.connection
    assert line is not None and line.session is not None
    own_daemon.process.send_signal(signal.SIGSTOP)
    attempts, attempt = [], line._try_connect
    monkeypatch.setattr(line, "_try_connect", lambda: attempts.append(attempt()) or attempts[-1])
    line.lost(line.session, "it hangs")
    wait_until(lambda: len(attempts) >= 2)
    assert run in worker.mappings.readers
    own_daemon.process.kill()
    own_daemon.process.wait()
    wait_until(lambda: not worker.mappings.readers)


def test_a_very_long_prompt_is_hashed_and_saved_in_parts(
    shared: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_vllm.identity.LIMIT_HASHES", 3)
    monkeypatch.setattr("kvtier_vllm.saves.LIMIT_BLOCKS", 3)
    engine = engine_of(shared)
    engine.until(lambda: engine.scheduler._daemon.session is not None)
    request = engine.add(PROMPT)
    keys = engine.scheduler._prompts[request.request_id].keys
    assert keys is not None and len(keys) == 3
    engine.run(request)
    for _ in range(2):
        grow(engine, request, 1)
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    assert [len(write.block_ids) for write in engine.writes] == [3, 3, 2]
    engine.finish(request)
    assert engine.serve(PROMPT).cached == 8 * BLOCK


def test_unmapping_an_old_arena_does_not_delay_a_step(shared: Daemon, engine_of: EngineOf) -> None:
    """Unmapping much memory takes seconds, also after a reconnection to the same daemon."""
    engine = engine_of(shared)
    engine.serve(PROMPT)
    worker = engine.workers[0]
    run, ends = next(iter(worker.mappings.readers)), []

    class Old:
        extents = 1
        daemon_run = run

        def __del__(self) -> None:
            ends.append(threading.current_thread().name)

    worker.mappings.readers[run] = Old()  # type: ignore[assignment]
    engine.until(lambda: bool(ends))
    assert ends == ["kvtier-save"]
    assert engine.serve(PROMPT).cached == 8 * BLOCK


def test_ready_blocks_are_used_if_the_others_are_late(
    shared: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(shared, patience_ms=1000)
    engine.serve(PROMPT)
    side = engine.scheduler
    request = engine.add([*PROMPT, *range(5 * BLOCK)])
    prompt = side._prompts[request.request_id]
    engine.until(lambda: not side.in_flight["tickets"])
    assert prompt.lookup.lease is not None and prompt.lookup.lease.ready == 8
    prompt.lookup.lease.coming, prompt.lookup.lease.eta_ms = 4, 5000.0
    prompt.lookup.answered = LookupQuery(read_disk=True)
    monkeypatch.setattr(side._forecast, "recompute_s", lambda tokens, before: 1e9)
    prompt.lookup.wait.since = None  # the answer took a whole step
    now = began = prompt.lookup.sent_at = side._clock()
    monkeypatch.setattr(side._decisions, "_clock", lambda: now)
    asked, waits = [], []
    for at_s in (0.0, 0.9, 0.97, 0.99, 1.0):
        now = began + at_s
        side._lookups._for_step.clear()
        assert side.matched(request, 0) == (None, False)
        asked.append(bool(side._lookups._for_step))
        waits.append(prompt.lookup.answer_within_s if side._lookups._for_step else None)
    # The last request might not have been answered in time.
    assert asked == [False, True, True, False, False]
    assert waits[1] == pytest.approx(0.05) and waits[2] == pytest.approx(0.01)
    now = began + 1.1
    tokens, _ = side.matched(request, 0)
    assert tokens == 8 * BLOCK and not side.counts["miss:patience"]
    engine.run(request)
    assert request.cached == 8 * BLOCK and not engine.wrong_pages(request)
    engine.finish(request)
    engine.settle()


def test_a_lookup_without_a_waiting_request_is_cancelled(
    shared: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine continues without the answer, which must not hold a lease until the request ends."""
    engine = engine_of(shared)
    engine.serve(PROMPT)
    side = engine.scheduler
    session = side._daemon.session
    assert session is not None
    cancelled = []
    cancel = session.space.cancel
    monkeypatch.setattr(
        session.space, "cancel", lambda number: (cancelled.append(number), cancel(number))[1]
    )
    with monkeypatch.context() as patch:
        patch.setattr(session.client, "poll", dict)
        request = engine.add(PROMPT)
        prompt = side._prompts[request.request_id]
        assert prompt.lookup.ticket
        engine.waiting.remove(request)
        engine.allocate(request, 0, request.num_tokens)
        side.allocated(request, request.pages, 0)
        assert not prompt.lookup.ticket and cancelled == [prompt.number]
    engine.until(lambda: not side.in_flight["tickets"])
    assert prompt.lookup.lease is None
    engine.carry_out({request.request_id: request}, {request.request_id: request.num_tokens}, [])
    engine.finish(request)
    engine.settle()


def test_an_engine_without_a_daemon_says_so_once_for_all_its_ranks(
    daemon_of: Callable[..., Daemon], engine_of: EngineOf, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    folder = tmp_path / "later"
    engine = engine_of(str(folder / "kvtier.sock"), layout_of(ranks=2))

    def warnings() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]

    for _ in range(3):
        engine.serve(PROMPT)
    (without,) = warnings()
    assert "reconnecting in the background: no daemon at" in without
    daemon_of(folder=folder)
    engine.until(lambda: engine.serve(PROMPT).cached > 0)
    _, back = warnings()
    assert "connected to the daemon" in back


def test_slots_of_another_run_are_not_read(shared: Daemon, engine_of: EngineOf) -> None:
    """All ranks must be connected to the same run of the daemon before a block is promised, and no block is
    read after that run ended."""
    engine = engine_of(shared, load="async")
    engine.serve(PROMPT)
    worker = engine.workers[0]
    request = engine.add(PROMPT)
    while engine.scheduler.matched(request, 0)[0] is None:
        engine.carry_out({}, {}, [])
    (reader,) = worker.mappings.readers.values()
    worker.mappings.readers = {bytes(16): reader}
    worker.mappings.follow = lambda step: None  # type: ignore[method-assign]
    engine.run(request)
    assert request.failed and not engine.wrong_pages(request)
    assert engine.scheduler.counts["load_failed:no_daemon"] == 1


def test_a_slot_that_was_given_away_fails_the_load(shared: Daemon, engine_of: EngineOf) -> None:
    engine = engine_of(shared, load="async")
    engine.serve(PROMPT)
    request = engine.add(PROMPT)
    while engine.scheduler.matched(request, 0)[0] is None:
        engine.carry_out({}, {}, [])
    lease = engine.scheduler._prompts[request.request_id].lookup.lease
    assert isinstance(lease, Lease)
    lease.release()
    with shared.connect() as client:
        space = client.open(spec_for(engine.layout))
        keys = engine.scheduler._prompts[request.request_id].keys
        assert keys is not None and space.forget(keys) == 8
        space.save(space.keys(list(range(100 * BLOCK))), bytes(100 * space.block_bytes))
    engine.run(request)
    assert request.failed and not engine.wrong_pages(request)
    assert engine.scheduler.counts["load_failed:stale"] == 1
    engine.finish(request)
    engine.settle()


def test_blocks_computed_from_a_failed_load_are_not_saved(
    shared: Daemon, engine_of: EngineOf
) -> None:
    engine = engine_of(shared, load="sync")
    engine.serve(PROMPT)
    longer = [*PROMPT, *range(40)]
    request = engine.add(longer)
    while engine.scheduler.matched(request, 0)[0] is None:
        engine.carry_out({}, {}, [])
    worker = engine.workers[0]
    worker.mappings.readers.clear()
    worker.mappings.follow = lambda step: None  # type: ignore[method-assign]
    engine.step()
    assert request.cached == 8 * BLOCK and request.num_computed_tokens == len(longer)
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    assert engine.scheduler.counts["saved"] == 8
    assert engine_of(shared).serve(longer).cached == 8 * BLOCK


@pytest.mark.parametrize("save", [True, False])
def test_pages_are_tracked_as_unverified_only_if_saves_are_enabled(
    shared: Daemon, engine_of: EngineOf, save: bool
) -> None:
    engine_of(shared).serve(PROMPT)
    engine = engine_of(shared, load="sync", save=save)
    begun, doubted = engine.scheduler._saves.unverified, []
    call = begun.reported
    begun.reported = lambda *told: (doubted.append(len(begun)), call(*told))  # type: ignore[assignment]
    assert engine.serve(PROMPT).cached == 8 * BLOCK
    assert max(doubted) == (9 if save else 0)
    assert not len(begun)


@pytest.mark.parametrize("shape", ["two ranks", "a window", "six groups"])
def test_loads_run_between_steps_if_their_failure_could_not_be_reported(
    shared: Daemon, engine_of: EngineOf, shape: str
) -> None:
    engine = engine_of(shared, SHAPES[shape], load="sync")
    engine.serve(PROMPT)
    engine.run(request := engine.add(PROMPT))
    assert request.cached
    assert request.between


def test_a_rank_that_does_not_connect_delays_one_request(
    shared: Daemon, engine_of: EngineOf, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(plugin_daemon, "WAIT_IN_STEP_S", 60.0)  # answers never exceed the patience
    engine = engine_of(shared, patience_ms=200)
    engine.until(lambda: engine.serve(PROMPT).cached > 0)
    engine.settle()
    counts = engine.scheduler.counts
    before = counts["miss:rank_away"] + counts["miss:patience"]
    seat = engine.scheduler._decisions.ranks.by_rank[0]
    engine.scheduler._decisions.ranks.by_rank[0] = RankMapping(
        bytes(16), seat.identity, seat.extents
    )
    engine.finish(engine.run(engine.add(PROMPT)))
    assert counts["miss:rank_away"] + counts["miss:patience"] == before + 1
    asked = engine.add(PROMPT)
    engine.run(asked)
    assert asked.cached == 0 and asked.steps_asked <= 20
    assert counts["miss:rank_away"] >= 1
    assert [one.getMessage() for one in caplog.records if "a rank is not" in one.getMessage()]


def test_a_request_of_an_old_generation_is_not_saved_in_the_new_one(
    shared: Daemon, engine_of: EngineOf
) -> None:
    engine = engine_of(shared)
    engine.serve(range(1000, 1000 + BLOCK))
    request = engine.add(PROMPT)
    request.num_computed_tokens = BLOCK
    engine.scheduler.new_generation()
    request.num_computed_tokens = 0
    engine.finish(engine.run(request))
    engine.settle()
    assert engine.serve(PROMPT).cached == 0


def test_the_reset_after_a_change_of_weights_begins_another_generation(
    shared: Daemon, engine_of: EngineOf
) -> None:
    """Until then the engine's own cache had blocks of the old weights. Other resets change nothing."""
    engine = engine_of(shared)
    engine.scheduler.own_cache_reset()
    engine.serve(PROMPT)
    engine.scheduler.own_cache_reset()
    assert engine.serve(PROMPT).cached == 8 * BLOCK
    engine.scheduler.new_generation(weights=True)
    assert engine.serve(PROMPT).cached == 0
    engine.scheduler.new_generation()  # connectors are reset, though the engine's own cache may not be
    engine.serve(PROMPT)
    engine.scheduler.own_cache_reset()
    assert engine.serve(PROMPT).cached == 0
    engine.scheduler.own_cache_reset()
    assert engine.serve(PROMPT).cached == 8 * BLOCK


def test_pages_reused_before_their_save_are_not_saved(shared: Daemon, engine_of: EngineOf) -> None:
    """The request ends before its save begins, and the next request gets its pages."""
    engine = engine_of(shared, pages=10)
    engine.serve(range(1000, 1000 + BLOCK))
    held = threading.Event()
    engine.workers[0].state.tasks.put(lambda: bool(held.wait(60)))
    first = engine.run(engine.add(PROMPT))
    engine.finish(first)
    second = engine.run(engine.add(range(500, 500 + 8 * BLOCK + 3)))
    held.set()
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    assert engine.scheduler.counts["drop:overwritten"] == 8
    engine.finish(second)
    assert engine.serve(PROMPT).cached == 0
    assert engine.serve(range(500, 500 + 8 * BLOCK + 3)).cached == 8 * BLOCK


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "is cancelled"])
def test_no_save_reads_pages_whose_memory_is_discarded(
    shared: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """Before an engine sleeps. A save that waits in the thread does not begin."""
    monkeypatch.setattr(kvtier_worker, "DRAIN_S", 30.0 if ends else 0.05)
    engine = engine_of(shared)
    engine.serve(range(1000, 1000 + BLOCK))
    (worker,), held, counts = engine.workers, threading.Event(), engine.scheduler.counts
    before = counts["saved_tokens"]
    worker.state.tasks.put(lambda: bool(held.wait(0.3 if ends else 60)))
    request = engine.run(engine.add(PROMPT))
    worker.end_copies()
    assert worker.saves.copying() != ends
    engine.memory[0][:] = 0xEE
    held.set()
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    engine.finish(request)
    assert counts["saved_tokens"] - before == (8 * BLOCK if ends else 0)
    assert engine_of(shared).serve(PROMPT).cached == (8 * BLOCK if ends else 0)


def test_memory_is_not_discarded_before_a_load_has_ended(
    shared: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load cannot be cancelled."""
    engine = engine_of(shared, load="async")
    engine.serve(PROMPT)
    (worker,), load, held = engine.workers, engine.workers[0].loads._load, threading.Event()

    def slowly(order: LoadOrder) -> bool:
        assert held.wait(60)
        return load(order)

    worker.loads._load = slowly  # type: ignore[method-assign]
    request = engine.add(PROMPT)
    engine.until(lambda: bool(worker.state.pending_loads))
    monkeypatch.setattr(kvtier_worker, "LOADS_S", 0.05)
    with pytest.raises(TimeoutError, match="1 loads still fill pages"):
        worker.end_copies()
    monkeypatch.setattr(kvtier_worker, "LOADS_S", 30.0)
    threading.Timer(0.1, held.set).start()
    worker.end_copies()
    assert not worker.state.pending_loads
    engine.finish(engine.run(request))


class StagesEngine(FakeEngine):
    """Two pipeline stages, of which the second one has only the first layer of each group."""

    def worker(self, rank: int, pages: Pages) -> WorkerSide:
        layout = self.layout
        if rank == 1:
            layout, pages = smaller_stage(layout, pages)
        return WorkerSide(layout, self.options, rank, pages, [self.memory[rank].reshape(-1)])

    def wrong_pages(self, request: FakeRequest) -> list[tuple[int, int, int, int]]:
        return [place for place in super().wrong_pages(request) if place[0] == 0 or place[2] == 0]


@pytest.mark.parametrize("parts", [(1, 1), (2, 1)], ids=["equal blocks", "different blocks"])
def test_a_smaller_stage_stores_a_part_of_its_shard(
    daemon_of: Callable[..., Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    parts: tuple[int, int],
) -> None:  # fmt: skip
    """Through memory and disk, with loads that compare checksums: a checksum of the part would not be one of
    the shard, which the daemon and other clients read."""
    monkeypatch.setattr(Forecast, "recompute_s", lambda *_: float("inf"))
    layout = in_stages(layout_of([20, 0], ranks=2, parts=parts))
    (tmp_path / "cold").mkdir()
    cold = f'[cold]\ndirectories = ["{tmp_path / "cold"}"]\nsize = "256MiB"\n'
    for cached in (0, 8 * BLOCK):
        daemon = daemon_of(folder=tmp_path, config='[warm]\nsize = "4MiB"\n' + cold)
        daemon.wait_for_disks()
        for found in (cached, 8 * BLOCK):
            engine = StagesEngine(daemon.socket, layout, verify=True, patience_ms=20_000)
            try:
                assert engine.serve(PROMPT).cached == found
                engine.settle()
                failed = {what for what in +engine.scheduler.counts if "failed" in what}
                assert not failed, engine.scheduler.counts
            finally:
                engine.close()
        daemon.stop()


def test_saves_are_delayed_while_too_many_bytes_wait(shared: Daemon, engine_of: EngineOf) -> None:
    engine = engine_of(shared, saving=2 * engine_block_bytes())
    engine.serve(range(1000, 1000 + BLOCK))
    request = engine.run(engine.add(PROMPT))
    assert engine.scheduler.in_flight["bytes"] <= 2 * engine_block_bytes()
    engine.finish(request)
    assert engine.scheduler.counts["drop:no_time"] == 6
    engine.settle()
    assert engine.run(engine.add(PROMPT)).cached == 2 * BLOCK


def grow(engine: FakeEngine, request: FakeRequest, tokens: int) -> None:
    """Continue the request by `tokens` tokens in one step."""
    request.tokens += range(2000, 2000 + tokens)
    engine.extend(request)
    engine.carry_out({request.request_id: request}, {request.request_id: tokens}, [])


def drops(engine: FakeEngine) -> dict[str, int]:
    return {name: n for name, n in engine.scheduler.counts.items() if name.startswith("drop:")}


def drop_saves(engine: FakeEngine, step: Callable[[], object]) -> None:
    """Cancel the saves of a step, as when their pages are reused."""
    held = threading.Event()
    engine.workers[0].state.tasks.put(lambda: bool(held.wait(60)))
    step()
    for copying in engine.workers[0].saves.pending.values():
        copying.cancel()
    held.set()
    engine.until(lambda: not engine.scheduler.in_flight["saves"])


def test_a_dropped_save_is_repeated(shared: Daemon, engine_of: EngineOf) -> None:
    """While the request has its pages: blocks that it saves later could not be found without them."""
    engine = engine_of(shared)
    engine.serve(range(1000, 1000 + BLOCK))
    before = drops(engine)
    request = engine.add(PROMPT)
    drop_saves(engine, lambda: engine.run(request))
    grow(engine, request, 2 * BLOCK)
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    engine.finish(request)
    assert engine.serve([*request.tokens, 1]).cached == 10 * BLOCK
    # No block was lost in the end.
    assert drops(engine) == before


def test_saves_cancelled_together_count_as_one_attempt(shared: Daemon, engine_of: EngineOf) -> None:
    """A preemption cancels all saves of a request that wait for their copy."""
    engine = engine_of(shared)
    engine.serve(range(1000, 1000 + BLOCK))
    before = drops(engine)
    request = engine.add(PROMPT)

    def chunks() -> None:
        engine.run(request)
        for _ in range(TRIES):
            grow(engine, request, BLOCK)
        assert len(engine.workers[0].saves.pending) == TRIES + 1

    drop_saves(engine, chunks)
    grow(engine, request, BLOCK)
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    engine.finish(request)
    assert engine.serve([*request.tokens, 1]).cached == (8 + TRIES + 1) * BLOCK
    assert drops(engine) == before


def test_a_block_whose_pages_are_reused_between_two_writes_is_counted_once(
    shared: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two groups is saved, and the second is cancelled because its request ended."""
    engine = engine_of(shared, layout_of([0, 0]))
    engine.serve(range(1000, 1000 + BLOCK))
    before, saved = Counter(drops(engine)), engine.scheduler.counts["saved"]
    worker = engine.workers[0]
    plain = worker.saves._copy

    def copy_in(session: Any, write: Any, copying: Any) -> Counter[str]:
        if write.group == 1:
            copying.cancel()
        return plain(session, write, copying)

    monkeypatch.setattr(worker.saves, "_copy", copy_in)
    engine.finish(engine.run(engine.add(PROMPT)))
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    assert engine.scheduler.counts["saved"] - saved == 8
    assert Counter(drops(engine)) - before == Counter({"drop:overwritten": 8})


def test_blocks_after_a_permanent_hole_are_not_saved(shared: Daemon, engine_of: EngineOf) -> None:
    engine = engine_of(shared)
    engine.serve(range(1000, 1000 + BLOCK))
    saved = engine.scheduler.counts["saved"]
    request = engine.add(PROMPT)
    drop_saves(engine, lambda: engine.run(request))
    for _ in range(TRIES - 1):
        drop_saves(engine, lambda: grow(engine, request, 1))
    assert engine.scheduler.counts["drop:overwritten"] == 8
    writes = len(engine.writes)
    grow(engine, request, 2 * BLOCK)
    assert len(engine.writes) == writes and engine.scheduler.counts["saved"] == saved
    engine.finish(request)
    assert engine.scheduler.counts["drop:after_hole"] == 2


def test_attempts_are_counted_separately_for_each_hole(shared: Daemon, engine_of: EngineOf) -> None:
    """As in a model with windows, whose pages are released one step after the other."""
    engine = engine_of(shared)
    engine.serve(range(1000, 1000 + BLOCK))
    before = drops(engine)
    request = engine.run(engine.add(PROMPT))
    for _ in range(TRIES + 1):
        engine.until(lambda: not engine.scheduler.in_flight["saves"])
        drop_saves(engine, lambda: grow(engine, request, BLOCK))
        grow(engine, request, 1)
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    engine.finish(request)
    assert engine.serve([*request.tokens, 1]).cached == (8 + TRIES + 1) * BLOCK
    assert drops(engine) == before


def test_a_permanent_hole_is_counted_without_decoded_blocks(
    shared: Daemon, engine_of: EngineOf
) -> None:
    """The prompt's blocks are counted, the blocks of the answer are not."""
    engine = engine_of(shared, save_decode=False)
    engine.serve(range(1000, 1000 + BLOCK))
    before = Counter(drops(engine))
    request = engine.add(PROMPT)
    drop_saves(engine, lambda: engine.run(request))
    request.prompt_tokens = len(request.tokens)
    request.tokens += range(2000, 2000 + 3 * BLOCK)
    request.num_computed_tokens = len(request.tokens)
    engine.finish(request)
    assert Counter(drops(engine)) - before == Counter({"drop:no_time": 8})


def test_a_daemon_without_room_gets_no_further_save_requests(
    daemon_of: Callable[..., Daemon], engine_of: EngineOf
) -> None:
    daemon = daemon_of(warm="1MiB")
    engine = engine_of(daemon)
    engine.serve(range(1000, 1000 + BLOCK))
    with daemon.connect() as client:
        space = client.open(spec_for(engine.layout))
        count = (1 << 20) // space.block_bytes
        keys = space.keys(list(range(5000, 5000 + count * BLOCK)))
        space.save(keys, bytes(count * space.block_bytes))
        lease = space.lease(keys, 60_000)
        assert lease.ready >= count - 1
        request = engine.run(engine.add(PROMPT))
        engine.until(lambda: not engine.scheduler.in_flight["saves"])
        assert engine.scheduler.counts["not_saved:no_room"] >= 7
        writes = len(engine.writes)
        grow(engine, request, 2 * BLOCK)
        assert len(engine.writes) == writes
        engine.finish(request)


def test_saves_to_a_growing_daemon_are_retried_until_it_has_room(
    shared: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(shared)
    engine.serve(range(1000, 1000 + BLOCK))
    worker, plain, times = engine.workers[0], engine.workers[0].saves._copy, TRIES + 2

    def copy_in(session: Any, write: Any, copying: Any) -> Counter[str]:
        nonlocal times
        times -= 1
        return Counter({"not_saved:growing": 8}) if times >= 0 else plain(session, write, copying)

    monkeypatch.setattr(worker.saves, "_copy", copy_in)
    request = engine.run(engine.add(PROMPT))
    for _ in range(TRIES + 2):
        engine.until(lambda: not engine.scheduler.in_flight["saves"])
        grow(engine, request, 1)
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    engine.finish(request)
    assert times < 0 and engine.serve([*PROMPT, 1]).cached == 8 * BLOCK


def test_an_engine_does_not_wait_while_the_daemon_grows(
    shared: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(shared)
    engine.serve(range(1000, 1000 + BLOCK))
    waited: list[float] = []

    take = Saving._take

    def growing(saving: Saving, granted: wire.Reserved, mappings: BothMappings) -> None:
        saving._space.link.ask(wire.Abort(1 << 30, granted.lease), wire.Done)
        none = wire.Reserved(1, 0, bytes([wire.GROWING]) * len(saving._keys), b"")
        take(saving, none, mappings)

    monkeypatch.setattr(Saving, "_take", growing)
    monkeypatch.setattr(Link, "wait_for_growth", lambda link, until: waited.append(until))
    request = engine.run(engine.add(PROMPT))
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    engine.finish(request)
    assert engine.scheduler.counts["not_saved:growing"] and not waited


def test_blocks_of_a_failed_load_are_not_counted_as_dropped(
    shared: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the engine ends a request whose load failed, none of its blocks could be saved."""
    engine = engine_of(shared, load="async")
    engine.serve(PROMPT)
    before, worker = drops(engine), engine.workers[0]
    for recomputed in (False, True):
        request = engine.add(PROMPT)
        prompt = engine.scheduler._prompts[request.request_id]
        while engine.scheduler.matched(request, 0)[0] is None:
            engine.carry_out({}, {}, [])
        monkeypatch.setattr(
            worker.loads, "_load", lambda load: worker.loads._count(load, "stale", 0, 0.0)
        )
        while not request.failed:
            engine.step()
        if recomputed:
            engine.run(request)
        else:
            request.num_computed_tokens = request.cached
        engine.finish(request)
        assert drops(engine) == before
        assert (prompt.save.unfilled, prompt.save.saved) == (
            (False, 8) if recomputed else (True, 0)
        )


def test_a_new_daemon_gets_all_blocks_of_a_running_request(
    daemon_of: Callable[..., Daemon], engine_of: EngineOf, tmp_path: Any
) -> None:
    """A restarted daemon has lost the first blocks of a running request."""
    folder = tmp_path / "again"
    daemon = daemon_of(folder=folder)
    engine = engine_of(daemon)
    engine.serve(range(1000, 1000 + BLOCK))
    request = engine.run(engine.add(PROMPT))
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    ranks, line = engine.scheduler._decisions.ranks, engine.scheduler._daemon.connection
    assert line is not None
    before = ranks.by_rank[0].daemon_run
    daemon.process.kill()
    daemon.process.wait()
    daemon_of(folder=folder)
    # Both sides are connected to the new daemon: a rank without a daemon reports no run.
    engine.until(lambda: ranks.by_rank[0].daemon_run not in (before, b""))
    engine.until(lambda: bool(line.session) and line.session.reader.daemon_run != before)
    grow(engine, request, 2 * BLOCK)
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    engine.finish(request)
    assert engine.serve([*request.tokens, 1]).cached == 10 * BLOCK


def test_blocks_computed_before_a_daemon_started_are_saved(
    daemon_of: Callable[..., Daemon], engine_of: EngineOf, tmp_path: Any
) -> None:
    folder = tmp_path / "later"
    engine = engine_of(str(folder / "kvtier.sock"))
    request = engine.run(engine.add(PROMPT))
    daemon = daemon_of(folder=folder)
    engine.until(
        lambda: (
            bool(engine.scheduler._decisions.ranks.by_rank)
            and engine.scheduler._daemon.session is not None
        )
    )
    grow(engine, request, 2 * BLOCK)
    engine.until(lambda: engine.scheduler.counts["saved"] == 10)
    engine.finish(request)
    assert engine_of(daemon).serve([*request.tokens, 1]).cached == 10 * BLOCK


def test_pages_that_a_load_left_unfilled_are_saved_when_they_are_computed(
    shared: Daemon, engine_of: EngineOf
) -> None:
    engine = engine_of(shared, load="async")
    engine.serve(PROMPT)
    request = engine.add(PROMPT)
    while engine.scheduler.matched(request, 0)[0] is None:
        engine.carry_out({}, {}, [])
    keys = engine.scheduler._prompts[request.request_id].keys
    with shared.connect() as client:
        assert keys is not None and client.open(spec_for(engine.layout)).forget(keys) == 8
    worker = engine.workers[0]
    (reader,) = worker.mappings.readers.values()
    worker.mappings.readers = {bytes(16): reader}
    worker.mappings.follow = lambda step: None  # type: ignore[method-assign]
    engine.run(request)
    assert request.failed
    engine.until(lambda: not engine.scheduler.in_flight["saves"])
    engine.finish(request)
    assert engine_of(shared).serve(PROMPT).cached == 8 * BLOCK


def test_more_keys_than_a_lease_may_have_are_cut(
    shared: Daemon, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that would be refused as a whole is loaded as far as one lease permits."""
    layout = layout_of([0, 20], ranks=2)
    engine_of(shared, layout).serve(PROMPT)
    # For each rank's two groups: six slots of the first, and the two of the window.
    monkeypatch.setattr("kvtier.wire.LIMIT_TOLD_SLOTS", 2 * 6 + 2 * 2)
    assert engine_of(shared, layout).serve(PROMPT).cached == 6 * BLOCK


def test_a_request_waits_once_for_coming_blocks_before_any_step_was_measured() -> None:
    side = SchedulerSide(layout_of(), Options(), clock=lambda: 0.0)
    prompt = Prompt(None, b"", True, True)
    coming: Any = SimpleNamespace(ready=0, coming=8, eta_ms=100.0)
    answers = [
        side._decisions.patience.worth_waiting(prompt, coming, 0, now)
        for now in (0.0, 0.2, 0.3, 0.9)
    ]
    assert answers == [True, True, False, False]
    # Once a step was measured, its time decides: 8 blocks in a millisecond here, in a second there.
    side._forecast.stepped(8 * BLOCK, 0.0, 0.001)
    assert not side._decisions.patience.worth_waiting(prompt, coming, 0, 0.0)
    slow = SchedulerSide(layout_of(), Options(), clock=lambda: 0.0)
    slow._forecast.stepped(8 * BLOCK, 0.0, 1.0)
    assert slow._decisions.patience.worth_waiting(prompt, coming, 0, 0.9)


def test_coming_blocks_are_weighed_by_the_blocks_that_a_load_needs() -> None:
    """For windows only the last blocks count, for states one: earlier ones are neither read nor copied."""
    page = (("0", 1000),)
    kinds = [("full", 0), ("window", BLOCK + 1), ("state", 0)]
    groups = tuple(Cached(at, kind, window, page) for at, (kind, window) in enumerate(kinds))
    layout = Layout(BLOCK, BLOCK, groups, Shards(1, 1))
    assert [layout.load_bytes(blocks) for blocks in (0, 1, 2, 100)] == [0, 3000, 5000, 103_000]
    side = SchedulerSide(layout, Options(), clock=lambda: 0.0)
    side._forecast.loaded(1000, 1.0)
    prompt = Prompt(None, b"", True, True)
    coming: Any = SimpleNamespace(ready=0, coming=100, eta_ms=0.0)
    for recompute_s, worth in ((102.0, False), (104.0, True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(side._forecast, "recompute_s", lambda *_, all_s=recompute_s: all_s)
            assert side._decisions.patience.worth_waiting(prompt, coming, 0, 0.0) == worth


def test_a_shutdown_waits_briefly_for_loads_and_saves_in_progress(
    shared: Daemon, engine_of: EngineOf
) -> None:
    """The time limit also applies if a save and a load take longer."""
    worker = engine_of(shared).workers[0]
    held = threading.Event()
    worker.state.tasks.put(lambda: bool(held.wait(60)))
    worker.loads._load = lambda load: held.wait(60)  # type: ignore[method-assign]
    worker.loads.orders.put((LoadOrder(1, "r", b"", False, []), None))
    try:
        ending = threading.Thread(target=worker.close)
        ending.start()
        ending.join(30)
        assert not ending.is_alive()
    finally:
        held.set()


def engine_block_bytes() -> int:
    return layout_of().block_bytes


def test_an_abort_leaves_nothing_behind(shared: Daemon, engine_of: EngineOf) -> None:
    engine = engine_of(shared, load="async")
    engine.serve(PROMPT)
    asked = engine.add(PROMPT)
    engine.finish(asked)
    leased = engine.add(PROMPT)
    while engine.scheduler.matched(leased, 0)[0] is None:
        engine.carry_out({}, {}, [])
    engine.finish(leased)
    loading = engine.add(PROMPT)
    engine.until(lambda: bool(engine.loading))
    engine.finish(loading)
    engine.until(lambda: not engine.loading)
    engine.settle()
    stats = shared.wait_for(lambda stats: not leases(stats))
    assert not leases(stats)


def leases(stats: dict[str, Any]) -> int:
    return int(stats["tenants"]["default"]["leases"])


def test_many_concurrent_prompts_are_loaded_correctly(shared: Daemon, engine_of: EngineOf) -> None:
    layout: Layout = layout_of([0, 20], ranks=2)
    engine = engine_of(shared, layout, pages=512)
    prompts = [[*range(4 * BLOCK), *range(n * 100, n * 100 + 40)] for n in range(1, 13)]
    for cached in (0, 6 * BLOCK):
        requests = [engine.add(prompt) for prompt in prompts]
        for request in requests:
            engine.run(request)
            assert not engine.wrong_pages(request)
        engine.until(lambda: not engine.scheduler.in_flight["saves"])
        for request in requests:
            engine.finish(request)
        assert min(request.cached for request in requests) >= cached
    engine.settle()


def test_an_engine_s_death_frees_its_leases(shared: Daemon, engine_of: EngineOf) -> None:
    engine = engine_of(shared)
    engine.serve(PROMPT)
    request = engine.add(PROMPT)
    while engine.scheduler.matched(request, 0)[0] is None:
        engine.carry_out({}, {}, [])
    assert leases(shared.stats()) == 1
    engine.scheduler.close()
    shared.wait_for(lambda stats: not leases(stats))
