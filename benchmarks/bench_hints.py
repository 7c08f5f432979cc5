"""What hints and announcements of agents are worth: misses with and without them, of the same requests.

    python benchmarks/bench_hints.py [--requests N] [--seeds N] [--no-daemon] [--speed N] [--out FILE]

The requests are those of agents' loops: a long system prompt that all agents of a kind share, a task, and
then steps, of which each has all before it. A loop waits for a tool between two steps, some for seconds, some
for minutes, some for a person. Loops of several kinds run at the same time, and end for good, or are taken up
again by their user.

What a client tells is what it knows. After a step that calls a tool: whether the next step is expected soon
(a hint of 0.9), later (0.5, medium) or when a person has answered (0.1). After the last step: that
the loop has ended (0). Hints are about the blocks of the loop, not about those of the system prompt, which
others use. The client is wrong where a loop is cancelled while its tool runs, or is taken up again after its
end. While a person types an answer, it announces the next step (`prefetch`), some seconds before the request;
for persons who send nothing too. It does not announce what follows a tool: it does not know before the tool
answers when that is.

A miss is a block that was requested before, and now is not in memory or comes after such a one. With a disk
below memory there are two kinds: blocks that are not in memory, of which some come from disk in time, and
those that are computed. Blocks of new tokens do not count, as no cache has them; other rows count them.
The simulated rows are counts that do not depend on the machine. A run is valid if the calls to the daemon
were in time.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import harness
from harness import Row, at_least
from kvtier import Client, Group, KvSpec
from kvtier_daemon.sim import trace
from kvtier_daemon.sim.replay import OPTIMUM, replay
from kvtier_daemon.sim.tiers import Machine, Simulation
from kvtier_daemon.tools.sizing import PrefillCost

BAR = 0.15
BLOCK_TOKENS = 64
KINDS = 6  # of agents
LOOPS_S = 0.1  # begin in a second
PERSON = 0.1  # what the client tells when a person has to answer
# Of the waits: their share, their median in seconds, the spread, and what the client tells then.
TOOLS = ((0.60, 2.0, 0.8, 0.9), (0.28, 40.0, 0.9, 0.5), (0.12, 480.0, 1.0, PERSON))
ENDED = 0.0  # what the client tells when a loop has ended
CANCELLED, TAKEN_UP = 0.04, 0.15  # of the waits, and of the ends
TAKEN_UP_AFTER_S = 300.0
AHEAD_S = 5.0  # at most, and at most half of the wait, an announcement comes before its request
MOST_BLOCKS = 1000  # of a request
POINTS = (2, 5, 10, 20)  # percent of the unique blocks that memory has
DISK = 4  # times the memory
TOKEN_BYTES = 128 << 10
PREFILL = PrefillCost(1e-4)
SEEDS = (1, 2, 3)
DAEMON_POINT, DAEMON_BLOCK = 20, 32768
LATE_SHARE = 0.5  # of the time between an announcement and its request, that a call may be late


class Event(NamedTuple):
    """At this time a request with these blocks, a hint about them, or their announcement."""

    seconds: float
    order: int
    what: str
    blocks: list[int]
    importance: float = 0.0


def blocks_of(chance: random.Random, median_tokens: float, spread: float) -> int:
    return max(1, round(chance.lognormvariate(math.log(median_tokens), spread) / BLOCK_TOKENS))


def agents(requests: int, seed: int) -> list[Event]:
    """The requests of agents' loops, with the hints and announcements of their clients."""
    chance, new, order = random.Random(seed), itertools.count(1), itertools.count()
    systems = [[next(new) for _ in range(blocks_of(chance, 7000, 0.5))] for _ in range(KINDS)]
    popular = [1 / (at + 1) for at in range(KINDS)]
    waiting: list[tuple[float, int, list[int], int, int]] = []
    events: list[Event] = []
    now, count = 0.0, 0

    def grown(chain: list[int], median_tokens: float) -> list[int]:
        return chain + [next(new) for _ in range(blocks_of(chance, median_tokens, 0.9))]

    def later(when: float, chain: list[int], shared: int, steps: int) -> None:
        heapq.heappush(waiting, (when, next(order), chain, shared, steps))

    def tell(when: float, what: str, blocks: list[int], importance: float = 0.0) -> None:
        events.append(Event(when, next(order), what, blocks, importance))

    def types(when: float, wait_s: float, chain: list[int]) -> None:
        tell(when + wait_s - min(AHEAD_S, wait_s / 2), "announced", chain)

    while count < requests:
        now += chance.expovariate(LOOPS_S)
        [system] = chance.choices(systems, popular)
        steps = max(1, round(chance.lognormvariate(math.log(9), 0.8)))
        later(now, grown(system, 600), len(system), steps)
        while waiting and waiting[0][0] <= now and count < requests:
            when, _, chain, shared, left = heapq.heappop(waiting)
            tell(when, "request", chain)
            count += 1
            if left > 1 and len(chain) < MOST_BLOCKS:
                [(_, median, spread, importance)] = chance.choices(TOOLS, [one[0] for one in TOOLS])
                wait_s = chance.lognormvariate(math.log(median), spread)
                tell(when, "hint", chain[shared:], importance)
                if importance == PERSON:
                    types(when, wait_s, chain)
                if chance.random() >= CANCELLED:
                    later(when + wait_s, grown(chain, 900), shared, left - 1)
                continue
            tell(when, "hint", chain[shared:], ENDED)
            goes_on = chance.random()
            if goes_on < TAKEN_UP + CANCELLED and len(chain) < MOST_BLOCKS:
                wait_s = chance.lognormvariate(math.log(TAKEN_UP_AFTER_S), 1)
                types(when, wait_s, chain)
                if goes_on < TAKEN_UP:
                    steps = max(1, round(chance.expovariate(0.3)))
                    later(when + wait_s, grown(chain, 300), shared, steps)
    end = max(event.seconds for event in events if event.what == "request")
    return sorted(event for event in events if event.seconds <= end)


