"""The scheduler's side: what of a prompt is here, what to load, what to save. Waits for no daemon but for a
millisecond between two steps.

A request's lease is asked for when it is queued; the answer lies in a table until the engine asks. It is
read when a request is queued, where that takes a moment only (see `ear`), and at the end of each step. What
is promised is leased, and mapped by every rank: the slots themselves go to the ranks, which need no daemon to
copy them.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import msgspec

from kvtier import KvSpec
from kvtier.client import Changes, Lease, Pinned
from kvtier_vllm.daemon import Daemon
from kvtier_vllm.events import Event, Events
from kvtier_vllm.forecast import Forecast
from kvtier_vllm.identity import Adapters
from kvtier_vllm.layout import Layout
from kvtier_vllm.line import Session
from kvtier_vllm.loading import Loads
from kvtier_vllm.messages import Report, Save, Step
from kvtier_vllm.naming import Names
from kvtier_vllm.options import Options
from kvtier_vllm.patience import TOLD_AFTER_S, Patience
from kvtier_vllm.pins import Pins
from kvtier_vllm.prompt import Prompt, Question, Wait
from kvtier_vllm.questions import Questions
from kvtier_vllm.queue import AHEAD, Queue
from kvtier_vllm.room import Room
from kvtier_vllm.saving import Saves
from kvtier_vllm.seats import Seats
from kvtier_vllm.stats import WAITED, Miss, Stats
from kvtier_vllm.timeline import Timelines
from kvtier_vllm.watch import Watch
from kvtier_vllm.wishes import Wishes, read_wishes

log = logging.getLogger("vllm.kvtier")


class SchedulerSide:
    """One for each engine. `clock` is monotonic, in seconds. Without `loads` nothing is ever loaded."""

    def __init__(
        self,
        layout: Layout,
        options: Options,
        clock: Callable[[], float] = time.monotonic,
        events: bool = False,
        loads: bool = True,
    ) -> None:
        self.stats = Stats()
        self.counts = self.stats.counts
        self.timelines = Timelines(options.timeline, clock)
        self._layout = layout
        self._options = options
        self._may_load = loads
        self._clock = clock
        self._spec = b""
        self._steps = 0
        self._numbers = 0
        self._prompts: dict[str, Prompt] = {}
        self._with: Session | None = None  # at the last step
        self._adapters = Adapters()
        self._forecast = Forecast()
        self._seats = Seats(layout.shards.ranks)
        self._daemon = daemon = Daemon(options.socket, self.counts)
        self._events = Events(layout) if events else None
        self._watch = Watch(self._events, daemon, self.counts) if self._events else None
        self._names = Names(layout, self._events)
        self._patience = Patience(layout, options, self._forecast)
        self._queue = Queue(layout, self._forecast)
        self._questions = Questions(layout, options, daemon, self._names, self._forecast, clock)
        self._loads = Loads(layout, options, self._forecast, self.stats, self.timelines)
        self._saves = Saves(layout, options, self.counts)
        self._pins = Pins(layout, daemon, self._names, self.counts)

    def enter(self, room: Room) -> None:
        """The engine's own cache and limits can be asked from now on."""
        self._queue.room = room

    def open(self, spec: KvSpec) -> None:
        """Connect, and open this space, in the background."""
        engine = secrets.token_hex(8)
        self._spec = msgspec.msgpack.encode((engine, spec))
        self._daemon.open(spec, engine)

    def close(self) -> None:
        self.timelines.close()
        self._daemon.close()

    # --- matching ----------------------------------------------------------------------------

    def queued(self, request: Any) -> None:
        """A request is here: ask for what there is of it. What is on disk is read for the first ones in the
        queue, where the engine says what it has itself; for the others once they come next."""
        prompt = self._prompt(request)
        session = self._daemon.session
        self.timelines.queued(request.request_id)
        soon = len(self._queue) < AHEAD
        self._queue.join(prompt)
        if prompt.may_load and session is not None and self._loadable(prompt):
            own = self._queue.own_blocks(prompt)
            self._ask(prompt, session, Question(own or 0, soon and own is not None))
            while self._questions.heard(prompt, session):
                self._drain()

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens after these can be loaded, and whether between steps. None: ask again."""
        prompt = self._prompt(request)
        prompt.computed = computed
        if not prompt.may_load or prompt.wait.gave_up:
            return 0, False
        if computed >= self._loadable(prompt) * self._layout.block_tokens:
            return 0, False
        now = self._clock()
        since = prompt.wait.begin(now)
        answer = self._answer(prompt, computed, now)
        if answer is None and not self._may_hold(prompt, since, now):
            answer = self._decide(prompt, computed, now)
        if answer is None:
            waits = prompt.lease is not None and prompt.lease.coming
            prompt.wait.hold("disk" if waits else "answer", now)
            return None, False
        self._waited(prompt, now)
        return answer

    def _may_hold(self, prompt: Prompt, since: float, now: float) -> bool:
        """Whether the scheduler is expected to ask again before this request's patience ends."""
        if prompt.wait.counted:
            return False
        next_ask_s = self._queue.next_ask_s(prompt, self._prompts.values())
        return not self._patience.ended(since, now + next_ask_s)

    def _waited(self, prompt: Prompt, now: float) -> None:
        waited_s = prompt.wait.end(now)
        if waited_s is None:
            return
        self.stats.took("wait_s", waited_s)
        for part, seconds in prompt.wait.parts.items():
            self.stats.took(WAITED[part], seconds)

    def _decide(self, prompt: Prompt, computed: int, now: float) -> tuple[int, bool]:
        """Load what is ready, and compute the rest: the request can't be held back."""
        session, own = self._daemon.session, computed // self._layout.block_tokens
        usable = self._usable(prompt, own, now)
        if session is not None and not (usable and prompt.lease and not prompt.lease.coming):
            # What came since the last answer is to be loaded, too.
            self._ask(prompt, session, Question(own, usable and prompt.answered.bring))
            while prompt.ticket and self._questions.heard(prompt, session, longer=True):
                self._drain()
        if not self._usable(prompt, own, now):
            return self._give_up(prompt, "patience")
        return self._what_is_ready(prompt, computed, now) or (0, False)

    def _usable(self, prompt: Prompt, own: int, now: float) -> bool:
        """Whether what is leased can be loaded where the engine has `own` blocks itself."""
        return (
            prompt.lease is not None
            and prompt.session is self._daemon.session
            and prompt.covers <= own
            and self._held(prompt, now)
        )

    def _answer(self, prompt: Prompt, computed: int, now: float) -> tuple[int, bool] | None:
        session = self._daemon.session
        if session is None:
            promised = self._what_is_ready(prompt, computed, now)
            if promised is not None or not self._daemon.tried:
                return promised
            return self._give_up(prompt, "no_daemon")
        prompt.belong(session)
        lease, own = prompt.lease, computed // self._layout.block_tokens
        if lease is None or not self._usable(prompt, own, now):
            self._questions.soon(prompt, Question(own, bring=True))
            return None
        if lease.coming and not prompt.answered.bring and lease.ready + lease.coming > own:
            self._questions.soon(prompt, Question(own, bring=True))
            return None
        if lease.coming and self._patience.worth_waiting(prompt, lease, computed, now):
            wait_s = self._patience.ask_for_s(prompt, len(self._prompts), now)
            if wait_s is not None:
                prompt.wait_s = wait_s
                self._questions.soon(prompt)
            return None
        if lease.ready * self._layout.block_tokens <= computed:
            return 0, False
        if self._seats.read(session, lease):
            self._seats.here()
            return self._promised(prompt, lease, computed)
        if self._seats.away_s(now) <= self._options.patience_ms / 1000:
            return None
        if not self.counts["miss:rank_away"]:
            log.warning("kvtier: a rank is not with the daemon (it says why): nothing is loaded")
        return self._give_up(prompt, "rank_away")

    def _what_is_ready(self, prompt: Prompt, computed: int, now: float) -> tuple[int, bool] | None:
        """Of what was waited for, what has come. The memory of a daemon that is gone is still mapped."""
        session, lease = prompt.session, prompt.lease
        if session is None or lease is None:
            return None
        some = lease.ready * self._layout.block_tokens > computed
        good = some and self._held(prompt, now) and self._seats.read(session, lease)
        return self._promised(prompt, lease, computed) if good else None

    def _held(self, prompt: Prompt, now: float) -> bool:
        """Whether its lease lasts long enough for a load."""
        return now - prompt.leased_at <= self._options.lease_ms / 2000

    def _promised(self, prompt: Prompt, lease: Lease, computed: int) -> tuple[int, bool]:
        block = self._layout.block_tokens
        tokens = lease.ready * block - computed
        prompt.between = self._loads.between_steps(prompt, tokens // block)
        return tokens, prompt.between

    def _give_up(self, prompt: Prompt, why: Miss) -> tuple[int, bool]:
        self.counts[f"miss:{why}"] += 1
        prompt.wait.gave_up = True
        return 0, False

    def _loadable(self, prompt: Prompt) -> int:
        return prompt.loadable(self._layout.block_tokens)

    def _prompt(self, request: Any) -> Prompt:
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            extras = self._adapters.extras(request)
            wishes = read_wishes(request.kv_transfer_params)
            may_load = self._may_load and wishes.load and not request.skip_reading_prefix_cache
            may_save = wishes.save and self._options.save
            named = extras is not None
            if not named:
                self.counts["miss:adapter"] += 1
            prompt = Prompt(
                request, extras or b"", named and may_load, named and may_save,
                wishes if named else Wishes(asked=wishes.asked),
                number=self._number(),
            )  # fmt: skip
            self._prompts[request.request_id] = prompt
        return prompt

    def _ask(self, prompt: Prompt, session: Session, question: Question | None = None) -> None:
        if self._questions.ask(prompt, session, question):
            self.timelines.mark(prompt.request.request_id, "asked")

    def _drain(self) -> None:
        """Take the answers that have come."""
        if self._watch is not None:
            self._watch.go_on()
        for prompt, answer in self._questions.answers():
            if isinstance(answer, Pinned):
                self._pins.answered(answer)
                continue
            if isinstance(answer, Changes):
                assert self._watch is not None
                self._watch.changed(answer)
                continue
            assert isinstance(answer, Lease)
            if prompt is None:
                answer.release()
            else:
                self._found(prompt, answer)

    def _found(self, prompt: Prompt, lease: Lease) -> None:
        prompt.release()
        if lease.refused:
            self._give_up(prompt, "refused")
        prompt.lease, prompt.leased_at, prompt.answered = lease, self._clock(), prompt.asked
        prompt.covers = self._covers(lease, prompt.asked)
        prompt.known = lease.ready + lease.coming
        prompt.wait.came("answer", prompt.leased_at)
        if not lease.coming:
            prompt.wait.came("disk", prompt.leased_at)
        if lease.coming:
            start, stop = prompt.coming
            first = min(start, lease.ready) if stop else lease.ready
            prompt.coming = first, max(stop, prompt.known)
        if self._events is not None and prompt.keys is not None:
            self._events.found(prompt.keys, lease)
        self.timelines.mark(prompt.request.request_id, "answered")
        self.timelines.mark(prompt.request.request_id, "coming" if lease.coming else "ready")

    def _covers(self, lease: Lease, asked: Question) -> int:
        """From which block on this lease has what is ready."""
        groups = self._layout.groups
        full = [part.first for part in lease.parts if groups[part.group].kind == "full"]
        return max(full) if full else asked.first

    def take_events(self) -> list[Event]:
        """What came into the tiers and went since the last call."""
        return [] if self._events is None else self._events.take()

    # --- pages -------------------------------------------------------------------------------

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], tokens: int) -> None:
        """The engine has pages for a request, of which so many tokens are to be loaded."""
        prompt = self._prompt(request)
        gave_up, waits, lease = prompt.wait.gave_up, prompt.waits, prompt.take_lease()
        self._queue.leave(prompt)
        self._questions.end(prompt, waits)
        prompt.wait, prompt.hit = Wait(), None
        if lease is not None and tokens:
            stop = self._loads.begin(self._number(), prompt, lease, block_ids, tokens)
            prompt.saved = max(stop, prompt.saved or 0)
            if prompt.between:
                prompt.computed += (
                    tokens  # before a step computes from these, they are known to be good
                )
        elif lease is not None:
            if not gave_up and self._lacks(prompt, lease):
                self.counts["miss:late" if lease.coming else "miss:absent"] += 1
            lease.release()
        self._pins.pin(prompt)

    def _lacks(self, prompt: Prompt, lease: Lease) -> bool:
        """Whether the daemon had nothing beyond what the engine has itself."""
        here = lease.ready * self._layout.block_tokens
        wanted = self._loadable(prompt) * self._layout.block_tokens
        return here <= prompt.computed < wanted

    def hit_of(self, request_id: str) -> tuple[int, int]:
        """How many tokens of this request are being loaded that were in memory, and how many from disk."""
        prompt = self._prompts.get(request_id)
        hit = prompt.hit if prompt is not None else None
        return (hit.warm, hit.cold) if hit is not None else (0, 0)

    # --- a step ------------------------------------------------------------------------------

    def step(self, scheduled: Any) -> Step:
        """What the ranks have to do with this step."""
        if self._daemon.session is not self._with:
            self._move(self._daemon.session)
        self._read_ahead()
        self._ask_again()
        self._steps += 1
        loads, fresh = self._loads.take(scheduled.num_scheduled_tokens)
        overwritten = self._saves.overwritten(scheduled, fresh)
        saves = []
        if self._options.save:
            now = {load.request_id for load in loads if load.now}
            self._saves.doubts.begun(self._steps, scheduled, self._prompts, now, fresh)
            saves = self._saves.in_order(self._new_saves(scheduled))
        self._note(scheduled)
        self.timelines.scheduled(self._steps, scheduled.num_scheduled_tokens)
        session = self._daemon.session
        extents = session.reader.extents if session is not None else 0
        run = session.reader.daemon_run if session is not None else b""
        spec = b"" if self._seats.taken else self._spec
        idle = not scheduled.total_num_scheduled_tokens
        return Step(self._steps, spec, run, extents, loads, saves, overwritten, idle)

    def _move(self, session: Session | None) -> None:
        """Keep nothing of the last session: its arena would stay mapped."""
        if self._with is not None:
            self._daemon.ended(self._with)
        self._with = session
        for prompt in self._prompts.values():
            if prompt.session is not session:
                prompt.leave()
        self._questions.move(session)

    def _ask_again(self) -> None:
        """Send what `matched` has found to be asked: it sends nothing itself. Then go on with long
        prompts that are to be pinned."""
        session = self._daemon.session
        for prompt in self._questions.take_soon():
            if session is not None:
                self._ask(prompt, session)
        self._pins.go_on()

    def _read_ahead(self) -> None:
        """Have the blocks of those that come next read from disk, and take those that have come."""
        self._queue.next_step()
        for prompt in self._queue.ahead():
            lease, wait = prompt.lease, prompt.wait
            if lease is None or prompt.ticket or wait.gave_up or wait.since is not None:
                continue
            unread = lease.coming and not prompt.answered.bring
            # The engine looks its own blocks up for this, one by one.
            own = self._queue.own_blocks(prompt) if unread or prompt.covers else None
            if own is not None and (unread or own < prompt.covers):  # lost some since it was asked
                self._questions.soon(prompt, Question(own, bring=True))
            elif lease.coming and prompt.answered.bring:
                prompt.wait_s = TOLD_AFTER_S
                self._questions.soon(prompt)

    def _note(self, scheduled: Any) -> None:
        """Remember when the step began, and what it has to do."""
        tokens = scheduled.total_num_scheduled_tokens
        context = 0.0
        for request_id, count in scheduled.num_scheduled_tokens.items():
            prompt = self._prompts.get(request_id)
            if prompt is not None:
                context += count * (prompt.request.num_computed_tokens + count / 2)
        mean = context / tokens if tokens else 0.0
        self._forecast.step_began(self._steps, self._clock(), tokens, mean)

    def _new_saves(self, scheduled: Any) -> Iterator[Save]:
        """Saves of the blocks that this step fills."""
        session = self._daemon.session
        # Where a state is whole that was computed before, its request need not be served by this step.
        named, served = self._saves.named(scheduled), scheduled.num_scheduled_tokens
        beside = [(name, 0) for name in named if name not in served] if named else ()
        for request_id, tokens in chain(served.items(), beside):
            prompt = self._prompts.get(request_id)
            if prompt is None or not prompt.may_save:
                continue
            if session is not None:
                prompt.belong(session)
            self._saves.seen(prompt)
            if session is None:
                self.counts["drop:no_daemon"] += len(named.get(request_id, ()))
                continue
            keys_of, most = partial(self._names.of, prompt, session), session.space.most_keys()
            saves = self._saves.filled(prompt, tokens, scheduled, keys_of, most, self._number)
            if saves:
                self._pins.when_saved(prompt, session, saves[-1].number)
            yield from saves

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    # --- what the ranks report ---------------------------------------------------------------

    def reported(
        self, report: Report, failed: set[str], invalid: Collection[int] = frozenset()
    ) -> None:
        """Take what the ranks have done; `failed` are requests whose load came to nothing, `invalid` the
        pages that a load within the step did not fill, whosever it was."""
        self._saves.doubts.reported(report.step, invalid)
        self._seats.by_rank |= report.seats
        for name, count in report.counts.items():
            self.counts[name] += count
        self._forecast.step_ended(report.step, self._clock())
        self._loads.copied(report)
        for copied in report.saved:
            self.stats.took("save_s", copied.ended - copied.begun)
        for loading in self._loads.failed(report):
            self._saves.again(loading.prompt, loading.first)
            loading.prompt.unfilled = True
        for save in self._saves.reported(report):
            self._pins.saved(save)
        self._loads.over(report)
        for request_id in failed:
            if request_id in self._prompts:
                self._prompts[request_id].may_load = False
        self.timelines.stepped(report.step)
        self._drain()

    # --- the end of a request ----------------------------------------------------------------

    def finished(self, request: Any) -> dict[str, Any] | None:
        """The request is over, or was given up: what its response says. A load that is on its way ends by
        itself."""
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is None:
            return None
        waits = prompt.waits
        self._queue.leave(prompt)
        prompt.release()
        self._questions.end(prompt, waits)
        self._loads.finished(request.request_id)
        self.timelines.finished(request.request_id)
        self._saves.finished(prompt)
        return prompt.told()

    def new_generation(self) -> None:
        """Nothing that was saved so far is found from now on, by this engine."""
        self._names.change()
        self._pins.forget_names()
        if self._events is not None:
            self._events.forget()
        for prompt in self._prompts.values():
            prompt.release()
            prompt.keys = prompt.known = prompt.saved = None
            prompt.pinned = False
            # What it has computed so far is of the old one, and what follows is computed from that.
            prompt.may_save = prompt.may_save and not prompt.request.num_computed_tokens

    @property
    def in_flight(self) -> dict[str, int]:
        """What is held: for tests, that nothing is left behind."""
        return {
            "prompts": len(self._prompts), "leases": len(self._loads),
            "tickets": len(self._questions), "pins": len(self._pins),
            **self._saves.in_flight,
        }  # fmt: skip
