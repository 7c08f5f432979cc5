"""The scheduler's side: calls its parts in the order of a request's life. Imports no vLLM.

`lookups` asks the daemon and decides what a request loads; `loads` and `saves` choose blocks and pages;
`pins` sends pins, priorities and prefetches. Before the engine learns of a hit, its slots are leased, and
every rank has mapped them, so that ranks copy without the daemon. No call waits for the daemon, except for
about a millisecond per step.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from kvtier import KvSpec
from kvtier.client import Changes, Lease, Match, Pinned
from kvtier_plugins.residency import EngineBlocks, ResidencyReports
from kvtier_vllm.daemon import Daemon, DaemonSession
from kvtier_vllm.events import Event, ExtraKeys, KvEvents, TierWatch
from kvtier_vllm.forecast import Forecast
from kvtier_vllm.identity import Adapters, BlockKeys
from kvtier_vllm.layout import Layout
from kvtier_vllm.loads import Loads
from kvtier_vllm.lookups import EngineLimits, LoadDecisions, PromptLookups
from kvtier_vllm.messages import RankReport, Save, Step
from kvtier_vllm.options import PARAMETER, Options, RequestOptions, read_request_options
from kvtier_vllm.pins import Pins
from kvtier_vllm.prompt import Prompt
from kvtier_vllm.saves import LazySaves, Saves, fresh_pages, savable_tokens
from kvtier_vllm.stats import PluginStats
from kvtier_vllm.timeline import Timelines

log = logging.getLogger("vllm.kvtier")

# With `save = "lazy"`: the pages that so many steps of the largest size may give away are saved in time.
LAZY_STEPS, LAZY_TOKENS = 2, 8192


class EngineResidency:
    """The blocks of the engine's own cache. A block is known once its pages are filled, and until they are
    given to another request; marks detect pages that the engine forgets in another way."""

    def __init__(
        self, layout: Layout, options: Options, daemon: Daemon, keys: BlockKeys,
        mark_of: Callable[[int], object],
    ) -> None:  # fmt: skip
        self.blocks = EngineBlocks(mark_of)
        self._options = options
        self.reports = ResidencyReports(lambda: daemon.session)
        self._layout = layout
        self._daemon = daemon
        self._keys = keys

    def step(self, fresh: set[int], scheduled: Any, prompts: Mapping[str, Prompt]) -> None:
        """This step gives these pages to requests, and fills some."""
        if fresh:
            self.blocks.reused(fresh)
        session, block = self._daemon.session, self._layout.block_tokens
        for request_id, tokens in scheduled.num_scheduled_tokens.items() if session else ():
            prompt = prompts.get(request_id)
            if prompt is None:
                continue
            computed = prompt.request.num_computed_tokens
            end = (computed + tokens) // block
            prompt.resident = min(prompt.resident, computed // block)  # it was preempted
            if end > prompt.resident:
                self._filled(prompt, session, end, scheduled)
        self.blocks.check()
        self.reports.add(self.blocks)

    def _filled(
        self, prompt: Prompt, session: DaemonSession | None, end: int, scheduled: Any
    ) -> None:
        """This step fills the blocks of a prompt up to `end`."""
        assert session is not None
        name = prompt.request.request_id
        ids = scheduled.kv_connector_block_state.get_block_ids(name)
        keys, first = self._keys.of(prompt, session), prompt.resident
        if ids is None:
            return
        end = prompt.resident = min(end, len(keys))
        most = savable_tokens(prompt.request, self._options) // self._layout.block_tokens
        for index, group in enumerate(self._layout.groups):
            mine, parts = ids[group.group_id], group.parts
            for at in range(first, min(end, len(mine) // parts)):
                pages = mine[at * parts : (at + 1) * parts]
                if all(pages):
                    parent = keys[at - 1] if at else b""
                    savable = prompt.may_save and prompt.options.ttl_s is None and at < most
                    self.blocks.filled(index, keys[at], pages, parent, savable)


class SchedulerSide:
    """One per engine. `clock` is monotonic, in seconds. `loads`: the engine may load. `media`: its hashes
    identify images, videos and audio by their content."""

    def __init__(
        self,
        layout: Layout,
        options: Options,
        clock: Callable[[], float] = time.monotonic,
        events: ExtraKeys | None = None,
        loads: bool = True,
        media: bool = True,
    ) -> None:
        self._media = media
        self.stats = PluginStats()
        self.counts = self.stats.counts
        self.timelines = Timelines(options.timeline, clock)
        self._layout = layout
        self._options = options
        self._may_load = loads
        self._clock = clock
        self._spec = b""
        self._steps = 0
        self._number = itertools.count(1).__next__
        self._outdated = False  # the engine's own cache has blocks of weights that it had before
        self._prompts: dict[str, Prompt] = {}
        self._session: DaemonSession | None = None  # at the last step
        self.adapters = Adapters()
        self._forecast = Forecast()
        patience_s = options.patience_ms / 1000
        self._daemon = daemon = Daemon(options.socket, self.counts, options.verify, patience_s)
        self._events = KvEvents(layout, events) if events else None
        self._watch = TierWatch(self._events, daemon, self.counts) if self._events else None
        self._keys = BlockKeys(layout, self._events)
        self._lookups = PromptLookups(layout, options, daemon, self._keys, self._forecast, clock)
        self._loads = Loads(layout, options, self._forecast, self.stats, self.timelines)
        self._decisions = LoadDecisions(
            layout, options, clock, daemon, self._lookups, self._forecast, self._loads, self.stats,
            self.timelines, self._prompts, self._receive,
        )  # fmt: skip
        self._saves = Saves(layout, options, self.counts)
        self._pins = Pins(layout, daemon, self._keys, self.counts)
        self._resident: EngineResidency | None = None
        self._lazy: LazySaves | None = None

    def set_limits(
        self, limits: EngineLimits, mark_of: Callable[[int], object] | None = None,
        next_pages: Callable[[int], Iterable[int]] | None = None,
    ) -> None:  # fmt: skip
        """Use the engine's own cache and limits from now on. `mark_of`: the engine's name for the content
        of a page; then the daemon is told which blocks its cache holds. `next_pages`: the pages that it
        would give to another request next."""
        self._decisions.queue.limits = limits
        if mark_of is None or self._resident is not None:
            return
        lazy = self._options.save == "lazy"
        if self._options.residency or lazy:
            self._resident = EngineResidency(
                self._layout, self._options, self._daemon, self._keys, mark_of
            )
        if lazy and next_pages is not None and self._resident is not None:
            if any(group.kind != "full" for group in self._layout.groups):
                log.warning(
                    'kvtier: save is "lazy": this model has windows or states, saving at once'
                )
                return
            pages = sum(group.parts for group in self._layout.groups)
            tokens = min(limits.step_tokens, LAZY_TOKENS)
            look = int(LAZY_STEPS * tokens // self._layout.block_tokens + 1) * pages
            blocks = self._resident.blocks
            self._lazy = LazySaves(self._layout, self._saves, blocks, next_pages, look)

    def open(self, spec: KvSpec) -> None:
        """Connect in the background, and open this space."""
        engine = secrets.token_hex(8)
        self._spec = msgspec.msgpack.encode((engine, spec))
        self._daemon.open(spec, engine)

    def close(self) -> None:
        if self._resident is not None:
            self._resident.reports.close()
        self.timelines.close()
        self._daemon.close()

    # --- a request ---------------------------------------------------------------------------

    def queued(self, request: Any) -> None:
        """A request has arrived: look up its prompt."""
        self._decisions.queued(self._prompt(request))

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens after `computed` to load, and whether between steps. None: ask again."""
        return self._decisions.decide(self._prompt(request), computed)

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], tokens: int) -> None:
        """The engine has pages for a request; this many of its tokens are to be loaded."""
        prompt = self._prompt(request)
        lease = self._decisions.allocated(prompt, tokens)
        prompt.load.hit = None
        if lease is not None:
            stop = self._loads.begin(self._number(), prompt, lease, block_ids, tokens)
            self._saves.loaded(prompt, stop)
        self._pins.pin(prompt)

    def hit_of(self, request_id: str) -> tuple[int, int]:
        """How many tokens of this request are being loaded that were in memory, and on disk."""
        prompt = self._prompts.get(request_id)
        hit = prompt.load.hit if prompt is not None else None
        return (hit.warm, hit.cold) if hit is not None else (0, 0)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """The request has ended; return the fields of its response. Pending loads continue."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            return None
        if prompt.options.has_pin_requests:
            self._receive()  # the engine ends a request before it passes on the last step's reports
        del self._prompts[request.request_id]
        self._decisions.finished(prompt)
        self._loads.finished(request.request_id)
        self.timelines.finished(request.request_id)
        if self._lazy is None or not self._lazy.takes(prompt):
            self._saves.finished(prompt)
        response = prompt.response()
        if not self._may_load and prompt.options.save:
            # For the engine that decodes: the last saves may not have ended.
            response = {PARAMETER: {**(response or {PARAMETER: {}})[PARAMETER], "await": True}}
        return response

    def _prompt(self, request: Any) -> Prompt:
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            extras = self.adapters.extras(getattr(request, "lora_request", None))
            options = read_request_options(
                request.kv_transfer_params, getattr(request, "kv_hints", None)
            )
            may_load = self._may_load and options.load and not request.skip_reading_prefix_cache
            may_save = options.save and bool(self._options.save)
            named = self._media or not getattr(request, "mm_features", None)
            identified = extras is not None and named
            if not identified:
                self.counts["miss:adapter" if named else "miss:media"] += 1
            prompt = Prompt(
                request, extras or b"", identified and may_load, identified and may_save,
                options if identified else RequestOptions(given=options.given), self._number(),
                max(1, self._options.compute_last),
            )  # fmt: skip
            self._prompts[request.request_id] = prompt
            self.stats.adapted("adapter_requests", prompt.adapter, 1)
            tokens = request.num_prompt_tokens
            self.stats.adapted("adapter_prompt_tokens", prompt.adapter, tokens)
        return prompt

    # --- answers of the daemon ---------------------------------------------------------------

    def _receive(self) -> None:
        """Process the answers that have arrived."""
        if self._watch is not None:
            self._watch.follow_session()
        for prompt, answer in self._lookups.answers():
            if isinstance(answer, Pinned):
                self._pins.answered(answer)
                continue
            if isinstance(answer, Match):
                self._pins.prefetched(answer)
                continue
            if isinstance(answer, Changes):
                assert self._watch is not None
                self._watch.changed(answer)
                continue
            assert isinstance(answer, Lease)
            if prompt is None:
                answer.release()
                continue
            self._decisions.answered(prompt, answer)
            if self._events is not None and prompt.keys is not None:
                self._events.found(prompt.keys, answer)

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        return [] if self._events is None else self._events.take()

    # --- a step ------------------------------------------------------------------------------

    def step(self, scheduled: Any) -> Step:
        """The ranks' work for this step."""
        if self._daemon.session is not self._session:
            self._change_session(self._daemon.session)
        self._decisions.next_step()
        self._pins.next_step()
        self._steps += 1
        loads, fresh = self._loads.take(scheduled.num_scheduled_tokens)
        overwritten: list[int] = []
        saves: list[Save] = []
        if self._saves.in_flight["saves"] or self._resident is not None:
            pages = fresh_pages(self._layout, scheduled, fresh)
            overwritten = self._saves.overwritten(pages)
            if self._resident is not None:
                self._resident.step(pages, scheduled, self._prompts)
                # Without a page given away, the next pages are those of the last step, or come later.
                if self._lazy is not None and pages and self._session is not None:
                    saves = self._lazy.take(self._number)
        if self._options.save:
            now = {load.request_id for load in loads if load.now}
            self._saves.unverified.begun(self._steps, scheduled, self._prompts, now, fresh)
            saves += self._saves.in_order(self._new_saves(scheduled))
        self._forecast_step(scheduled)
        self.timelines.scheduled(self._steps, scheduled.num_scheduled_tokens)
        # Its leases may be promised until the next step, even if it was lost meanwhile.
        session = self._session
        extents = session.reader.extents if session is not None else 0
        run = session.reader.daemon_run if session is not None else b""
        spec = b"" if self._decisions.ranks.reported else self._spec
        idle = not scheduled.total_num_scheduled_tokens
        return Step(self._steps, spec, run, extents, loads, saves, overwritten, idle)

    def _change_session(self, session: DaemonSession | None) -> None:
        """Drop the references to the last session: its arena would stay mapped."""
        if self._session is not None:
            self._daemon.ended(self._session)
        self._session = session
        for prompt in self._prompts.values():
            if prompt.session is not session:
                prompt.leave_session()
        self._lookups.keep_only(session)
        if self._resident is not None:
            self._resident.reports.wake()

    def _forecast_step(self, scheduled: Any) -> None:
        """Record when the step began, and how much it computes."""
        tokens = scheduled.total_num_scheduled_tokens
        context = 0.0
        for request_id, count in scheduled.num_scheduled_tokens.items():
            prompt = self._prompts.get(request_id)
            if prompt is not None:
                context += count * (prompt.request.num_computed_tokens + count / 2)
        mean = context / tokens if tokens else 0.0
        self._forecast.step_began(self._steps, self._clock(), tokens, mean)

    def _new_saves(self, scheduled: Any) -> Iterator[Save]:
        """The saves of the blocks that this step fills."""
        session = self._daemon.session
        # The request of a state that was computed before need not be served by this step.
        states, served = self._saves.whole_states(scheduled), scheduled.num_scheduled_tokens
        others = [(name, 0) for name in states if name not in served] if states else ()
        for request_id, tokens in itertools.chain(served.items(), others):
            prompt = self._prompts.get(request_id)
            if prompt is None or not prompt.may_save:
                continue
            if self._lazy is not None and self._lazy.takes(prompt):
                continue
            if session is not None:
                prompt.use_session(session)
            self._saves.served(prompt)
            if session is None:
                self.counts["drop:no_daemon"] += len(states.get(request_id, ()))
                continue
            keys_of, most = partial(self._keys.of, prompt, session), session.space.most_keys()
            saves = self._saves.filled(prompt, tokens, scheduled, keys_of, most, self._number)
            if saves:
                self._pins.when_saved(prompt, session, saves[-1].number)
            yield from saves

    def reported(
        self, report: RankReport, failed: set[str], invalid: Collection[int] = frozenset()
    ) -> None:
        """Process the ranks' report. `failed`: requests whose load failed; `invalid`: pages that a load
        within the step did not fill, including other connectors' loads."""
        self._saves.unverified.reported(report.step, invalid)
        if invalid and self._lazy is not None:
            self._lazy.forget()
        self._decisions.ranks.by_rank |= report.mappings
        for name, count in report.counts.items():
            self.counts[name] += count
        self._forecast.step_ended(report.step, self._clock())
        self._loads.copied(report)
        for copied in report.saved:
            self.stats.took("save_s", copied.ended - copied.begun)
            adapter = self._saves.prompt_of(copied.number).adapter
            self.stats.adapted("adapter_saved_blocks", adapter, copied.blocks)
        for load in self._loads.failed(report):
            self._saves.load_failed(load)
        for save in self._saves.reported(report):
            self._pins.saved(save)
        self._loads.reported(report)
        for request_id in failed:
            if request_id in self._prompts:
                self._prompts[request_id].may_load = False
        self.timelines.stepped(report.step)
        self._receive()

    # --- the whole engine --------------------------------------------------------------------

    def new_generation(self, weights: bool = False) -> None:
        """From now on this engine finds no block that was saved before. `weights`: because they changed, and
        the engine's own cache was not reset since."""
        self._outdated |= weights
        self._keys.new_generation()
        self._pins.forget_keys()
        if self._events is not None:
            self._events.remove_all()
        for prompt in self._prompts.values():
            prompt.forget_keys()
        if self._resident is not None:
            self._resident.blocks.clear()

    def own_cache_reset(self) -> None:
        """The engine's own cache is empty, and no request has pages. Blocks that were saved since weights
        changed may be of both weights: a prefix was in that cache."""
        if self._outdated:
            self._outdated = False
            self.new_generation()

    @property
    def in_flight(self) -> dict[str, int]:
        """The numbers of pending things, for tests."""
        return {
            "prompts": len(self._prompts), "leases": len(self._loads),
            "tickets": len(self._lookups), "pins": len(self._pins),
            **self._saves.in_flight,
        }  # fmt: skip
