"""A simulation of memory and a disk: replays the requests of a trace and computes their times to the first
token.

Eviction uses the daemon's policies, and loads use its planner. The models are: the bandwidths of the links,
the log of segments on the disk, and the time to compute.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import compress, takewhile
from math import ceil

from kvtier.key import KEY_BYTES
from kvtier_daemon.catalog.admission import Admission
from kvtier_daemon.catalog.blocks import LOOK_AHEAD
from kvtier_daemon.catalog.policy import Policy, make
from kvtier_daemon.planning import DiskLink, Planner
from kvtier_daemon.planning.recomputed import RecomputedBlocks, prefetch_limit
from kvtier_daemon.sim.disk import SimDisk
from kvtier_daemon.sim.engine_cache import EngineCache
from kvtier_daemon.sim.trace import ANNOUNCED, TraceRequests
from kvtier_daemon.tiers.cold.flusher import LIMIT_SAVED
from kvtier_daemon.tiers.cold.mover import DECLINED_S, TOO_SLOW
from kvtier_daemon.tiers.cold.write_budget import WriteBudget
from kvtier_daemon.tools.sizing import PrefillCost

ADMISSIONS = ("auto", "all", "second-touch")
# With a cache of the engine on top: kvtier does not know what it holds; it knows; and it also gets blocks
# only when the engine is about to drop them.
RESIDENCY = ("off", "on", "lazy")
SEGMENTS = 64
NEARLY_FULL = 7 / 8  # of memory, above which the next victims are written to the disk
WRITTEN_AHEAD = 64
LATE_CHECK_S = 0.05
LOOK_BLOCKS = 1024  # candidates that are checked for admission
NOWHERE = 0xFFFFFFFF
SEED = 1


@dataclass(frozen=True, slots=True)
class Machine:
    """The simulated machine. Sizes are in bytes; `nvme_bytes` 0 means no cold tier."""

    memory_bytes: int
    nvme_bytes: int
    token_bytes: int
    policy: str
    prefill: PrefillCost
    memory_bytes_s: float = 25e9
    nvme_read_bytes_s: float = 6e9
    nvme_write_bytes_s: float = 3e9
    codec_ratio: float = 1.0  # stored bytes per saved byte
    daily_bytes: int = 0  # that may be written to the disk per day; 0: no limit
    admission: str = "auto"  # as cold.admission
    engines: int = 0  # that compute one request at a time; 0: as many as there are requests
    patience_s: float = 5.0
    hbm_bytes: int = 0  # the engines' own cache; 0: not simulated
    residency: str = "on"  # one of RESIDENCY, with `hbm_bytes`


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request between its arrival and its first token."""

    index: int
    came: float
    nodes: list[int]
    tokens: int
    own: int = 0  # leading blocks in the engine's own cache
    ready: int = 0  # blocks in that cache, then in memory, at its arrival
    loaded: int = 0  # blocks that were loaded from disk
    missing: set[int] = field(default_factory=set)


@dataclass(slots=True)
class SimTotals:
    looked_up_blocks: int = 0
    hit_blocks: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    recompute_s: float = 0.0
    recompute_s_saved: float = 0.0
    waits_s: list[float] = field(default_factory=list)