def lines(events: Sequence[Event], told: bool) -> Iterator[str]:
    """A trace as `kvtier record` writes it; what clients tell only if `told`."""
    for event in events:
        is_request = event.what == "request"
        if is_request or told:
            line: dict[str, Any] = {
                "timestamp": event.seconds * 1000,
                "input_length": len(event.blocks) * BLOCK_TOKENS if is_request else 0,
                "output_length": 0, "hash_ids": event.blocks, "block_tokens": BLOCK_TOKENS,
            }  # fmt: skip
            if event.what == "hint":
                line["importance"] = event.importance
            elif not is_request:
                line["announced"] = True
            yield json.dumps(line)


def traces_of(events: Sequence[Event]) -> dict[bool, trace.TraceRequests]:
    with tempfile.TemporaryDirectory() as folder:
        path, found = Path(folder, "trace.jsonl"), {}
        for told in (False, True):
            path.write_text("\n".join(lines(events, told)))
            found[told] = trace.read(path)
    assert found[False].looked_up_blocks == found[True].looked_up_blocks
    assert found[False].native.unique == found[True].native.unique
    return found


# --- simulated -----------------------------------------------------------------------------------


def in_memory(requests: trace.TraceRequests, policy: str, blocks: int) -> float:
    """The blocks that a tier of memory alone does not have when they are requested."""
    return requests.looked_up_blocks - replay(requests, policy, blocks, PREFILL).hit_blocks


def with_disk(requests: trace.TraceRequests, blocks: int) -> tuple[float, float]:
    """The same for memory with a disk below it; and those that are not read from disk in time either."""
    block_bytes = BLOCK_TOKENS * TOKEN_BYTES
    machine = Machine(
        blocks * block_bytes, DISK * blocks * block_bytes, TOKEN_BYTES, "auto", PREFILL
    )
    totals = Simulation(requests, machine).run()
    absent = totals.looked_up_blocks - totals.hit_blocks["memory"]
    return absent, absent - totals.hit_blocks["nvme"]


def saved_row(
    title: str, runs: Sequence[dict[str, float]], kind: str = "", counts_new: bool = False
) -> Row:
    """How many misses are saved. A run has the absent blocks `without` and `with`, of this kind, the `new`
    ones among them, and all that were requested; if it has an `optimum`, that is shown."""
    names = (f"without{kind}", f"with{kind}")
    gone = [0.0 if counts_new else one["new"] for one in runs]
    shares = [
        1 - (one[names[1]] - new) / (one[names[0]] - new)
        for one, new in zip(runs, gone, strict=True)
    ]
    shown = {"without": names[0], "with": names[1], "optimum": f"optimum{kind}"}
    more = {
        text: mean(
            (one[name] - new) / one["requested"] for one, new in zip(runs, gone, strict=True)
        )
        for text, name in shown.items()
        if name in runs[0]
    }
    row = at_least(title, mean(shares), "", BAR, **more)
    row.low, row.high = min(shares), max(shares)
    return row


