"""Lookups: what the daemon has of a request's prompt, and whether the request loads, waits or computes.

A lookup is sent when a request is queued, and its answer is a lease. The engine's thread waits for an answer
for about a millisecond per step (`WakeupListener`), and never longer. Imports no vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kvtier import KvtierError
from kvtier.client import Answer, Lease
from kvtier_vllm.daemon import Daemon, DaemonSession, WakeupListener
from kvtier_vllm.forecast import Forecast
from kvtier_vllm.identity import BlockKeys
from kvtier_vllm.layout import Layout
from kvtier_vllm.loads import Loads, Ranks
from kvtier_vllm.options import Options
from kvtier_vllm.prompt import LookupQuery, Prompt, Wait
from kvtier_vllm.stats import WAITED, Miss, PluginStats
from kvtier_vllm.timeline import Timelines

log = logging.getLogger("vllm.kvtier")

LAST_WAIT_S = 0.01  # for an answer that would be too late for the request at the next step
POLL_S = 1.0  # how often to check a daemon that owes no answer
AHEAD = 4  # requests whose blocks are read from disk before the scheduler asks for them
REPEAT_S = 0.002  # between two lookups of a request
REPEATING = 8  # requests that may repeat lookups as often as one
ANSWER_WITHIN_S = 0.05  # how long the daemon may delay the answer that blocks have arrived
UNKNOWN_WAITS, UNKNOWN_WAIT_S = 2, 0.05
LAST_LOOKUP_S = 0.02  # before the end of a request's patience: the latest time for a lookup


class PromptLookups:
    """Sends the lookups of one engine and receives the answers. A ticket identifies the pending lookup of a
    prompt; the lease of an answer to another ticket is released."""

    def __init__(
        self, layout: Layout, options: Options, daemon: Daemon, keys: BlockKeys, forecast: Forecast,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._layout = layout
        self._options = options
        self._daemon = daemon
        self._keys = keys
        self._forecast = forecast
        self._clock = clock
        self._wakeup = WakeupListener(clock)
        self._polled = float("-inf")
        self._tickets: dict[int, tuple[Prompt, float]] = {}  # with the time of sending
        self._tickets_of: DaemonSession | None = None
        self._for_step: dict[str, Prompt] = {}
        self._prefill = (0.0, 0.0)  # that the daemon knows
        self._prefill_of: DaemonSession | None = None

    def __len__(self) -> int:
        """The number of pending lookups."""
        return len(self._tickets)

    # --- sending -----------------------------------------------------------------------------

    def send(
        self, prompt: Prompt, session: DaemonSession, query: LookupQuery | None = None
    ) -> bool:
        """Send a lookup, by default with the last query; return whether it was sent. A long prompt is
        looked up with a later step, once all of it has keys."""
        state = prompt.lookup
        state.query = query or state.query
        keys = self._keys.of(prompt, session)
        state.ticket = 0  # the lease remains until the answer
        shards = range(self._layout.shards.count)
        block = self._layout.block_tokens
        count = min(prompt.loadable(block), session.space.most_keys(len(shards)))
        whole = len(prompt.request.block_hashes) * self._layout.hash_tokens
        if len(keys) < min(count, whole // block):
            self.send_with_step(prompt)
            return False
        if self._tickets_of is not session:
            self._tickets, self._tickets_of = {}, session
        try:
            self._send_prefill(session)
            ticket = session.space.begin_lease(
                keys[:count], self._options.lease_ms, shards,
                request=prompt.number, within_ms=self._options.patience_ms,
                wait_ms=int(state.answer_within_s * 1000), first=min(state.query.first, count),
                bring=state.query.read_disk,
                awaits=prompt.options.awaits or not self._options.save,
            )  # fmt: skip
        except KvtierError as error:
            self._daemon.lost(session, error)
            return False
        state.ticket, state.sent_at, state.answer_within_s = ticket, self._clock(), 0.0
        self._tickets[ticket] = prompt, state.sent_at
        return True

    def _send_prefill(self, session: DaemonSession) -> None:
        """Tell the daemon the time to compute a token, each time it has changed by a tenth."""
        fit = self._forecast.prefill
        known = self._prefill if self._prefill_of is session else (0.0, 0.0)
        if any(abs(now - was) > 0.1 * was for now, was in zip(fit, known, strict=True)):
            session.space.prefill(*fit)
            self._prefill, self._prefill_of = fit, session

    def send_with_step(self, prompt: Prompt, query: LookupQuery | None = None) -> None:
        """Send a lookup with the next step, unless one is pending."""
        state = prompt.lookup
        if not state.ticket:
            state.query = query or state.query
            self._for_step[prompt.request.request_id] = prompt

    def take_for_step(self) -> Iterable[Prompt]:
        """The prompts to look up with this step."""
        self._wakeup.next_step()
        if not self._for_step:
            return ()
        prompts, self._for_step = self._for_step, {}
        return prompts.values()

    def cancel(self, prompt: Prompt, pending: bool) -> None:
        """Send no more lookups for this prompt, and cancel the pending one at the daemon."""
        self._for_step.pop(prompt.request.request_id, None)
        session = self._daemon.session
        if pending and session is not None and prompt.session is session:
            try:
                session.space.cancel(prompt.number)
            except KvtierError as error:
                self._daemon.lost(session, error)

    def keep_only(self, session: DaemonSession | None) -> None:
        """Drop the references to other sessions: their arenas would stay mapped."""
        if self._tickets_of is not session:
            self._tickets, self._tickets_of = {}, None
        if self._prefill_of is not session:
            self._prefill_of = None

    # --- answers -----------------------------------------------------------------------------

    def wait(self, prompt: Prompt, session: DaemonSession, last: bool = False) -> bool:
        """Wait for a moment, or `LAST_WAIT_S`, for an answer; whether there is one to receive."""
        current = session is self._daemon.session
        most_s = LAST_WAIT_S if last else 0.0
        pending = bool(prompt.lookup.ticket)
        return pending and current and self._wakeup.wait(session.client.fileno(), most_s)

    def answers(self) -> Iterator[tuple[Prompt | None, Answer]]:
        """The answers that have arrived, with their prompts. Polls rarely if no answer is pending."""
        session = self._daemon.session
        if session is None:
            return
        now = self._clock()
        if not session.client.awaits and now - self._polled < POLL_S:
            return
        self._polled = now
        try:
            answers = session.client.poll()
        except KvtierError as error:
            self._daemon.lost(session, error)
            return
        if answers:
            self._wakeup.answered()
        for ticket, answer in answers.items():
            yield self._take_prompt(session, ticket), answer
        if self._tickets_of is session and self._tickets:
            _, sent_at = next(iter(self._tickets.values()))
            if now - sent_at > self._options.patience_ms / 1000:
                self._daemon.lost(session, "the daemon does not answer")

    def _take_prompt(self, session: DaemonSession, ticket: int) -> Prompt | None:
        # Another session uses the same numbers for other lookups.
        if self._tickets_of is not session or ticket not in self._tickets:
            return None
        prompt, _ = self._tickets.pop(ticket)
        if prompt.lookup.ticket != ticket:
            return None
        prompt.lookup.ticket = 0
        return prompt


class EngineLimits:
    """The limits of an engine and of its own prefix cache, as far as its version reports them. `block_sizes`:
    the tokens of a block per group; `most_requests`: that run at once."""

    def __init__(
        self,
        manager: Any = None,
        block_sizes: Sequence[int] = (),
        most_requests: float = float("inf"),
        step_tokens: float = float("inf"),
    ) -> None:
        self.most_requests = most_requests
        self.step_tokens = step_tokens
        self._block_sizes = block_sizes
        self._manager = manager
        self._find = getattr(getattr(manager, "coordinator", None), "find_longest_cache_hit", None)
        pool = getattr(manager, "block_pool", None)
        self._free_blocks = getattr(pool, "get_num_free_blocks", None)

    def own_tokens(self, request: Any) -> int | None:
        """How many leading tokens the engine's own prefix cache has; None if the engine does not tell."""
        if self._find is None:
            return None
        enabled = getattr(self._manager, "prefix_cache_lookup_enabled", None)
        if enabled is not None and not enabled(request):
            return 0
        _, tokens, *_ = self._find(request.block_hashes, request.num_tokens - 1)
        return int(tokens)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks a request of this many tokens needs."""
        return sum(-(-tokens // size) for size in self._block_sizes)

    def free_blocks(self) -> float:
        """How many blocks are free or can be freed; infinite if the engine does not tell."""
        return float("inf") if self._free_blocks is None else self._free_blocks()


@dataclass(frozen=True, slots=True)
class QueuedLoad:
    """The engine's work: requests, the blocks that the waiting ones need, the tokens to compute."""

    waiting: int
    running: int
    blocks: int
    tokens: int


