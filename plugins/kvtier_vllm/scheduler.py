"""The scheduler's side: what of a prompt is here, what to load, what to save. Waits for no daemon but for a
millisecond between two steps.

A request's lease is asked for when it is queued; the answer lies in a table until the engine asks. It is
read when a request is queued, where that takes a moment only (see `ear`), and at the end of each step. What
is promised is leased, and mapped by every rank: the slots themselves go to the ranks, which need no daemon to
copy them.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from kvtier import Keys, KvSpec, KvtierError
from kvtier.client import Answer, Changes, Lease, Pinned
from kvtier.wire import SLOT_BYTES
from kvtier_vllm.ear import Ear
from kvtier_vllm.events import Event, Events
from kvtier_vllm.forecast import Forecast
from kvtier_vllm.identity import Adapters
from kvtier_vllm.layout import Layout
from kvtier_vllm.line import Line, Session
from kvtier_vllm.messages import Load, Read, Report, Save, Seat, Step
from kvtier_vllm.options import Options
from kvtier_vllm.prompt import Hit, Pin, Prompt
from kvtier_vllm.saving import Saves
from kvtier_vllm.stats import Miss, Stats
from kvtier_vllm.timeline import Timelines
from kvtier_vllm.wishes import read_wishes

log = logging.getLogger("vllm.kvtier")

GENERATION_BYTES = 16
LIMIT_HASHES = 2048  # of blocks that become keys at a time: about a millisecond
LIMIT_STEPS = 64  # whose start is remembered, for engines that have several at once
ASK_AGAIN_S = 0.002
ASKING = 8  # requests that may ask as often as one
TOLD_AFTER_S = 0.05  # that blocks are here, or how far they are: so long is nothing asked
UNKNOWN_WAITS, UNKNOWN_WAIT_S = 2, 0.05
LAST_ASK_S = 0.02  # before a request's patience ends: what is ready then is to be known
LISTEN_S = 1.0  # how often to see whether a daemon that was asked nothing is still there
SHARE_OF_A_STEP = 0.05  # that loads may add to it while others are served


@dataclass(slots=True)
class Loading:
    """A load that some ranks have not answered yet: whose, and from which block on."""

    prompt: Prompt
    lease: Lease
    first: int
    ranks: int


class SchedulerSide:
    """One for each engine. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        layout: Layout,
        options: Options,
        clock: Callable[[], float] = time.monotonic,
        events: bool = False,
    ) -> None:
        self.stats = Stats()
        self.counts = self.stats.counts
        self.timelines = Timelines(options.timeline, clock)
        self._events = Events(layout) if events else None
        self._watched: Session | None = None
        self._layout = layout
        self._options = options
        self._clock = clock
        self._line: Line | None = None
        self._spec = b""
        self._forecast = Forecast()
        self._told = (0.0, 0.0)
        self._told_to: Session | None = None
        self._with: Session | None = None
        self._adapters = Adapters()
        self._generation = b""
        self._prompts: dict[str, Prompt] = {}
        self._tickets: dict[int, tuple[str, float]] = {}  # whose, "" if nobody's any more, and when
        self._tickets_of: Session | None = None
        self._to_ask: dict[str, Prompt] = {}
        self._to_pin: dict[str, Prompt] = {}  # not all of whose keys are named yet
        self._served: set[str] = set()  # by the last step
        self._within_step_s = 0.0  # what the loads of the next one are expected to take
        self._ear = Ear(clock)
        self._listened = float("-inf")
        self._numbers = 0
        self._loads: list[Load] = []
        self._leases: dict[int, Loading] = {}
        self._hits: dict[int, Hit] = {}
        self._pins: dict[int, Pin] = {}  # of what a save has yet to bring
        self._saves = Saves(layout, options, self.counts)
        self._fresh: set[int] = set()
        self._seats: dict[int, Seat] = {}
        self._unseated_since: float | None = None  # some rank can't read what would be promised
        self._steps = 0
        self._started: deque[tuple[int, float, int, float]] = deque(maxlen=LIMIT_STEPS)

    def open(self, spec: KvSpec) -> None:
        """Connect, and open this space, in the background."""
        self._spec = msgspec.msgpack.encode(spec)
        name = f"vllm scheduler {os.getpid()}"
        self._line = Line(self._options.socket, spec, name, populate=False, level=logging.WARNING)

    def close(self) -> None:
        self.timelines.close()
        if self._line is not None:
            self._line.close()

    # --- matching ----------------------------------------------------------------------------

    def queued(self, request: Any) -> None:
        """A request is here: ask for what there is of it, and so start bringing it."""
        prompt = self._prompt(request)
        session = self._session()
        self.timelines.queued(request.request_id)
        if prompt.may_load and session is not None and self._loadable(prompt):
            self._ask(prompt, session)
            self._hear(prompt, session)

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens after these can be loaded, and whether between steps. None: ask again."""
        prompt = self._prompt(request)
        prompt.computed = computed
        if not prompt.may_load or prompt.gave_up:
            return 0, False
        if computed >= self._loadable(prompt) * self._layout.block_tokens:
            return 0, False
        now = self._clock()
        if prompt.waits_since is None:
            prompt.waits_since = now
        answer = self._answer(prompt, computed, now)
        if answer is None and now - prompt.waits_since > self._options.patience_ms / 1000:
            answer = self._what_is_ready(prompt, computed, now) or self._give_up(prompt, "late")
        if answer is None:
            return None, False
        if not prompt.waited:
            prompt.waited = True
            self.stats.took("wait_s", now - prompt.waits_since)
        prompt.waits_since = None
        return answer

    def _answer(self, prompt: Prompt, computed: int, now: float) -> tuple[int, bool] | None:
        session = self._session()
        if session is None:
            known_away = self._line is None or self._line.tried
            return self._give_up(prompt, "no_daemon") if known_away else None
        if prompt.lease is None or prompt.session is not session:
            if not (prompt.ticket and prompt.session is session):
                self._to_ask[prompt.request.request_id] = prompt
            return None
        lease, block = prompt.lease, self._layout.block_tokens
        if now - prompt.leased_at > self._options.lease_ms / 2000:
            self._ask_soon(prompt)
            return None
        if lease.coming and self._worth_waiting(prompt, lease, computed, now):
            assert prompt.waits_since is not None
            left_s = prompt.waits_since + self._options.patience_ms / 1000 - now
            if now - prompt.asked_at >= self._ask_after_s() and left_s > LAST_ASK_S:
                prompt.wait_s = min(TOLD_AFTER_S, left_s - LAST_ASK_S)
                self._ask_soon(prompt)
            return None
        if lease.ready * block <= computed:
            return 0, False
        if self._mapped(session, lease):
            self._unseated_since = None
            return self._promised(prompt, lease, computed)
        if self._unseated_since is None:
            self._unseated_since = now
        if now - self._unseated_since <= self._options.patience_ms / 1000:
            return None
        if not self.counts["miss:rank_away"]:
            log.warning("kvtier: a rank is not with the daemon (it says why): nothing is loaded")
        return self._give_up(prompt, "rank_away")

    def _promised(self, prompt: Prompt, lease: Lease, computed: int) -> tuple[int, bool]:
        tokens = lease.ready * self._layout.block_tokens - computed
        prompt.between = self._between_steps(prompt, tokens // self._layout.block_tokens)
        return tokens, prompt.between

    def _what_is_ready(self, prompt: Prompt, computed: int, now: float) -> tuple[int, bool] | None:
        """Of what was waited for, what has come."""
        session, lease = self._session(), prompt.lease
        if session is None or lease is None or prompt.session is not session:
            return None
        held = now - prompt.leased_at <= self._options.lease_ms / 2000
        some = lease.ready * self._layout.block_tokens > computed
        return (
            self._promised(prompt, lease, computed)
            if held and some and self._mapped(session, lease)
            else None
        )

    def _ask_soon(self, prompt: Prompt) -> None:
        """Once more, with the next step; unless an answer is still to come."""
        if not prompt.ticket:
            self._to_ask[prompt.request.request_id] = prompt

    def _ask_after_s(self) -> float:
        """When to ask again for what is coming: many who ask cost the daemon time."""
        return ASK_AGAIN_S * (1 + len(self._prompts) / ASKING)

    def _worth_waiting(self, prompt: Prompt, lease: Lease, computed: int, now: float) -> bool:
        """Whether what is coming is expected here, and loaded, before it would be recomputed. Where nothing
        was computed yet, it has twice the time that was forecast first, whatever is forecast later."""
        block = self._layout.block_tokens
        start = max(lease.ready * block, computed)
        tokens = (lease.ready + lease.coming) * block - start
        if tokens <= 0:
            return False
        load_s = lease.eta_ms / 1000 + self._forecast.load_s(
            tokens // block * self._layout.block_bytes
        )
        recompute_s = self._forecast.recompute_s(tokens, start)
        if recompute_s is not None:
            return load_s < recompute_s
        if prompt.due is None:
            prompt.due = now + UNKNOWN_WAITS * load_s + UNKNOWN_WAIT_S
        return now < prompt.due

    def _between_steps(self, prompt: Prompt, blocks: int) -> bool:
        # Where a load fails within a step, a page of one group can't be told from another's, nor can the
        # other ranks know that what they computed with it is nothing to keep.
        one = len(self._layout.groups) == self._layout.shards.ranks == 1
        if not one or self._options.load == "async":
            return True
        if self._options.load == "sync":
            return False
        # Everybody in the step waits for its loads.
        alone = self._served <= {prompt.request.request_id}
        most_s = self._forecast.step_s() * (1.0 if alone else SHARE_OF_A_STEP)
        return self._load_s(blocks) + self._within_step_s > most_s

    def _load_s(self, blocks: int) -> float:
        return self._forecast.load_s(blocks * self._layout.block_bytes)

    def _mapped(self, session: Session, lease: Lease) -> bool:
        """Whether every rank can read these slots."""
        seats, shards = self._seats, self._layout.shards
        if len(seats) < shards.ranks:
            return False
        run = session.reader.daemon_run
        if any(seat.daemon_run != run for seat in seats.values()):
            return False
        least = min(seat.extents for seat in seats.values())
        return least >= session.reader.extents or least >= lease.extents

    def _loadable(self, prompt: Prompt) -> int:
        """How many leading blocks can be loaded: one token is left to compute."""
        tokens: int = prompt.request.num_tokens
        return (tokens - 1) // self._layout.block_tokens

    def _give_up(self, prompt: Prompt, why: Miss) -> tuple[int, bool]:
        self.counts[f"miss:{why}"] += 1
        prompt.gave_up = True
        return 0, False

    def _prompt(self, request: Any) -> Prompt:
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            extras = self._adapters.extras(request)
            wishes = read_wishes(request.kv_transfer_params)
            may_load = wishes.load and not request.skip_reading_prefix_cache
            may_save = wishes.save and self._options.save
            named = extras is not None
            if not named:
                self.counts["miss:adapter"] += 1
            prompt = Prompt(
                request, extras or b"", named and may_load, named and may_save,
                wishes.pin_s if named else 0.0,
                number=self._number(),
            )  # fmt: skip
            self._prompts[request.request_id] = prompt
        return prompt

    def _session(self) -> Session | None:
        return None if self._line is None else self._line.session

    def _belong(self, prompt: Prompt, session: Session) -> None:
        """What is known of a prompt is of this session."""
        if prompt.session is not session:
            self._leave(prompt)
            prompt.session = session

    def _leave(self, prompt: Prompt) -> None:
        self._forget_lease(prompt)
        if prompt.session is not None:
            # What that one had, the next may not: all is offered again, and taken where it lacks.
            prompt.known, prompt.saved = 0, None
        prompt.session = prompt.keys = None

    def _move(self, session: Session | None) -> None:
        """Keep nothing of the last session: its arena would stay mapped."""
        self._with = session
        for prompt in self._prompts.values():
            if prompt.session is not session:
                self._leave(prompt)
        if self._tickets_of is not session:
            self._tickets, self._tickets_of = {}, None
        if self._told_to is not session:
            self._told_to = None

    def _keys(self, prompt: Prompt, session: Session) -> Keys:
        """The keys of the whole blocks that this request has so far; of a very long prompt some more."""
        self._belong(prompt, session)
        ratio = self._layout.block_tokens // self._layout.hash_tokens
        keys = prompt.keys
        done = 0 if keys is None else len(keys)
        hashes = prompt.request.block_hashes
        if keys is None or len(hashes) // ratio > done:
            new = hashes[done * ratio + ratio - 1 : (done + LIMIT_HASHES) * ratio : ratio]
            more = session.space.keys_of_hashes(new, self._generation, prompt.extras, keys)
            keys = prompt.keys = Keys((keys.packed if keys else b"") + more.packed)
            if self._events is not None:
                self._events.name(prompt.request, keys, done)
        return keys

    def _ask(self, prompt: Prompt, session: Session) -> None:
        keys = self._keys(prompt, session)
        self._forget_ticket(prompt)  # what it has so far it keeps until the answer
        shards = range(self._layout.shards.count)
        count = min(self._loadable(prompt), session.space.most_keys(len(shards)))
        whole = len(prompt.request.block_hashes) * self._layout.hash_tokens
        if len(keys) < min(count, whole // self._layout.block_tokens):
            self._to_ask[prompt.request.request_id] = prompt
            return
        if self._tickets_of is not session:
            self._tickets, self._tickets_of = {}, session
        try:
            self._tell_prefill(session)
            ticket = session.space.begin_lease(
                keys[:count], self._options.lease_ms, shards,
                request=prompt.number, within_ms=self._options.patience_ms,
                wait_ms=int(prompt.wait_s * 1000),
            )  # fmt: skip
        except KvtierError as error:
            self._lost(session, error)
            return
        prompt.ticket, prompt.asked_at, prompt.wait_s = ticket, self._clock(), 0.0
        self.timelines.mark(prompt.request.request_id, "asked")
        self._tickets[ticket] = prompt.request.request_id, prompt.asked_at

    def _tell_prefill(self, session: Session) -> None:
        """Have the daemon know what computing takes, each time that this has changed by a tenth."""
        fit = self._forecast.prefill
        told = self._told if self._told_to is session else (0.0, 0.0)
        if any(abs(now - was) > 0.1 * was for now, was in zip(fit, told, strict=True)):
            session.space.prefill(*fit)
            self._told, self._told_to = fit, session

    def _cancel(self, prompt: Prompt) -> None:
        """Nobody waits for this prompt's blocks any more."""
        session = self._session()
        if session is None or prompt.session is not session:
            return
        try:
            session.space.cancel(prompt.number)
        except KvtierError as error:
            self._lost(session, error)

    def _forget_ticket(self, prompt: Prompt) -> None:
        if prompt.ticket:
            # Another session gives the same numbers again, to others.
            if self._tickets_of is prompt.session and prompt.ticket in self._tickets:
                self._tickets[prompt.ticket] = "", prompt.asked_at
            prompt.ticket = 0

    def _forget_lease(self, prompt: Prompt) -> None:
        self._forget_ticket(prompt)
        if prompt.lease is not None:
            prompt.lease.release()
            prompt.lease = None

    def _lost(self, session: Session, why: object) -> None:
        self.counts["lost"] += 1
        assert self._line is not None
        self._line.lost(session, str(why))

    def _ask_again(self) -> None:
        """Send what `matched` has found to be asked: it sends nothing itself. Then go on with long
        prompts that are to be pinned."""
        asked, self._to_ask = self._to_ask, {}
        session = self._session()
        for prompt in asked.values():
            if session is not None:
                self._ask(prompt, session)
        pins, self._to_pin = self._to_pin, {}
        for prompt in pins.values():
            self._pin(prompt)

    def _hear(self, prompt: Prompt, session: Session) -> None:
        """Listen for the answer, for a moment, so that the step that is to come has it."""
        client = session.client
        while prompt.ticket and session is self._session() and self._ear.wait(client.fileno()):
            self._drain()

    def _drain(self) -> None:
        """Put the answers that have come into the table. A daemon that answers nobody is left alone."""
        session = self._session()
        if self._events is not None and session is not self._watched:
            self._events.forget()
            self._watched = session
            self._watch(session)
        if session is None:
            return
        now = self._clock()
        if not session.client.awaits and now - self._listened < LISTEN_S:
            return
        self._listened = now
        try:
            answers = session.client.poll()
        except KvtierError as error:
            self._lost(session, error)
            return
        if answers:
            self._ear.heard()
        for ticket, answer in answers.items():
            self._take(session, ticket, answer, now)
        if self._tickets_of is session and self._tickets:
            _, asked_at = next(iter(self._tickets.values()))
            if now - asked_at > self._options.patience_ms / 1000:
                self._lost(session, "it does not answer")

    def _watch(self, session: Session | None) -> None:
        """Have the daemon say what comes and goes, once more."""
        if session is not None:
            try:
                session.space.begin_watch()
            except KvtierError as error:
                self._lost(session, error)

    def _take(self, session: Session, ticket: int, answer: Answer, now: float) -> None:
        if isinstance(answer, Pinned):
            outcome = "held" if answer.blocks else "refused" if answer.refused else "empty"
            self.counts[f"pin:{outcome}"] += 1
            return
        if isinstance(answer, Changes):
            self._changed(session, answer)
            return
        assert isinstance(answer, Lease)
        request_id = ""
        if self._tickets_of is session:
            request_id, _ = self._tickets.pop(ticket, ("", now))
        if not request_id:
            answer.release()
            return
        prompt = self._prompts[request_id]
        prompt.ticket = 0
        self._forget_lease(prompt)
        if answer.refused:
            self._give_up(prompt, "refused")
        prompt.lease, prompt.leased_at = answer, now
        prompt.known = answer.ready + answer.coming
        if answer.coming:
            start, stop = prompt.coming
            first = min(start, answer.ready) if stop else answer.ready
            prompt.coming = first, max(stop, prompt.known)
        if self._events is not None and prompt.keys is not None:
            self._events.found(prompt.keys, answer)
        self.timelines.mark(request_id, "answered")
        self.timelines.mark(request_id, "coming" if answer.coming else "ready")

    def _changed(self, session: Session, changes: Changes) -> None:
        """The daemon says what came and went; ask for the next."""
        assert self._events is not None
        if changes.refused:
            log.warning("kvtier: no events of the tiers: %s", changes.refused)
            return
        if changes.missed:
            self.counts["missed"] += changes.missed
            self._events.forget()
        self._events.heard(changes.changes)
        self._watch(session)

    def take_events(self) -> list[Event]:
        """What came into the tiers and went since the last call."""
        return [] if self._events is None else self._events.take()

    # --- loading -----------------------------------------------------------------------------

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], tokens: int) -> None:
        """The engine has pages for a request, of which so many tokens are to be loaded."""
        prompt = self._prompt(request)
        lease, prompt.lease = prompt.lease, None
        waits = bool(prompt.ticket or (lease is not None and lease.coming))
        self._to_ask.pop(request.request_id, None)
        self._forget_lease(prompt)
        if waits:
            self._cancel(prompt)
        gave_up, prompt.hit = prompt.gave_up, None
        prompt.waits_since, prompt.gave_up, prompt.waited = None, False, False
        if lease is None or not tokens:
            if lease is not None:
                if not gave_up and self._lacks(prompt, lease):
                    self.counts["miss:absent"] += 1
                lease.release()
            self._pin(prompt)
            return
        session = prompt.session
        assert session is not None
        stop = lease.ready
        start = stop - tokens // self._layout.block_tokens
        shards = [
            list(self._reads(lease, shard, block_ids, start, stop))
            for shard in range(self._layout.shards.count)
        ]
        number = self._number()
        hit = self._hits[number] = prompt.hit = self._hit(prompt, start, stop)
        self.timelines.allocated(request.request_id, {"warm": hit.warm, "cold": hit.cold})
        now = not prompt.between
        if now:
            self._within_step_s += self._load_s(stop - start)
        self._loads.append(Load(number, request.request_id, session.reader.daemon_run, now, shards))
        self._leases[number] = Loading(prompt, lease, start, self._layout.shards.ranks)
        for read in (read for reads in shards for read in reads):
            self._fresh.update(read.block_ids)
        prompt.saved = max(stop, prompt.saved or 0)
        self._pin(prompt)

    def _lacks(self, prompt: Prompt, lease: Lease) -> bool:
        """Whether the daemon had nothing beyond what the engine has itself."""
        here = lease.ready * self._layout.block_tokens
        wanted = self._loadable(prompt) * self._layout.block_tokens
        return here <= prompt.computed < wanted

    def _hit(self, prompt: Prompt, start: int, stop: int) -> Hit:
        """Blocks [start, stop), by where they were when this request first asked for them."""
        first, last = prompt.coming
        cold = max(0, min(stop, last) - max(start, first))
        tokens = self._layout.block_tokens
        return Hit(prompt.request.request_id, (stop - start - cold) * tokens, cold * tokens)

    def hit_of(self, request_id: str) -> tuple[int, int]:
        """How many tokens of this request are being loaded that were in memory, and how many from disk."""
        prompt = self._prompts.get(request_id)
        hit = prompt.hit if prompt is not None else None
        return (hit.warm, hit.cold) if hit is not None else (0, 0)

    def _pin(self, prompt: Prompt) -> None:
        """Have what is here of a prompt stay, if its request wants that: once all of it has keys."""
        session = self._session()
        if not prompt.pin_s or prompt.pinned or session is None:
            return
        named = len(prompt.request.block_hashes) * self._layout.hash_tokens
        blocks = min(prompt.request.num_prompt_tokens, named) // self._layout.block_tokens
        keys = self._keys(prompt, session)
        if len(keys) < blocks:
            self._to_pin[prompt.request.request_id] = prompt
            return
        prompt.pinned = True
        self._begin_pin(Pin(session, keys[:blocks], prompt.pin_s))

    def _begin_pin(self, pin: Pin) -> None:
        if self._session() is pin.session and len(pin.keys):
            try:
                pin.session.space.begin_pin(pin.keys, pin.seconds)
            except KvtierError as error:
                self._lost(pin.session, error)

    def _reads(
        self, lease: Lease, shard: int, block_ids: Sequence[Sequence[int]], start: int, stop: int
    ) -> Iterator[Read]:
        for number, group in enumerate(self._layout.groups):
            part = lease.part(number, shard)
            ids, parts = block_ids[group.group_id], group.parts
            if parts == 1 and start >= part.first and all(ids[start:stop]):
                # Most of them, and the longest: a block at a time takes a prompt of 100k tokens 10 ms.
                slots = part.slots[
                    (start - part.first) * SLOT_BYTES : (stop - part.first) * SLOT_BYTES
                ]
                yield Read(number, list(ids[start:stop]), slots)
                continue
            # Block 0 stands for none: what a window has left behind.
            places = [at for at in range(start, stop) if any(ids[at * parts : (at + 1) * parts])]
            slots = b"".join(
                part.slots[(at - part.first) * SLOT_BYTES : (at + 1 - part.first) * SLOT_BYTES]
                for at in places
                if at >= part.first
            )
            pages = [page for at in places for page in ids[at * parts : (at + 1) * parts]]
            yield Read(number, pages, slots)

    # --- a step ------------------------------------------------------------------------------

    def step(self, scheduled: Any) -> Step:
        """What the ranks have to do with this step."""
        if self._session() is not self._with:
            self._move(self._session())
        self._ask_again()
        self._ear.next_step()
        self._served, self._within_step_s = set(scheduled.num_scheduled_tokens), 0.0
        self._steps += 1
        fresh, self._fresh = self._fresh, set()
        overwritten = self._saves.overwritten(scheduled, fresh)
        saves = list(self._new_saves(scheduled)) if self._options.save else []
        loads, self._loads = self._loads, []
        self._note(scheduled)
        self.timelines.scheduled(self._steps, scheduled.num_scheduled_tokens)
        session = self._session()
        extents = session.reader.extents if session is not None else 0
        run = session.reader.daemon_run if session is not None else b""
        spec = self._spec if len(self._seats) < self._layout.shards.ranks else b""
        idle = not scheduled.total_num_scheduled_tokens
        return Step(self._steps, spec, run, extents, loads, saves, overwritten, idle)

    def _note(self, scheduled: Any) -> None:
        """Remember when the step began, and what it has to do."""
        tokens = scheduled.total_num_scheduled_tokens
        context = 0.0
        for request_id, count in scheduled.num_scheduled_tokens.items():
            prompt = self._prompts.get(request_id)
            if prompt is not None:
                context += count * (prompt.request.num_computed_tokens + count / 2)
        mean = context / tokens if tokens else 0.0
        self._started.append((self._steps, self._clock(), tokens, mean))

    def _new_saves(self, scheduled: Any) -> Iterator[Save]:
        """Saves of the blocks that this step fills."""
        session = self._session()
        for request_id, tokens in scheduled.num_scheduled_tokens.items():
            prompt = self._prompts.get(request_id)
            if prompt is None or not prompt.may_save:
                continue
            if session is not None:
                self._belong(prompt, session)
            self._saves.seen(prompt)
            if session is None:
                continue
            keys_of, most = partial(self._keys, prompt, session), session.space.most_keys()
            save = self._saves.filled(prompt, tokens, scheduled, keys_of, most, self._number)
            if save is not None:
                self._pin_when_saved(prompt, session, save.number)
                yield save

    def _pin_when_saved(self, prompt: Prompt, session: Session, number: int) -> None:
        if prompt.pin_s:
            blocks = prompt.request.num_prompt_tokens // self._layout.block_tokens
            keys = self._keys(prompt, session)[: min(blocks, prompt.saved or 0)]
            self._pins[number] = Pin(session, keys, prompt.pin_s)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    # --- what the ranks report ---------------------------------------------------------------

    def reported(self, report: Report, failed: set[str]) -> None:
        """Take what the ranks have done; `failed` are requests whose load came to nothing."""
        self._seats |= report.seats
        if report.counts:
            self.counts.update(report.counts)
        if report.load_s:
            self._forecast.loaded(report.load_bytes, report.load_s)
        while self._started and self._started[0][0] <= report.step:
            number, started, tokens, context = self._started.popleft()
            if number == report.step and tokens:
                self._forecast.stepped(tokens, context, self._clock() - started)
        for copied in report.loaded:
            hit = self._hits[copied.number]
            hit.good = hit.good and copied.good
            self.timelines.copied(hit.request_id, copied)
            self.counts["loaded_bytes"] += copied.nbytes
            self.stats.took("load_s", copied.ended - copied.begun)
        for copied in report.saved:
            self.stats.took("save_s", copied.ended - copied.begun)
        for number in report.failed:
            prompt = self._leases[number].prompt
            self._saves.again(prompt, self._leases[number].first)
            prompt.unfilled = True
        for number in self._saves.reported(report):
            pin = self._pins.pop(number, None)
            if pin is not None:
                self._begin_pin(pin)
        for number, ranks in report.loads.items():
            self._load_over(number, ranks)
        for request_id in failed:
            if request_id in self._prompts:
                self._prompts[request_id].may_load = False
        self.timelines.stepped(report.step)
        self._drain()

    def _load_over(self, number: int, ranks: int) -> None:
        loading = self._leases[number]
        loading.ranks -= ranks
        if loading.ranks:
            return
        del self._leases[number]
        loading.lease.release()
        hit = self._hits.pop(number)
        self.timelines.mark(hit.request_id, "reported")
        if hit.good:
            self.counts["hit_tokens:warm"] += hit.warm
            self.counts["hit_tokens:cold"] += hit.cold
            self.counts["loaded_tokens"] += hit.warm + hit.cold
        else:
            self.counts["failed_tokens"] += hit.warm + hit.cold

    # --- the end of a request ----------------------------------------------------------------

    def finished(self, request: Any) -> None:
        """The request is over, or was given up. A load that is on its way ends by itself."""
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is None:
            return
        waits = prompt.ticket or (prompt.lease is not None and prompt.lease.coming)
        self._to_ask.pop(request.request_id, None)
        self._served.discard(request.request_id)
        self._forget_lease(prompt)
        self.timelines.finished(request.request_id)
        if waits:
            self._cancel(prompt)
        self._saves.finished(prompt)

    def new_generation(self) -> None:
        """Nothing that was saved so far is found from now on, by this engine."""
        self._generation = os.urandom(GENERATION_BYTES)
        self._to_pin.clear()
        if self._events is not None:
            self._events.forget()
        for prompt in self._prompts.values():
            self._forget_lease(prompt)
            prompt.keys = prompt.known = prompt.saved = None
            # What it has computed so far is of the old one, and what follows is computed from that.
            prompt.may_save = prompt.may_save and not prompt.request.num_computed_tokens

    @property
    def in_flight(self) -> dict[str, int]:
        """What is held: for tests, that nothing is left behind."""
        return {
            "prompts": len(self._prompts), "leases": len(self._leases),
            "tickets": len(self._tickets), "hits": len(self._hits),
            "pins": len(self._pins) + len(self._to_pin),
            **self._saves.in_flight,
        }  # fmt: skip