class Simulation:
    """Replays a trace once."""

    def __init__(self, requests: TraceRequests, machine: Machine) -> None:
        self._requests = requests
        self._machine = machine
        block_bytes = machine.token_bytes * requests.block_tokens
        self._block_bytes = block_bytes
        self._frame_bytes = max(1, round(block_bytes * machine.codec_ratio))
        self.memory_blocks = machine.memory_bytes // block_bytes
        self.nvme_blocks = machine.nvme_bytes // self._frame_bytes
        self.now = requests.seconds[0] if len(requests) else 0.0
        self.totals = SimTotals()
        self._policy = make(machine.policy)
        self._planner = Planner(lambda: self.now, random.Random(SEED).random)
        self._link = DiskLink(lambda: self.now)
        self._disk = SimDisk(
            self._planner,
            self._link,
            machine.nvme_read_bytes_s,
            machine.nvme_write_bytes_s,
            self.now,
        )
        self._nodes = memoryview(requests.native.nodes()).cast("I")
        unique = requests.native.unique
        self._parents = array("I", [NOWHERE]) * unique
        self._memory = bytearray(unique)  # 1: the block is in memory
        self._held = Counter[int]()
        self._frames: dict[int, int] = {}  # the segment of the block's frame
        # blocks with a frame that were requested since it was written
        self._wanted: set[int] = set()
        self._writing: set[int] = set()
        self._segments: deque[list[int]] = deque([[]])
        self._segment_number = 0
        self._in_memory = 0
        self._budget = WriteBudget(machine.daily_bytes, lambda: self.now)
        self._admission = Admission()
        if machine.admission == "second-touch" or (
            machine.admission == "auto" and machine.daily_bytes
        ):
            self._admission.turn_on()
        self._hints: dict[int, float] = {}  # of blocks that are not stored yet
        self._loading: dict[int, WaitingRequest] = {}
        self._waiters: dict[int, list[WaitingRequest]] = {}
        self._reading: set[int] = set()
        self._late = 0
        # After a load that was declined because the disk was too slow or too busy: until then nothing is
        # written ahead, and no block stays in memory because it is not written.
        self._short_until = float("-inf")
        self._recomputed = RecomputedBlocks()
        self._prefetched: set[int] = set()  # and neither used nor evicted since
        self._prefetches_used = 0
        self._free = [self.now] * machine.engines
        self._ends: list[tuple[float, int, WaitingRequest]] = []
        self.hbm_blocks = machine.hbm_bytes // block_bytes
        self._engine = EngineCache(self.hbm_blocks)
        self._knows_engine = self.hbm_blocks > 0 and machine.residency != "off"
        # In the order of the saves; of many, the oldest are dropped.
        self._unwritten: deque[int] = deque(maxlen=LIMIT_SAVED)

    # --- time ----------------------------------------------------------------------------------

    def run(self, progress: Callable[[int], None] = lambda n: None) -> SimTotals:
        start = 0
        for index in range(len(self._requests)):
            self._run_until(self._requests.seconds[index])
            length = self._requests.lengths[index]
            nodes = list(self._nodes[start : start + length])
            start += length
            self._arrive(index, nodes)
            progress(1)
        self._run_until(float("inf"))
        return self.totals

    def _run_until(self, then: float) -> None:
        """Process all events before `then`."""
        while True:
            ends = self._ends[0][0] if self._ends else float("inf")
            late = self.now + LATE_CHECK_S if self._reading else float("inf")
            at = min(then, ends, self._disk.next_s(), late)
            if at == float("inf"):
                return
            self._disk.run_until(at)
            self.now = max(self.now, at)
            self._take_completed()
            while self._ends and self._ends[0][0] <= self.now:
                one = heapq.heappop(self._ends)[2]
                self._free_nodes(one.nodes[one.own : one.ready + one.loaded])
                self._end(one.nodes)
            if self._reading:
                expired = [int(str(node)) for node in self._planner.expire()]
                self._reading.difference_update(expired)
                returning = self._engine.returning.intersection(expired)
                self._policy.left(_ids(self._engine.drop_away(returning)))
                self._compute_late_loads()
            if at >= then:
                return

    # --- a request -----------------------------------------------------------------------------

    def _arrive(self, index: int, nodes: list[int]) -> None:
        if (hint := self._requests.hints[index]) == ANNOUNCED:
            self._prefetch(index, leading(self._memory, self._frames, nodes), announced=True)
            return
        if hint >= 0:
            self._policy.now(self.now)
            self._admission.hint(_keys(nodes), hint)
            self._hints.update(dict.fromkeys(nodes, hint))
            there = [node for node in nodes if self._memory[node] or node in self._frames]
            tell_hints(self._policy, self._hints, there)
            return
        for above, node in zip([NOWHERE, *nodes], nodes, strict=False):
            self._parents[node] = above
        if self._requests.saved[index]:
            self._save(nodes)
            return
        one = WaitingRequest(index, self.now, nodes, self._requests.inputs[index])
        one.own = one.ready = self._engine.prefix(nodes)
        while one.ready < len(nodes) and self._memory[nodes[one.ready]]:
            one.ready += 1
        cold = leading(self._memory, self._frames, nodes[one.ready :])
        self.totals.looked_up_blocks += len(nodes)
        self._policy.now(self.now)
        there = [node for node in nodes if self._memory[node] or node in self._engine.away]
        self._policy.wanted(_ids(there), _names(there))
        found = nodes[: one.ready + len(cold)]
        self._wanted.update(node for node in found if node in self._frames)
        self._admission.found(_keys(found), len(found))
        if self._prefetched:
            used = self._prefetched.intersection(nodes[: one.ready])
            self._prefetched -= used
            self._prefetches_used += len(used)
            self._recomputed.used(self._prefetches_used)
        self._hold(nodes[one.own : one.ready])
        if cold and self._load(one, cold):
            self._loading[index] = one
            return
        self._compute(one)

    def _load(self, one: WaitingRequest, cold: list[int]) -> bool:
        """Ask the planner. Returns True if the request waits for the disk."""
        self._hold(present := in_memory(self._memory, cold))
        cold = self._within(cold)
        self._free_nodes(present)
        if not cold:
            return False
        away = [node for node in cold if not self._memory[node]]
        fresh = [node for node in away if node not in self._reading]
        joined = [node for node in away if node in self._reading]
        before = one.ready * self._requests.block_tokens
        tokens = max(0, min(len(cold) * self._requests.block_tokens, one.tokens - before))
        recompute_s = self._machine.prefill.seconds(tokens, before)
        verdict = self._planner.weigh(
            one.index, {self._link: len(fresh) * self._frame_bytes}, joined,
            within_s=self._machine.patience_s, recompute_s=recompute_s,
        )  # fmt: skip
        self.totals.verdicts[verdict.why] += 1
        if not verdict.load:
            if verdict.why in TOO_SLOW:
                self._short_until = self.now + DECLINED_S
            if verdict.why == "slower":
                self._prefetch(one.index, cold)
            return False
        self._planner.add(
            one.index, [(node, self._link, self._frame_bytes) for node in fresh], joined
        )
        one.loaded = len(cold)
        one.missing = set(away)
        self._hold(in_memory(self._memory, cold))
        self._make_room(len(fresh))
        self._reading.update(fresh)
        for node in away:
            self._waiters.setdefault(node, []).append(one)
        self.totals.moved["nvme_read"] += len(fresh) * self._frame_bytes
        return True

    def _prefetch(self, index: int, cold: list[int], announced: bool = False) -> None:
        """Read blocks that were requested before and not loaded, or that a client announced."""
        if not announced:
            limit = prefetch_limit(self._frame_bytes, len(self._reading))
            again = self._recomputed.note(_keys(cold))
            cold = cold[: min(limit, self._recomputed.allowed(again))]
        self._hold(present := in_memory(self._memory, cold))
        cold = self._within(cold)
        away = [node for node in cold if not (self._memory[node] or node in self._reading)]
        prefetch = -1 - index
        if away:
            self._planner.weigh(prefetch, {self._link: len(away) * self._frame_bytes}, urgent=False)
        if self._planner.is_waiting(prefetch):
            self._planner.add(prefetch, [(node, self._link, self._frame_bytes) for node in away])
            if not announced:
                self._recomputed.began(len(away))
                self._prefetched.update(away)
            self._make_room(len(away))
            self._reading.update(away)
            self.totals.moved["nvme_read"] += len(away) * self._frame_bytes
        self._free_nodes(present)

    def _within(self, nodes: list[int]) -> list[int]:
        """Return the leading blocks of these that memory has room for, if it evicts none that is held."""
        room = self.memory_blocks - self._in_memory - len(self._reading) + len(self._policy)
        missing = 0
        for at, node in enumerate(nodes):
            missing += not (self._memory[node] or node in self._reading)
            if missing > room:
                return nodes[:at]
        return nodes

    def _take_completed(self) -> None:
        """Add blocks that were read to memory, and hold them for the requests that wait for them."""
        for node, good in self._disk.take_come():
            self._planner.ended(node, good)
            self._reading.discard(node)
            waiters = self._waiters.pop(node, [])
            if not self._memory[node]:
                self._make_room(1)
                self._add([node], returns=node in self._engine.returning)
            for one in waiters:
                self._hold([node])
                one.missing.discard(node)
                if not one.missing and one.index in self._loading:
                    del self._loading[one.index]
                    self._compute(one)
            self._write_ahead()
        for node in self._disk.take_written():
            self._writing.discard(node)
            self.totals.moved["nvme_written"] += self._frame_bytes
            self._append(node)

    def _compute_late_loads(self) -> None:
        """Compute the loads that the planner cancelled."""
        if self._planner.late == self._late:
            return
        self._late = self._planner.late
        for index, one in list(self._loading.items()):
            if self._planner.weigh(index, {}).load:
                continue
            del self._loading[index]
            self.totals.verdicts["late"] += 1
            for node in one.missing:
                waiters = [other for other in self._waiters.pop(node, []) if other is not one]
                if waiters:
                    self._waiters[node] = waiters
            came = one.ready
            while came < one.ready + one.loaded and one.nodes[came] not in one.missing:
                came += 1
            self._free_nodes(
                node for node in one.nodes[came : one.ready + one.loaded] if node not in one.missing
            )
            one.loaded, one.missing = came - one.ready, set()
            self._compute(one)

    def _compute(self, one: WaitingRequest) -> None:
        """Copy what is in memory, and compute the rest."""
        hits = one.ready + one.loaded
        known = min(hits * self._requests.block_tokens, one.tokens)
        copied = (hits - one.own) * self._block_bytes
        self.totals.hit_blocks["hbm"] += one.own
        self.totals.hit_blocks["memory"] += one.ready - one.own
        self.totals.hit_blocks["nvme"] += one.loaded
        self.totals.moved["memory_read"] += copied
        compute_s = self._machine.prefill.seconds(one.tokens - known, known)
        self.totals.recompute_s += compute_s
        self.totals.recompute_s_saved += self._machine.prefill.seconds(known)
        take_s = compute_s + copied / self._machine.memory_bytes_s
        end = queued(self._free, self.now, take_s)
        self.totals.waits_s.append(end - one.came)
        heapq.heappush(self._ends, (end, one.index, one))

    # --- memory ----------------------------------------------------------------------------------

    def _hold(self, nodes: Iterable[int]) -> None:
        fresh = []
        for node in nodes:
            self._held[node] += 1
            if self._held[node] == 1:
                fresh.append(node)
        if fresh:
            self._policy.held(_ids(fresh))

    def _free_nodes(self, nodes: Iterable[int]) -> None:
        freed = []
        for node in nodes:
            self._held[node] -= 1
            if not self._held[node]:
                del self._held[node]
                freed.append(node)
        if freed:
            self._policy.freed(_ids(freed))

    def _end(self, nodes: list[int]) -> None:
        """A request has ended: save its blocks, and the engine keeps them."""
        lazy = self.hbm_blocks and self._machine.residency == "lazy"
        if not lazy:
            self._save(nodes)
        if not self.hbm_blocks:
            return
        entered, left = self._engine.use(nodes)
        if lazy:
            self._save(left[::-1])  # the heads of chains first
        if self._knows_engine:
            for node in entered:
                if self._memory[node] and node in self._frames:
                    self._engine.leave_first[node] = None
            for node in left:
                self._engine.leave_first.pop(node, None)
            self._bring_back([node for node in left if node in self._engine.away])
        self._write_ahead()

    def _bring_back(self, nodes: list[int]) -> None:
        """The engine has dropped these blocks, which had left memory because it held them: read them."""
        nodes = [node for node in nodes if node not in self._reading]
        kept = self._within(nodes)
        self._policy.left(_ids(self._engine.drop_away(nodes[len(kept) :])))
        if not (nodes := kept):
            return
        request = -(len(self._requests) + 1 + nodes[0])
        self._planner.weigh(request, {self._link: len(nodes) * self._frame_bytes}, urgent=False)
        if not self._planner.is_waiting(request):
            self._policy.left(_ids(self._engine.drop_away(nodes)))
            return
        self._planner.add(request, [(node, self._link, self._frame_bytes) for node in nodes])
        self._engine.returning.update(nodes)
        self._make_room(len(nodes))
        self._reading.update(nodes)
        self.totals.moved["nvme_read_back"] += len(nodes) * self._frame_bytes

    def _save(self, nodes: list[int]) -> None:
        """Save computed blocks while there is room without others of their chain. Blocks with a frame on disk
        keep it."""
        fresh = [
            node
            for node in nodes
            if not (self._memory[node] or node in self._frames or node in self._reading)
        ]
        self._hold(present := in_memory(self._memory, nodes))
        fresh = fresh[: self._make_room(len(fresh))]
        self._free_nodes(present)
        self.totals.moved["saved"] += len(fresh) * self._block_bytes
        self._admission.note(_keys(fresh))
        self._add(fresh)
        self._policy.refreshed(_ids(node for node in nodes if self._memory[node]))
        self._write_ahead()

    def _add(self, nodes: list[int], returns: bool = False) -> None:
        """Add blocks to memory. Those that return because the engine dropped them take their places again."""
        if not nodes:
            return
        self._policy.now(self.now)
        away = self._engine.drop_away(nodes)
        if returns:
            self._policy.freed(_ids(nodes))
        else:
            self._policy.left(_ids(away))
            above = _ids(self._parents[node] for node in nodes)
            self._policy.added(_ids(nodes), _names(nodes), above)
            tell_hints(self._policy, self._hints, nodes)
        for node in nodes:
            self._memory[node] = 1
            if self._knows_engine and node in self._engine and node in self._frames:
                self._engine.leave_first[node] = None
        self._in_memory += len(nodes)
        if self.nvme_blocks:
            self._unwritten.extend(node for node in nodes if node not in self._frames)

    def _make_room(self, wanted: int) -> int:
        """Evict until memory has room for this many blocks, if that is possible; return for how many it has.
        First go those that the engine holds and the disk has, then those that the policy selects, and of its
        next victims those that are on disk. Blocks that are being read have their room."""
        room = self.memory_blocks - self._in_memory - len(self._reading)
        if (n := wanted - room) <= 0:
            return room
        if first := self._engine.victims(n, self._held):
            for node in first:
                self._memory[node] = 0
            self._in_memory -= len(first)
            self._policy.held(_ids(first))
            self.totals.moved["left_first"] += len(first) * self._block_bytes
        is_writable = self._budget.left() >= self._frame_bytes
        spares = self.nvme_blocks and is_writable and not self._admission.strict

        def is_kept(node: int) -> bool:
            return node in self._frames or node in self._writing

        victims = array("I", self._policy.victims(n - len(first)))
        if spares and self.now >= self._short_until and not all(map(is_kept, victims)):
            ahead = array("I", self._policy.victims(len(victims) * LOOK_AHEAD))
            victims = array("I", sorted(ahead, key=is_kept, reverse=True)[: len(victims)])
        for node in victims:
            self._memory[node] = 0
        self._in_memory -= len(victims)
        self._prefetched.difference_update(victims)
        kept = [node for node in victims if is_kept(node)]
        lost = [node for node in victims if not is_kept(node)]
        if self.nvme_blocks:
            why = "slow_disk"
            if not is_writable:
                why = "budget"
            elif self._admission.strict:
                why = "once"  # requested once; writes are for blocks that were requested more often
            self.totals.lost[why] += len(lost)
        self._policy.left(_ids(kept))
        self._policy.gone(_ids(lost))
        return max(0, self.memory_blocks - self._in_memory - len(self._reading))

    # --- the disk --------------------------------------------------------------------------------

    def _write_ahead(self) -> None:
        """As the daemon: write blocks as they are saved if the budget has plenty left, then the next
        victims, whose segments may have been reused."""
        if not self.nvme_blocks:
            return
        left = self._budget.left()
        self._admission.strict = self._machine.admission == "second-touch" or (
            self._machine.admission == "auto"
            and self._budget.is_limited
            and left < self._budget.scarce
        )
        room = min(WRITTEN_AHEAD - len(self._writing), int(min(left, 1 << 62) // self._frame_bytes))
        if room <= 0:
            return
        first: dict[int, None] = {}  # a block that left memory and came back is in the queue twice
        is_scarce = self._admission.strict or self.now < self._short_until
        if left > self._budget.plenty and not is_scarce:
            while self._unwritten and len(first) < room:
                if self._memory[node := self._unwritten.popleft()] and node not in self._frames:
                    first[node] = None
        if len(first) < room and self._in_memory >= NEARLY_FULL * self.memory_blocks:
            look = LOOK_BLOCKS if self._admission.strict else WRITTEN_AHEAD
            first |= dict.fromkeys(array("I", self._policy.victims(look)))
        dirty = [node for node in first if node not in self._frames and node not in self._writing]
        admitted = self._admission.filter(_ids(dirty), lambda ids: _keys(array("I", ids)))
        for node in array("I", admitted)[:room]:
            self._writing.add(node)
            self._budget.spend(self._frame_bytes)
            self._disk.write(node, self._frame_bytes)

    def _append(self, node: int) -> None:
        room = max(1, self.nvme_blocks // SEGMENTS)
        if len(self._segments[-1]) >= room:
            self._segments.append([])
            self._segment_number += 1
            if len(self._segments) > max(1, self.nvme_blocks // room):
                self._reclaim()
        self._segments[-1].append(node)
        self._frames[node] = self._segment_number
        self._wanted.discard(node)
        if self._knows_engine and self._memory[node] and node in self._engine:
            self._engine.leave_first[node] = None

    def _reclaim(self) -> None:
        """Reclaim the oldest segment: rewrite the requested blocks, drop the others."""
        number = self._segment_number - len(self._segments) + 1
        old = [node for node in self._segments.popleft() if self._frames.get(node) == number]
        wanted = self._wanted | self._engine.away
        alone = [node for node in old if not self._memory[node]]
        used = bytes(node in wanted for node in alone)
        used = self._admission.worth_copying(_ids(alone), used, lambda ids: _keys(array("I", ids)))
        again = list(compress(alone, used))
        for node in old:
            del self._frames[node]
            self._engine.leave_first.pop(node, None)
        left = self._budget.second_chance_bytes / self._frame_bytes
        again = again[: min(max(0, ceil(left)), max(1, self.nvme_blocks // SEGMENTS) - 1)]
        kept = set(again)
        gone = [node for node in old if node not in kept and not self._memory[node]]
        self._policy.gone(_ids(gone))
        self._engine.drop_away(gone)
        self._wanted.difference_update(old)
        for node in again:
            self.totals.moved["nvme_written_again"] += self._frame_bytes
            self._budget.spend_again(self._frame_bytes)
            self._segments[-1].append(node)
            self._frames[node] = self._segment_number


def in_memory(memory: bytearray, nodes: list[int]) -> list[int]:
    return [node for node in nodes if memory[node]]


def leading(memory: bytearray, frames: dict[int, int], nodes: list[int]) -> list[int]:
    """Return the leading blocks of these that are in memory or on disk."""
    there = (memory[node] or node in frames for node in nodes)
    return [node for node, _ in zip(nodes, takewhile(bool, there), strict=False)]


def tell_hints(policy: Policy, hints: dict[int, float], nodes: list[int]) -> None:
    """Report the hints about these blocks, and remove them."""
    found = {node: hints.pop(node) for node in nodes if node in hints}
    for importance in set(found.values()):
        some = [node for node, one in found.items() if one == importance]
        policy.hinted(_ids(some), importance, _names(some))
        if not importance:
            policy.demoted(_ids(some[::-1]))


def _ids(nodes: Iterable[int]) -> bytes:
    return array("I", nodes).tobytes()


def _names(nodes: Iterable[int]) -> bytes:
    return b"".join(_name(node).to_bytes(8, "little") for node in nodes)


def _keys(nodes: Iterable[int]) -> bytes:
    return b"".join(_name(node).to_bytes(8, "little") * (KEY_BYTES // 8) for node in nodes)


def _name(node: int) -> int:
    """Return a name that looks like a hash, because the policies sample by it."""
    return (node + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF


def queued(free: list[float], now: float, take_s: float) -> float:
    """Return when a request of this duration ends on the first free engine."""
    if not free:
        return now + take_s
    end = max(now, heapq.heappop(free)) + take_s
    heapq.heappush(free, end)
    return end