class WaitingQueue:
    """The requests without pages, in order of arrival. Predicts when the scheduler asks for one again."""

    def __init__(self, layout: Layout, forecast: Forecast) -> None:
        self.limits = EngineLimits()
        self._layout = layout
        self._forecast = forecast
        self._waiting: dict[str, Prompt] = {}
        self._work: QueuedLoad | None = None  # in this step

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, prompt: Prompt) -> None:
        self._waiting[prompt.request.request_id] = prompt
        self._work = None

    def remove(self, prompt: Prompt) -> None:
        self._waiting.pop(prompt.request.request_id, None)

    def ahead(self) -> Iterator[Prompt]:
        """The first requests of the queue."""
        return islice(self._waiting.values(), AHEAD)

    def own_blocks(self, prompt: Prompt) -> int | None:
        """How many leading blocks the engine's own cache has; None if the engine does not tell."""
        tokens = self.limits.own_tokens(prompt.request)
        return None if tokens is None else tokens // self._layout.block_tokens

    def next_step(self) -> None:
        self._work = None

    def next_call_s(self, prompt: Prompt, prompts: Iterable[Prompt]) -> float:
        """The expected time until the scheduler asks for this request again, if it is held back now; infinite
        if other requests may take its place."""
        work = self._work or self._count_work(prompts)
        own = prompt.request.request_id in self._waiting
        others = work.waiting - own
        if not others and not work.running:
            return 0.0
        blocks = work.blocks - own * self.limits.blocks_for(prompt.request.num_tokens)
        free_places = self.limits.most_requests - work.running
        if others and (others >= free_places or blocks > self.limits.free_blocks()):
            return float("inf")
        tokens = work.tokens - own * self._to_compute(prompt)
        steps = 1 + max(0, tokens) // self.limits.step_tokens
        return steps * self._forecast.longest_step_s()

    def _count_work(self, prompts: Iterable[Prompt]) -> QueuedLoad:
        waiting = self._waiting
        running = [one for one in prompts if one.request.request_id not in waiting]
        self._work = QueuedLoad(
            len(waiting), len(running),
            sum(self.limits.blocks_for(one.request.num_tokens) for one in waiting.values()),
            sum(self._to_compute(one) for one in waiting.values())
            + sum(
                max(0, one.request.num_tokens - one.request.num_computed_tokens)
                for one in running
            ),
        )  # fmt: skip
        return self._work

    def _to_compute(self, prompt: Prompt) -> int:
        """The tokens of a waiting request that neither the daemon nor the engine is known to have."""
        stored = (prompt.lookup.stored or 0) * self._layout.block_tokens
        tokens: int = prompt.request.num_tokens
        return max(0, tokens - max(stored, prompt.lookup.computed))