def simulated(requests: int, seeds: Sequence[int]) -> list[Row]:
    found: dict[int, list[dict[str, float]]] = {point: [] for point in POINTS}
    for seed in seeds:
        traces = traces_of(agents(requests, seed))
        plain, told, new = traces[False], traces[True], traces[False].native.unique
        for point in POINTS:
            blocks = new * point // 100
            without, with_it = with_disk(plain, blocks), with_disk(told, blocks)
            run = {
                "new": new, "requested": plain.looked_up_blocks,
                "without": in_memory(plain, "auto", blocks), "with": in_memory(told, "auto", blocks),
                "optimum": in_memory(plain, OPTIMUM, blocks),
                "without of memory": without[0], "with of memory": with_it[0],
                "without computed": without[1], "with computed": with_it[1],
            }  # fmt: skip
            found[point].append(run)
    kinds = (
        ("", "misses that hints save", ""),
        (" and a disk", "misses of memory that hints and announcements save", " of memory"),
        (" and a disk", "computed blocks that hints and announcements save", " computed"),
    )
    return [
        saved_row(
            f"memory of {point}%{also}: {what}{', if new ones count' * counts_new}",
            found[point], kind, counts_new,
        )
        for also, what, kind in kinds
        for counts_new in (False, True)
        for point in POINTS
    ]  # fmt: skip


# --- a real daemon -------------------------------------------------------------------------------


class Outcome(NamedTuple):
    absent: int  # blocks that were not in memory
    requested: int
    late_s: float  # after the time of its event, that a call began; of a hundred calls the second latest


def real(events: Sequence[Event], told: bool, blocks: int, speed: float) -> Outcome:
    """A daemon with memory and a disk, and a client that sends these requests, `speed` times as fast."""
    spec = KvSpec.groups(
        [Group(layers=1, opaque_bytes=DAEMON_BLOCK, shards=1)], model="bench", dtype="uint8",
        block_tokens=BLOCK_TOKENS, weights="bench",
    )  # fmt: skip
    size = blocks * (DAEMON_BLOCK + 4096)
    absent = requested = hinted = known = 0
    late: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "disk").mkdir()
        cold = (
            f'[cold]\ndirectories = ["{folder}/disk"]\nsize = {DISK * size}\nsegment = "1MiB"\n'
            'codec = "raw"\n'  # the content is mostly zeroes
        )
        with (
            harness.Daemon(Path(folder), str(blocks * DAEMON_BLOCK), cold) as daemon,
            Client.connect(daemon.socket) as client,
        ):
            daemon.wait_for_arena()
            space, began = client.open(spec), time.monotonic()
            for event in events:
                if event.what != "request" and not told:
                    continue
                due = began + event.seconds / speed
                time.sleep(max(0.0, due - time.monotonic()))
                late.append(time.monotonic() - due)
                # A block's number names it with all blocks before it, and a hint leaves those out.
                names = [one.to_bytes(32, "little") for one in event.blocks]
                keys = space.keys_of_hashes(names, alone=True)
                if event.what == "hint":
                    hinted += len(keys)
                    known += space.hint(keys, event.importance)
                elif event.what == "announced":
                    space.prefetch(keys)
                else:
                    with space.load(keys) as ready:
                        for name, view in zip(event.blocks, ready, strict=False):
                            assert view is not None and view[:8] == name.to_bytes(8, "little")
                        there = len(ready)
                    requested += len(keys)
                    absent += len(keys) - there
                    content = [
                        one.to_bytes(8, "little").ljust(DAEMON_BLOCK, b"\0") for one in event.blocks
                    ]
                    space.save(keys, content, wait_s=0)
    assert known >= 0.99 * hinted, f"{hinted} blocks got hints, {known} of them are stored"
    return Outcome(absent, requested, harness.percentile(late, 0.99))


def confirmed(requests: int, seed: int, speed: float) -> tuple[list[Row], list[dict[str, Any]]]:
    """The row, and the probes that tell whether the client was in time."""
    events = agents(requests, seed)
    new = len({one for event in events if event.what == "request" for one in event.blocks})
    blocks = new * DAEMON_POINT // 100
    without, with_it = (real(events, told, blocks, speed) for told in (False, True))
    title = f"a daemon with memory of {DAEMON_POINT}% and a disk: misses of memory that they save"
    run = {
        "without": without.absent,
        "with": with_it.absent,
        "new": new,
        "requested": without.requested,
    }
    probes = [
        {"late_s": one.late_s, "disturbed": one.late_s > LATE_SHARE * AHEAD_S / speed}
        for one in (without, with_it)
    ]
    row, same = saved_row(title, [run]), traces_of(events)
    first, second = (with_disk(same[told], blocks)[0] - new for told in (False, True))
    row.more["simulated"] = 1 - second / first
    return [row], probes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--no-daemon", action="store_true")
    parser.add_argument("--daemon-requests", type=int, default=600)
    parser.add_argument("--speed", type=float, default=5.0, help="of the requests to the daemon")
    parser.add_argument("--out")
    options = parser.parse_args()
    rows, probes = simulated(options.requests, SEEDS[: options.seeds]), []
    if not options.no_daemon:
        more, probes = confirmed(options.daemon_requests, SEEDS[0], options.speed)
        rows += more
    return harness.report("hints", rows, probes, options.out)


if __name__ == "__main__":
    sys.exit(main())
