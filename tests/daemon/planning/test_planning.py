"""Loads that wait for a disk: the order in which they are served, and which of them should recompute."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvtier_daemon.planning.planner import FORGET_S, LIMIT_DECLINED, LIMIT_REQUESTS, Planner
from kvtier_daemon.planning.read_order import (
    GUESS_BYTES_S,
    LIMIT_WAITS,
    STALE_S,
    WINDOW_READS,
    DiskLink,
)
from models.planning import BLOCK, RATE, Load, World
from support.effort import effort

NEVER = float("inf")
WORKLOADS = effort(75, 1000, 1000)


def blocks(name: str, count: int) -> list[str]:
    return [f"{name}.{at}" for at in range(count)]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def eight_waiting(writes: bool) -> tuple[list[float], int]:
    """How long each urgent load takes while eight other loads wait."""
    world = World(writes=writes)
    dice = random.Random(1)
    loads = [Load(f"long{at}.{again}", again * 1.5, blocks(f"l{at}.{again}", 128), 20.0)
             for again in range(20) for at in range(8)]  # fmt: skip
    urgent = [Load(f"urgent{at}", 0.02 + at * 0.1 + dice.random() * 0.05,
                   blocks(f"u{at}", 16), 0.5) for at in range(280)]  # fmt: skip
    world.run(loads + urgent)
    assert all(load.over_at < NEVER for load in urgent)
    return [load.over_at for load in urgent], world.disk.written


def test_writes_delay_urgent_reads_only_a_little() -> None:
    """Eight loads wait on a disk of 3 GB/s: write-back delays an urgent load only a little."""
    alone, _ = eight_waiting(writes=False)
    beside, written = eight_waiting(writes=True)
    assert percentile(beside, 0.99) <= 1.2 * percentile(alone, 0.99)
    assert written > 1 << 30, "nothing was written: the test shows nothing"


def test_the_waiting_load_with_the_least_time_is_served_first() -> None:
    world = World()
    long = Load("long", 0.0, blocks("a", 300), 10.0)
    short = Load("short", 0.02, blocks("b", 8), 0.06)
    world.run([long, short])
    assert short.over_at < 0.06
    assert short.over_at + 0.02 < long.over_at


@pytest.mark.parametrize("recompute_s, why", [(0.2, "slower"), (1.2, "faster")])
def test_the_faster_of_load_and_recompute_is_chosen(recompute_s: float, why: str) -> None:
    world = World()
    load = Load("a", 0.0, blocks("a", 500), recompute_s)  # 0.35 s
    world.run([load])
    assert load.verdict is not None
    assert load.verdict.why == why
    assert load.verdict.load == (why == "faster")
    assert load.verdict.load_s == pytest.approx(0.35, rel=0.02)
    assert not load.verdict.load or load.over_at < recompute_s


def test_a_load_that_would_delay_another_past_its_deadline_is_declined() -> None:
    world = World()
    first = Load("first", 0.0, blocks("a", 500), 0.45)
    eager = Load("eager", 0.01, blocks("b", 200), 0.25)
    world.run([first, eager])
    assert eager.verdict is not None
    assert eager.verdict.why == "crowded"
    assert first.over_at <= 0.45


def test_a_shared_block_is_read_once_with_the_earlier_deadline() -> None:
    world = World()
    ahead = Load("ahead", 0.0, blocks("z", 400), 5.0)
    late = Load("late", 0.001, blocks("a", 20), 20.0)
    soon = Load("soon", 0.002, blocks("a", 20), 0.2)
    world.run([ahead, late, soon])
    assert max(world.reads.values()) == 1
    assert soon.over_at < 0.05 < ahead.over_at
    assert late.over_at < 0.05


@pytest.mark.parametrize("both", [False, True])
def test_blocks_of_a_cancelled_request_are_read_only_for_others(both: bool) -> None:
    world = World()
    ahead = Load("ahead", 0.0, blocks("z", 100), 0.5)
    leaves = Load("leaves", 0.001, blocks("a", 50), 1.0, gone_at=0.005)
    stays = Load("stays", 0.002, blocks("a", 50), 5.0)
    world.run([ahead, leaves, stays] if both else [ahead, leaves])
    assert sum(world.reads.values()) == (150 if both else 100)
    assert (stays.over_at < NEVER) == both
    assert not len(world.planner.order)


def test_a_cancel_does_not_recall_reads_that_were_submitted() -> None:
    world = World()
    load = Load("a", 0.0, blocks("a", 100), 5.0)
    world.ask(load)
    begun = world.planner.order.take(world.link)
    assert WINDOW_READS <= len(begun) < 30
    back = world.planner.cancel("a")
    assert set(back) == set(load.blocks) - set(begun)
    # A request for one of these blocks now joins the read that is in progress.
    world.gone(back)
    again = Load("b", 0.0, load.blocks[:10], 5.0)
    world.ask(again)
    assert len(world.planner.order) == len(begun)
    for block in begun:
        world.planner.ended(block, good=True)
    assert not len(world.planner.order)
    assert not world.planner.eta_s("b")


def test_the_end_of_a_read_returns_the_requests_that_waited_for_it() -> None:
    """All urgent requests that were not cancelled; each waits for the same blocks."""
    world = World()
    asked = blocks("a", 2)
    for name in ("first", "gone", "last"):
        world.ask(Load(name, 0.0, asked, 5.0))
    world.ask(Load("prefetch", 0.0, asked, urgent=False))
    assert set(world.planner.order.take(world.link)) == set(asked)
    assert world.planner.cancel("gone", 0) == []
    assert sorted(map(str, world.planner.ended(asked[0], good=True))) == ["first", "last"]
    world.planner.cancel("first")
    assert world.planner.ended(asked[1], good=True) == ["last"]


def test_a_prefetch_ends_although_urgent_loads_use_the_bandwidth() -> None:
    """Urgent loads that use the whole bandwidth leave it a small part."""
    world = World()
    prefetch = Load("prefetch", 0.0, blocks("p", 64), urgent=False)
    urgent = [Load(f"u{at}", at * 0.02, blocks(f"u{at}", 32), 60.0) for at in range(200)]
    world.run([prefetch, *urgent])
    busy = max(load.at + load.over_at for load in urgent)
    assert busy > 4.0
    assert 0.1 < prefetch.over_at < busy / 2
    alone = World()
    urgent = [Load(f"u{at}", at * 0.02, blocks(f"u{at}", 32), 60.0) for at in range(200)]
    alone.run(urgent)
    assert busy == pytest.approx(max(load.at + load.over_at for load in urgent), rel=0.1)


def test_a_repeated_request_gets_the_same_verdict() -> None:
    world = World()
    slow = Load("slow", 0.0, blocks("s", 500), 0.1)
    world.ask(slow)
    first = slow.verdict
    world.ask(slow)
    assert first is not None and slow.verdict is not None
    assert (first.first, slow.verdict.first) == (True, False)
    assert (first.load, slow.verdict.load) == (False, False)
    quick = Load("quick", 0.0, blocks("q", 50), 1.0)
    world.ask(quick)
    world.ask(quick)
    assert quick.verdict is not None
    assert quick.verdict.load and not quick.verdict.first
    assert len(world.planner.order) == 50


def test_a_request_is_decided_again_after_it_was_cancelled() -> None:
    """The disk may be faster by then."""
    world = World()
    slow = Load("slow", 0.0, blocks("s", 500), 0.1)
    world.ask(slow)
    assert slow.verdict is not None and not slow.verdict.load
    world.planner.cancel("slow")
    assert not world.planner.knows("slow")
    world.ask(slow)
    assert slow.verdict.first


def test_a_load_that_is_late_is_given_up() -> None:
    world = World()
    load = Load("a", 0.0, blocks("a", 100), 0.2)
    world.ask(load)
    world.now += 0.209
    assert world.planner.expire() == []
    world.now += 0.002
    assert world.planner.expire() == load.blocks
    world.gone(list(load.blocks))
    world.ask(load)
    assert load.verdict is not None
    assert (load.verdict.load, load.verdict.why) == (False, "late")


def test_a_released_lease_ends_the_wait_unless_its_request_is_repeated() -> None:
    world = World()
    for name in ("a", "b"):
        world.ask(Load(name, 0.0, blocks(name, 10), 5.0))
        world.planner.released(name)
    world.now += 0.1
    world.ask(Load("b", 0.0, blocks("b", 10), 5.0))
    world.now += 0.2
    assert world.planner.expire() == blocks("a", 10)
    assert len(world.planner.order) == 10


def test_announced_reads_count_like_queued_ones() -> None:
    world = World()
    planner, link = world.planner, world.link
    assert planner.weigh("a", {link: 200 * BLOCK}, recompute_s=60.0).load
    planner.add("a", [], announced={link: 200 * BLOCK})
    expected = 200 * BLOCK / RATE
    assert planner.eta_s("a") == pytest.approx(expected, rel=0.01)
    assert planner.weigh("b", {link: BLOCK}, recompute_s=61.0).load_s > expected
    for at in range(0, 200, 50):
        names = blocks("a", 200)[at : at + 50]
        planner.add_more("a", [(name, link, BLOCK) for name in names], (), at == 150)
        assert planner.eta_s("a") == pytest.approx(expected, rel=0.01)
    while taken := planner.order.take(link):
        for name in taken:
            planner.ended(str(name), good=True)
    assert not planner.knows("a") and not len(planner.order) and not planner.order.waits


def test_a_request_that_waits_for_more_blocks_ends_with_the_last_of_them() -> None:
    world = World()
    planner, link = world.planner, world.link
    planner.weigh("a", {link: 4 * BLOCK})
    planner.add("a", [("a", link, BLOCK)], announced={link: 3 * BLOCK})
    assert planner.order.take(link) == ["a"]
    planner.ended("a", good=True)
    assert planner.is_waiting("a")
    planner.add_more("a", [("b", link, BLOCK)], (), is_all=False)
    assert planner.cancel("a") == ["b"]
    assert not planner.is_waiting("a") and not len(planner.order)


@pytest.mark.parametrize("both", [False, True])
def test_a_request_with_many_blocks_is_cancelled_in_parts(both: bool) -> None:
    world = World()
    planner = world.planner
    world.ask(Load("leaves", 0.0, blocks("a", 100), 5.0))
    if both:
        world.ask(Load("stays", 0.0, blocks("a", 100), 5.0))
    waits = planner.order.waits
    names = planner.cancel("leaves", most=16)
    assert not planner.knows("leaves")
    world.gone(names)
    # The id of the cancelled request may be used again.
    world.ask(Load("leaves", 0.0, blocks("b", 10), 5.0))
    while planner.is_cancelling:
        before = planner.order.waits
        more = planner.continue_cancel(16)
        assert before - planner.order.waits <= 16
        world.gone(more)
        names += more
    assert names == ([] if both else blocks("a", 100))
    assert planner.order.waits == waits - 100 + 10
    assert planner.is_waiting("leaves") and len(planner.order) == (110 if both else 10)
    world.run([])
    assert not len(planner.order) and not planner.order.waits


def test_reads_of_a_cancelled_request_do_not_affect_a_later_one_with_its_id() -> None:
    world = World()
    planner = world.planner
    world.ask(Load("a", 0.0, blocks("a", 8), 5.0))
    begun = planner.order.take(world.link, 8)
    planner.cancel("a", most=4)
    world.ask(Load("a", 0.0, blocks("b", 3), 5.0))
    for block in begun:
        planner.ended(block, good=True)
    assert planner.is_waiting("a")
    assert planner.continue_cancel() == []
    assert not planner.is_cancelling and len(planner.order) == 3


def test_many_late_requests_are_given_up_in_parts() -> None:
    world = World()
    for at in range(10):
        load = Load(f"{at}", 0.0, blocks(f"{at}", 5), 1.0)
        world.ask(load)
        assert load.verdict is not None and load.verdict.load
    world.now += 2.0
    given_up = world.planner.expire(most=12)
    assert 0 < len(given_up) <= 12
    while world.planner.is_cancelling:
        names = world.planner.continue_cancel(12)
        assert len(names) <= 12
        given_up += names
    assert sorted(map(str, given_up)) == sorted(
        name for at in range(10) for name in blocks(f"{at}", 5)
    )
    assert world.planner.late == 10


def test_remembered_declines_are_limited_and_do_not_block_new_requests() -> None:
    world, many = World(), blocks("m", 500)
    for at in range(2 * LIMIT_REQUESTS):
        slow = Load(f"slow{at}", 0.0, many, 0.1)
        world.ask(slow)
        assert slow.verdict is not None and slow.verdict.why == "slower"
    quick = Load("quick", 0.0, blocks("q", 5), 1.0)
    world.ask(quick)
    assert quick.verdict is not None and quick.verdict.load
    for at in range(LIMIT_DECLINED):
        world.ask(Load(f"more{at}", 0.0, many, 0.1))
    assert world.planner.knows("quick") and not world.planner.knows("slow0"), "the oldest goes"
    world.now += FORGET_S + 0.1
    world.planner.expire()
    assert not world.planner.knows("more0")


def test_joining_a_prefetch_that_is_slower_than_recompute_is_declined() -> None:
    world = World()
    world.ask(Load("prefetch", 0.0, blocks("a", 500), urgent=False))
    load = Load("a", 0.0, blocks("a", 500), 0.2)  # 0.35 s
    world.ask(load)
    assert load.verdict is not None and load.verdict.why == "slower"


def test_the_bandwidth_of_a_disk_is_learned_and_becomes_stale() -> None:
    world = World(rate=5e8)
    assert world.link.bytes_s == pytest.approx(5e8, rel=0.01)
    world.now += STALE_S + 1
    assert world.link.bytes_s == GUESS_BYTES_S
    world.link.began(BLOCK, urgent=True)
    assert world.link.bytes_s == pytest.approx(5e8, rel=0.01), "somebody reads, so it is known"


def test_the_bandwidth_is_learned_from_urgent_reads_not_from_prefetches() -> None:
    world = World(rate=3e9)
    link = world.link

    def read(urgent: bool, rate: float) -> None:
        for _ in range(1500):
            link.began(BLOCK, urgent)
            world.now += BLOCK / rate
            link.ended(BLOCK, BLOCK, urgent)

    read(True, 3e9)
    read(False, 5e8)
    assert link.bytes_s == pytest.approx(3e9, rel=0.01)
    read(True, 1e9)
    assert link.bytes_s == pytest.approx(1e9, rel=0.1), "what urgent ones say is learned yet"
    link.began(BLOCK, urgent=True)
    read(False, 2.5e9)
    assert link.bytes_s > 2e9, "what comes beside an urgent one counts, as its time does"


def test_nothing_is_promised_of_a_store_before_it_was_measured() -> None:
    """A prefetch measures it, also after requests. An old measurement is promised from, and weighs little."""
    world = World()
    link = world.link = DiskLink(lambda: world.now, 1e8, is_remote=True)

    def why(name: str) -> str:
        load = Load(name, 0.0, blocks(name, 100), 60.0)
        world.ask(load)
        world.gone(world.planner.cancel(name))
        assert load.verdict is not None
        return load.verdict.why

    def read(urgent: bool, rate: float) -> None:
        for _ in range(4):
            link.began(BLOCK, urgent)
            world.now += BLOCK / rate
            link.ended(BLOCK, BLOCK, urgent)

    assert link.is_guessed and link.may_probe() and not link.may_probe()
    assert why("new") == "unreliable"
    read(True, 2e6)
    assert not link.is_guessed and not link.may_probe()
    assert why("slow") == "slower"
    world.now += STALE_S + 1
    assert why("stale") == "slower"
    assert link.may_probe()
    read(False, 1e9)
    assert link.bytes_s > 4e8
    assert why("fast") == "faster"
    world.now += STALE_S + 1
    link.began(BLOCK, True)
    assert link.bytes_s > 4e8


def test_one_decision_in_a_hundred_is_reversed_if_that_costs_little() -> None:
    tried = Counter[str]()
    for dice in (0.5, 0.005):
        for recompute_s in (0.3, 0.36, 0.43, 3.0):
            world = World()
            world.planner = Planner(lambda world=world: world.now, dice=lambda dice=dice: dice)
            load = Load("a", 0.0, blocks("a", 500), recompute_s)  # 0.35 s; 0.44 s is sure
            world.ask(load)
            assert load.verdict is not None
            tried[f"{dice} {recompute_s} {load.verdict.why}"] += 1
    assert set(tried) == {
        "0.5 0.3 slower", "0.5 0.36 crowded", "0.5 0.43 crowded", "0.5 3.0 faster",
        "0.005 0.3 slower", "0.005 0.36 crowded", "0.005 0.43 tried_load", "0.005 3.0 faster",
    }  # fmt: skip
    world = World()
    world.planner = Planner(lambda: world.now, dice=lambda: 0.005)
    load = Load("a", 0.0, blocks("a", 500), 0.5)
    world.ask(load)
    assert load.verdict is not None
    assert (load.verdict.load, load.verdict.why) == (False, "tried_compute")


def test_waiting_requests_and_their_blocks_are_limited() -> None:
    world = World()
    for at in range(LIMIT_REQUESTS):
        world.ask(Load(f"{at}", 0.0, ["one"], 50.0))
    beyond = Load("beyond", 0.0, ["one"], 50.0)
    world.ask(beyond)
    assert beyond.verdict is not None
    assert (beyond.verdict.load, beyond.verdict.why) == (False, "too_many")
    many = World()
    for at in range(20):
        many.ask(Load(f"{at}", 0.0, blocks("same", 4096), 500.0), nbytes=4096)
    assert many.planner.order.waits == LIMIT_WAITS
    # After requests join and leave, no entry remains.
    for _ in range(50):
        many.ask(Load("again", 0.0, blocks("other", 64), 100.0), nbytes=4096)
        many.gone(many.planner.cancel("again"))
    for at in range(20):
        many.gone(many.planner.cancel(f"{at}"))
    assert (many.planner.order.waits, len(many.planner.order)) == (0, 0)
    many.planner.order.take(many.link)
    assert not any(many.planner.order._queues.values())


# --- many workloads ------------------------------------------------------------------------------


def edf_keeps(loads: list[Load], rate: float, late_s: float) -> bool:
    """Whether serving by deadline alone would have all of them in time."""
    left = {load.name: float(len(load.blocks) * BLOCK) for load in loads}
    times = sorted({load.at for load in loads})
    now = 0.0
    while any(left.values()):
        here = [load for load in loads if load.at <= now and left[load.name]]
        after = next((at for at in times if at > now), NEVER)
        if not here:
            now = after
            continue
        first = min(here, key=lambda load: load.at + load.recompute_s)
        over = now + left[first.name] / rate
        if over <= after:
            left[first.name], now = 0.0, over
            if now > first.at + first.recompute_s - late_s:
                return False
        else:
            left[first.name] -= (after - now) * rate
            now = after
    return True


def workload(seed: int) -> list[Load]:
    dice = random.Random(seed)
    crowd = dice.choice([0.2, 0.5, 1.0, 3.0])
    prefixes = dice.choice([0, 0, 3])
    easy = dice.random() < 0.4
    factors = [2.0, 5.0, 20.0] if easy else [0.5, 1.1, 2.0, 5.0, 20.0]
    loads, at = [], 0.0
    for number in range(dice.randrange(5, 40)):
        count = dice.choice([1, 4, 16, 64, 200])
        at += dice.expovariate(crowd * RATE / (60 * BLOCK))
        if prefixes and dice.random() < 0.5:
            named = blocks(f"shared{dice.randrange(prefixes)}", count)
        else:
            named = blocks(f"own{number}", count)
        recompute_s = (0.1 if easy else 0.02) + dice.choice(factors) * count * BLOCK / RATE
        gone = at + dice.random() * recompute_s if dice.random() < 0.1 else NEVER
        loads.append(Load(f"{number}", at, named, recompute_s, gone))
    for number in range(dice.randrange(3)):
        loads.append(Load(f"p{number}", dice.random() * at, blocks(f"p{number}", 20), urgent=False))
    return loads


def check_workload(seed: int, writes: Callable[[random.Random], bool]) -> Counter[str]:
    loads = workload(seed)
    world = World(writes=writes(random.Random(seed)))
    world.run(loads)
    seen: Counter[str] = Counter()
    most = sum(len(load.blocks) for load in loads)
    assert world.most_waiting <= most
    assert (world.planner.order.waits, len(world.planner.order)) == (0, 0)
    assert set(world.reads.values()) <= {1}, "a block was read twice"
    for load in loads:
        assert load.verdict is not None, "a request was lost"
        seen[load.verdict.why] += 1
        if load.gone_at < NEVER:
            continue
        if not load.verdict.load:
            assert load.over_at == NEVER
        elif load.urgent:
            assert load.over_at <= 1.05 * load.recompute_s, (seed, load.name, load.verdict)
        else:
            assert load.over_at < NEVER, "a prefetch starved"
    asked = [load for load in loads if load.urgent]
    alone = all(name.startswith("own") for load in asked for name in load.blocks)
    if alone and edf_keeps(asked, 0.7 * RATE, 0.03):
        seen["feasible"] += 1
        late = [load.name for load in asked if load.verdict and not load.verdict.load]
        assert not late, (seed, late)
    return seen


def test_random_workloads_keep_the_planners_guarantees() -> None:
    """Every load is answered, no block is read twice, no load takes more than 5% longer than recompute,
    and if serving by deadline alone would finish all loads in time, the planner does too."""
    seen: Counter[str] = Counter()
    for seed in range(WORKLOADS):
        seen += check_workload(seed, lambda dice: dice.random() < 0.3)
    for why in ("faster", "slower", "crowded", "prefetch"):
        assert seen[why] > WORKLOADS / 2, seen
    assert seen["feasible"] > WORKLOADS / 20, seen


def test_writes_continue_after_a_shared_read_ended() -> None:
    planner, link = Planner(lambda: 0.0, lambda: 1.0), DiskLink(lambda: 0.0)
    for name in ("one", "two", "three"):
        joined = [] if name == "one" else ["block"]
        assert planner.weigh(name, {link: 1 << 20} if name == "one" else {}, joined).load
        planner.add(name, [("block", link, 1 << 20)] if name == "one" else [], joined)
    assert planner.order.take(link) == ["block"]
    planner.ended("block", True)
    assert planner.order.may_write(link)
    assert planner.order.waits == len(planner.order) == 0


# --- disks slower than forecast ---------------------------------------------------------------


def stalled(world: World, name: str, stall_s: float, **changes: Any) -> str:
    """The verdict for a request whose 10 blocks arrive `stall_s` later than forecast."""
    load = Load(name, 0.0, blocks(name, 10), **{"recompute_s": 2.0, **changes})
    world.ask(load)
    assert load.verdict is not None
    if load.verdict.load:
        while names := world.planner.order.take(world.link):
            world.now += load.verdict.load_s + stall_s
            for one in names:
                world.planner.ended(one, good=True)
            stall_s = 0.0
        world.gone(blocks(name, 10))
    return load.verdict.why


def test_an_unreliable_disk_is_not_used_until_its_reads_are_in_time_again() -> None:
    world = World()
    assert [stalled(world, f"late{at}", 1.0) for at in range(3)] == [
        "faster",
        "faster",
        "unreliable",
    ]
    assert world.link.may_probe() and not world.link.may_probe(), "one probe at a time"
    assert stalled(world, "probe late", 1.0, urgent=False) == "prefetch"
    for at in range(4):
        assert stalled(world, f"still{at}", 0.0) == "unreliable"
        assert stalled(world, f"probe{at}", 0.0, urgent=False) == "prefetch"
    assert stalled(world, "again", 0.0) == "faster"
    assert not world.link.may_probe()


def test_a_request_cancelled_after_its_forecast_counts_as_late() -> None:
    world = World()
    for at in range(2):
        world.ask(Load(f"gone{at}", 0.0, blocks(f"gone{at}", 10), 2.0))
        world.now += 0.5
        world.gone(world.planner.cancel(f"gone{at}"))
    assert stalled(world, "next", 0.0) == "unreliable"


def test_a_request_cancelled_early_or_overtaken_does_not_count_as_late() -> None:
    world = World()
    for at in range(4):
        world.ask(Load(f"gone{at}", 0.0, blocks(f"gone{at}", 10), 2.0))
        world.gone(world.planner.cancel(f"gone{at}"))
        long = Load(f"long{at}", 0.0, blocks(f"long{at}", 100), 9.0)
        short = [Load(f"s{at}.{n}", 0.01, blocks(f"s{at}.{n}", 200), 1.0) for n in range(3)]
        world.start = world.now
        world.run([long, *short])
        assert long.over_at > 2 * 100 * BLOCK / RATE + 0.05
    assert world.link.is_reliable