class Patience:
    """Decides how long a request waits for an answer, and for blocks from disk while they are expected
    earlier than recomputing would end. Has no clock: the caller passes the time."""

    def __init__(self, layout: Layout, options: Options, forecast: Forecast) -> None:
        self._layout = layout
        self._forecast = forecast
        self._most_s = options.patience_ms / 1000

    def ended(self, since: float, now: float) -> bool:
        return now - since > self._most_s

    def worth_waiting(self, prompt: Prompt, lease: Lease, computed: int, now: float) -> bool:
        """Whether the blocks from disk are expected to be loaded before they would be recomputed. While the
        time to recompute is unknown, a request waits for twice the first forecast."""
        block = self._layout.block_tokens
        start = max(lease.ready * block, computed)
        tokens = (lease.ready + lease.coming) * block - start
        if tokens <= 0:
            return False
        nbytes = self._layout.load_bytes(tokens // block)
        load_s = lease.eta_ms / 1000 + self._forecast.load_s(nbytes)
        recompute_s = self._forecast.recompute_s(tokens, start)
        if recompute_s is not None:
            return load_s < recompute_s
        state = prompt.lookup
        if state.wait_until is None:
            state.wait_until = now + UNKNOWN_WAITS * load_s + UNKNOWN_WAIT_S
        return now < state.wait_until

    def direct_is_faster(self, lease: Lease, own: int) -> bool:
        """Whether the ranks are expected to read the blocks on disk themselves before they were computed."""
        first, stop = max(own, lease.ready), lease.ready + lease.coming
        block = self._layout.block_tokens
        recompute_s = self._forecast.recompute_s((stop - first) * block, first * block)
        direct_s = self._forecast.direct_s(self._layout.load_bytes(stop - first))
        return recompute_s is None or direct_s < recompute_s

    def repeat_within_s(self, prompt: Prompt, requests: int, now: float) -> float | None:
        """How long the daemon may delay its answer if the lookup is repeated now; None if it is too early or
        too late to repeat. More requests repeat less often, because each lookup costs the daemon time."""
        state = prompt.lookup
        assert state.wait.since is not None
        left_s = state.wait.since + self._most_s - now
        after_s = REPEAT_S * (1 + requests / REPEATING)
        if now - state.sent_at < after_s or left_s <= LAST_LOOKUP_S:
            return None
        return min(ANSWER_WITHIN_S, left_s - LAST_LOOKUP_S)


class LoadDecisions:
    """Decides for each request whether it loads, waits or computes. Writes the lookup state of prompts.

    `prompts`: all requests of the engine; `receive`: processes the answers that have arrived.
    """

    def __init__(
        self, layout: Layout, options: Options, clock: Callable[[], float], daemon: Daemon,
        lookups: PromptLookups, forecast: Forecast, loads: Loads, stats: PluginStats,
        timelines: Timelines, prompts: Mapping[str, Prompt], receive: Callable[[], None],
    ) -> None:  # fmt: skip
        self.queue = WaitingQueue(layout, forecast)
        self.patience = Patience(layout, options, forecast)
        self.ranks = Ranks(layout.shards.ranks)
        self._layout = layout
        self._options = options
        self._clock = clock
        self._daemon = daemon
        self._lookups = lookups
        self._loads = loads
        self._stats = stats
        self._timelines = timelines
        self._prompts = prompts
        self._receive = receive

    def queued(self, prompt: Prompt) -> None:
        """Look up a new request. For the first requests of the queue the daemon also reads from disk, if the
        engine tells which blocks it has; for the others it does once they are among the first."""
        session = self._daemon.session
        self._timelines.queued(prompt.request.request_id)
        first = len(self.queue) < AHEAD and not self.ranks.read_directly
        self.queue.add(prompt)
        if prompt.may_load and session is not None and prompt.loadable(self._layout.block_tokens):
            own = self.queue.own_blocks(prompt)
            self._send(prompt, session, LookupQuery(own or 0, first and own is not None))
            while self._lookups.wait(prompt, session):
                self._receive()

    def decide(self, prompt: Prompt, computed: int) -> tuple[int | None, bool]:
        """How many tokens after `computed` to load, and whether between steps. None: ask again."""
        state, block = prompt.lookup, self._layout.block_tokens
        state.computed = computed
        if not prompt.may_load or state.wait.gave_up:
            return 0, False
        if computed >= prompt.loadable(block) * block:
            return 0, False
        now = self._clock()
        since = state.wait.begin(now)
        decision = self._load_or_wait(prompt, computed, now)
        if decision is None and not self._may_hold(prompt, since, now):
            decision = self._load_or_compute(prompt, computed, now)
        if decision is None:
            from_disk = state.lease is not None and state.lease.coming
            state.wait.hold("disk" if from_disk else "answer", now)
            return None, False
        self._count_wait(state.wait, now)
        return decision

    def _load_or_wait(self, prompt: Prompt, computed: int, now: float) -> tuple[int, bool] | None:
        """The decision if the request may be held back (None)."""
        session = self._daemon.session
        if session is None:
            decision = self._load_ready(prompt, computed, now)
            if decision is not None or not self._daemon.tried:
                return decision
            return self.give_up(prompt, "no_daemon")
        prompt.use_session(session)
        state, own = prompt.lookup, computed // self._layout.block_tokens
        lease = state.lease
        if lease is None or not self._usable(prompt, own, now):
            self._lookups.send_with_step(prompt, LookupQuery(own, read_disk=True))
            return None
        if lease.coming and not state.answered.read_disk and lease.ready + lease.coming > own:
            direct = self.ranks.read_directly and self.patience.direct_is_faster(lease, own)
            if direct and self.ranks.can_read(session, lease):
                self.ranks.ready()
                return self._load(prompt, lease, computed, direct=True)
            self._lookups.send_with_step(prompt, LookupQuery(own, read_disk=True))
            return None
        if lease.coming and self.patience.worth_waiting(prompt, lease, computed, now):
            within_s = self.patience.repeat_within_s(prompt, len(self._prompts), now)
            if within_s is not None:
                state.answer_within_s = within_s
                self._lookups.send_with_step(prompt)
            return None
        if lease.ready * self._layout.block_tokens <= computed:
            return 0, False
        if self.ranks.can_read(session, lease):
            self.ranks.ready()
            return self._load(prompt, lease, computed)
        if self.ranks.unready_s(now) <= self._options.patience_ms / 1000:
            return None
        if not self._stats.counts["miss:rank_away"]:
            log.warning(
                "kvtier: a rank is not connected to the daemon (see its log): loading nothing"
            )
        return self.give_up(prompt, "rank_away")

    def _load_or_compute(self, prompt: Prompt, computed: int, now: float) -> tuple[int, bool]:
        """Load the ready blocks and compute the rest: the request cannot be held back."""
        state, session = prompt.lookup, self._daemon.session
        own = computed // self._layout.block_tokens
        usable = self._usable(prompt, own, now)
        if session is not None and not (usable and state.lease and not state.lease.coming):
            # More blocks may have become ready since the last answer.
            self._send(prompt, session, LookupQuery(own, usable and state.answered.read_disk))
            while state.ticket and self._lookups.wait(prompt, session, last=True):
                self._receive()
        if not self._usable(prompt, own, now):
            return self.give_up(prompt, "patience")
        return self._load_ready(prompt, computed, now) or (0, False)

    def _load_ready(self, prompt: Prompt, computed: int, now: float) -> tuple[int, bool] | None:
        """Load the blocks that are ready, if any. The memory of a daemon that ended is still mapped."""
        session, lease, block = prompt.session, prompt.lookup.lease, self._layout.block_tokens
        # The lease lacks blocks that the engine had when it asked, and has lost since.
        if session is None or lease is None or prompt.lookup.lease_first > computed // block:
            return None
        more = lease.ready * block > computed
        good = more and self._lasts(prompt, now) and self.ranks.can_read(session, lease)
        return self._load(prompt, lease, computed) if good else None

    def _load(
        self, prompt: Prompt, lease: Lease, computed: int, direct: bool = False
    ) -> tuple[int, bool]:
        block = self._layout.block_tokens
        tokens = (lease.ready + (lease.coming if direct else 0)) * block - computed
        return tokens, self._loads.choose_time(prompt, tokens // block, direct)

    def give_up(self, prompt: Prompt, why: Miss) -> tuple[int, bool]:
        """Compute the request."""
        self._stats.counts[f"miss:{why}"] += 1
        prompt.lookup.wait.gave_up = True
        return 0, False

    def _usable(self, prompt: Prompt, own: int, now: float) -> bool:
        """Whether the lease can be loaded from if the engine has `own` blocks itself."""
        return (
            prompt.lookup.lease is not None
            and prompt.session is self._daemon.session
            and prompt.lookup.lease_first <= own
            and self._lasts(prompt, now)
        )

    def _lasts(self, prompt: Prompt, now: float) -> bool:
        """Whether the lease lasts long enough for a load."""
        return now - prompt.lookup.leased_at <= self._options.lease_ms / 2000

    def _may_hold(self, prompt: Prompt, since: float, now: float) -> bool:
        """Whether the scheduler is expected to ask again before the request's patience ends."""
        if prompt.lookup.wait.counted:
            return False
        next_call_s = self.queue.next_call_s(prompt, self._prompts.values())
        return not self.patience.ended(since, now + next_call_s)

    def _count_wait(self, wait: Wait, now: float) -> None:
        waited_s = wait.end(now)
        if waited_s is None:
            return
        self._stats.took("wait_s", waited_s)
        for part, seconds in wait.parts.items():
            self._stats.took(WAITED[part], seconds)

    def _send(
        self, prompt: Prompt, session: DaemonSession, query: LookupQuery | None = None
    ) -> None:
        if self._lookups.send(prompt, session, query):
            self._timelines.mark(prompt.request.request_id, "asked")

    def answered(self, prompt: Prompt, lease: Lease) -> None:
        """The answer to the prompt's lookup has arrived: the lease replaces the last one."""
        state = prompt.lookup
        state.release()
        if lease.refused:
            self.give_up(prompt, "refused")
        state.lease, state.leased_at, state.answered = lease, self._clock(), state.query
        state.lease_first = self._first_block(lease, state.query)
        state.stored = lease.ready + lease.coming
        state.wait.arrived("answer", state.leased_at)
        if lease.coming:
            start, stop = state.on_disk
            first = min(start, lease.ready) if stop else lease.ready
            state.on_disk = first, max(stop, state.stored)
        else:
            state.wait.arrived("disk", state.leased_at)
        self._timelines.mark(prompt.request.request_id, "answered")
        self._timelines.mark(prompt.request.request_id, "coming" if lease.coming else "ready")

    def _first_block(self, lease: Lease, query: LookupQuery) -> int:
        """The block from which on the lease contains all ready blocks."""
        groups = self._layout.groups
        full = [part.first for part in lease.parts if groups[part.group].kind == "full"]
        return max(full) if full else query.first

    def next_step(self) -> None:
        """Read the blocks of the first requests of the queue from disk, repeat their lookups, and send the
        lookups that `decide` asked for: it sends none itself."""
        self.queue.next_step()
        for prompt in self.queue.ahead():
            state = prompt.lookup
            lease, wait = state.lease, state.wait
            if lease is None or state.ticket or wait.gave_up or wait.since is not None:
                continue
            unread = lease.coming and not state.answered.read_disk and not self.ranks.read_directly
            # The engine looks up its own blocks one by one for this.
            own = self.queue.own_blocks(prompt) if unread or state.lease_first else None
            if own is not None and (unread or own < state.lease_first):  # lost some since then
                self._lookups.send_with_step(prompt, LookupQuery(own, read_disk=True))
            elif lease.coming and state.answered.read_disk:
                state.answer_within_s = ANSWER_WITHIN_S
                self._lookups.send_with_step(prompt)
        session = self._daemon.session
        for prompt in self._lookups.take_for_step():
            if session is not None:
                self._send(prompt, session)

    def allocated(self, prompt: Prompt, tokens: int) -> Lease | None:
        """The request has pages, and `tokens` of them are to be loaded: end its lookup. Returns the lease to
        load from, which now belongs to the caller; without tokens, releases it and counts a miss."""
        state = prompt.lookup
        gave_up, pending, lease = state.wait.gave_up, state.pending, state.take_lease()
        self.queue.remove(prompt)
        self._lookups.cancel(prompt, pending)
        state.wait = Wait()
        if lease is None:
            return None
        if tokens:
            if prompt.load.between_steps:
                state.computed += tokens  # known to be good before a step computes from them
            return lease
        if not gave_up and self._lacks(prompt, lease):
            self._stats.counts["miss:late" if lease.coming else "miss:absent"] += 1
        lease.release()
        return None

    def _lacks(self, prompt: Prompt, lease: Lease) -> bool:
        """Whether the daemon had no block beyond those that the engine has itself."""
        block = self._layout.block_tokens
        return lease.ready * block <= prompt.lookup.computed < prompt.loadable(block) * block

    def finished(self, prompt: Prompt) -> None:
        """The request has ended, with or without pages."""
        pending = prompt.lookup.pending
        self.queue.remove(prompt)
        prompt.lookup.release()
        self._lookups.cancel(prompt, pending)
