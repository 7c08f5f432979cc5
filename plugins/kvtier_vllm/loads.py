"""Loads: into which pages, and within which step or between steps; which ranks can read; and which pages are
unverified until a load's result is known.

A load keeps its lease until every rank has reported. Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.client import Lease
from kvtier.wire import DIGEST_BYTES, SLOT_BYTES
from kvtier_vllm.daemon import DaemonSession
from kvtier_vllm.forecast import Forecast
from kvtier_vllm.layout import Layout
from kvtier_vllm.messages import DirectOrder, LoadOrder, RankMapping, RankReport, ReadOrder
from kvtier_vllm.options import Options
from kvtier_vllm.prompt import Hit, Prompt
from kvtier_vllm.stats import PluginStats
from kvtier_vllm.timeline import Timelines

SHARE_OF_A_STEP = 0.05  # of its time that loads may add to a step that serves other requests
UNFILLED = 1 << 62  # later than any step: no report verifies this page


@dataclass(slots=True)
class StepLoad:
    """A load that some ranks have not reported yet. `first`: its first block; `direct`: how many blocks the
    ranks read from disk themselves."""

    prompt: Prompt
    lease: Lease
    first: int
    hit: Hit
    ranks: int
    direct: int = 0
    nbytes: int = 0  # that ranks have loaded from the lease


class Loads:
    """The loads of one engine. Writes the load state of prompts."""

    def __init__(
        self,
        layout: Layout,
        options: Options,
        forecast: Forecast,
        stats: PluginStats,
        timelines: Timelines,
    ) -> None:
        self.options = options
        self._layout = layout
        self._forecast = forecast
        self._stats = stats
        self._timelines = timelines
        self.begun: list[LoadOrder] = []  # for the next step
        self._pending: dict[int, StepLoad] = {}
        self._fresh: set[int] = set()  # pages of the loads in `begun`
        self._served: set[str] = set()  # requests of the last step
        self._within_step_s = 0.0  # expected time of the loads within the next step

    def __len__(self) -> int:
        """The number of pending loads."""
        return len(self._pending)

    # --- before and with a step --------------------------------------------------------------

    def choose_time(self, prompt: Prompt, blocks: int, direct: bool = False) -> bool:
        """Whether to load this many blocks between steps. `direct`: the ranks read some from disk."""
        prompt.load.direct = direct
        prompt.load.between_steps = direct or self._between_steps(prompt, blocks)
        return prompt.load.between_steps

    def _between_steps(self, prompt: Prompt, blocks: int) -> bool:
        # If a load within a step fails, the engine is told page numbers without their group, and the other
        # ranks do not know that they computed from bad pages. A state or a window also replaces all blocks
        # before it, so the engine has no block to continue from.
        groups = self._layout.groups
        one = len(groups) == self._layout.shards.ranks == 1 and groups[0].kind == "full"
        if not one or self.options.load == "async":
            return True
        if self.options.load == "sync":
            return False
        # All requests of the step wait for its loads.
        alone = self._served <= {prompt.request.request_id}
        most_s = self._forecast.step_s() * (1.0 if alone else SHARE_OF_A_STEP)
        return self._expected_s(blocks) + self._within_step_s > most_s

    def _expected_s(self, blocks: int) -> float:
        return self._forecast.load_s(self._layout.load_bytes(blocks))

    def begin(
        self,
        number: int,
        prompt: Prompt,
        lease: Lease,
        block_ids: Sequence[Sequence[int]],
        tokens: int,
    ) -> int:
        """Load the last tokens of the lease's ready blocks, or all its blocks, and own it; return the end."""
        session = prompt.session
        assert session is not None
        stop = lease.ready + (lease.coming if prompt.load.direct else 0)
        start = stop - tokens // self._layout.block_tokens
        ready = max(start, lease.ready)
        shards = [
            list(self._reads(lease, shard, block_ids, start, lease.ready))
            if start < lease.ready
            else []
            for shard in range(self._layout.shards.count)
        ]
        direct = self._direct_order(prompt, block_ids, ready, stop) if ready < stop else None
        state = prompt.load
        hit = state.hit = self._hit(prompt, start, stop)
        state.tokens = state.tokens[0] + hit.warm, state.tokens[1] + hit.cold
        self._timelines.allocated(hit.request_id, {"warm": hit.warm, "cold": hit.cold})
        now = not state.between_steps
        if now:
            self._within_step_s += self._expected_s(stop - start)
        run, ranks = session.reader.daemon_run, self._layout.shards.ranks
        self.begun.append(LoadOrder(number, hit.request_id, run, now, shards, direct))
        self._pending[number] = StepLoad(prompt, lease, start, hit, ranks, stop - ready)
        for read in (read for reads in shards for read in reads):
            self._fresh.update(read.block_ids)
        if direct is not None:
            self._fresh.update(direct.block_ids)
        return stop

    def _direct_order(
        self, prompt: Prompt, block_ids: Sequence[Sequence[int]], start: int, stop: int
    ) -> DirectOrder:
        """The blocks that the ranks read themselves: each is one page, of the only group."""
        assert prompt.keys is not None
        keys, ids = prompt.keys[start:stop], block_ids[self._layout.groups[0].group_id]
        return DirectOrder(list(ids[start:stop]), keys.packed, keys.parent)

    def _hit(self, prompt: Prompt, start: int, stop: int) -> Hit:
        """Blocks [start, stop), by the tier that held them when the request first asked."""
        first, last = prompt.lookup.on_disk
        cold = max(0, min(stop, last) - max(start, first))
        tokens = self._layout.block_tokens
        return Hit(prompt.request.request_id, (stop - start - cold) * tokens, cold * tokens)

    def _reads(
        self, lease: Lease, shard: int, block_ids: Sequence[Sequence[int]], start: int, stop: int
    ) -> Iterator[ReadOrder]:
        for number, group in enumerate(self._layout.groups):
            part = lease.part(number, shard)
            ids, parts = block_ids[group.group_id], group.parts
            if parts == 1 and start >= part.first and all(ids[start:stop]):
                # The usual case: copying block by block takes 10 ms for a prompt of 100k tokens.
                blocks = slice(start - part.first, stop - part.first)
                slots = part.slots[blocks.start * SLOT_BYTES : blocks.stop * SLOT_BYTES]
                digests = part.digests[blocks.start * DIGEST_BYTES : blocks.stop * DIGEST_BYTES]
                hot = part.hot[blocks.start * SLOT_BYTES : blocks.stop * SLOT_BYTES]
                yield ReadOrder(number, list(ids[start:stop]), slots, digests, hot)
                continue
            # Block 0 means no block: a window does not need it.
            places = [at for at in range(start, stop) if any(ids[at * parts : (at + 1) * parts])]
            held = [at - part.first for at in places if at >= part.first]
            slots, digests, hot = (
                b"".join(packed[at * size : (at + 1) * size] for at in held)
                for packed, size in (
                    (part.slots, SLOT_BYTES), (part.digests, DIGEST_BYTES), (part.hot, SLOT_BYTES),
                )
            )  # fmt: skip
            pages = [page for at in places for page in ids[at * parts : (at + 1) * parts]]
            yield ReadOrder(number, pages, slots, digests, hot)

    def take(self, served: Iterable[str]) -> tuple[list[LoadOrder], set[int]]:
        """The loads for this step, which serves these requests, and the pages of these loads."""
        self._served, self._within_step_s = set(served), 0.0
        begun, self.begun = self.begun, []
        fresh, self._fresh = self._fresh, set()
        return begun, fresh

    def finished(self, request_id: str) -> None:
        """The request has ended. Its pending loads continue until every rank has reported."""
        self._served.discard(request_id)

    # --- what the ranks report ---------------------------------------------------------------

    def copied(self, report: RankReport) -> None:
        """Count what the ranks have copied, including parts of loads."""
        if report.load_s:
            self._forecast.loaded(report.load_bytes, report.load_s)
        if report.direct_s:
            self._forecast.read_directly(report.direct_bytes, report.direct_s)
        for copied in report.loaded:
            load = self._pending[copied.number]
            load.nbytes += copied.nbytes
            hit = load.hit
            hit.good = hit.good and copied.good
            self._timelines.copied(hit.request_id, copied)
            self._stats.counts["loaded_bytes"] += copied.nbytes
            self._stats.took("load_s", copied.ended - copied.begun)
            self._stats.adapted("adapter_loaded_blocks", load.prompt.adapter, copied.blocks)

    def failed(self, report: RankReport) -> list[StepLoad]:
        """The loads that left pages unfilled, by this report."""
        return [self._pending[number] for number in report.failed]

    def reported(self, report: RankReport) -> None:
        """End the loads that all ranks have reported."""
        for number, ranks in report.loads.items():
            self._reported(number, ranks)

    def _reported(self, number: int, ranks: int) -> None:
        load, counts = self._pending[number], self._stats.counts
        load.ranks -= ranks
        if load.ranks:
            return
        del self._pending[number]
        hit = load.hit
        if hit.good:
            # The daemon counts the use of blocks that ranks read themselves when their reads end.
            cold = max(0, hit.cold - load.direct * self._layout.block_tokens)
            load.lease.release(hit.warm, load.nbytes, cold)
        else:
            if self.options.verify:
                load.lease.recheck()
            load.lease.release()
            state = load.prompt.load
            state.tokens = state.tokens[0] - hit.warm, state.tokens[1] - hit.cold
        self._timelines.mark(hit.request_id, "reported")
        if hit.good:
            counts["hit_tokens:warm"] += hit.warm
            counts["hit_tokens:cold"] += hit.cold
            counts["loaded_tokens"] += hit.warm + hit.cold
            adapter = load.prompt.adapter
            self._stats.adapted("adapter_hit_tokens", adapter, hit.warm + hit.cold)
        else:
            counts["failed_tokens"] += hit.warm + hit.cold


class Ranks:
    """The mappings of an engine's ranks, as they report them."""

    def __init__(self, ranks: int) -> None:
        self.by_rank: dict[int, RankMapping] = {}
        self._ranks = ranks
        self._unready_since: float | None = None

    @property
    def reported(self) -> bool:
        """Whether every rank has reported a mapping."""
        return len(self.by_rank) == self._ranks

    def can_read(self, session: DaemonSession, lease: Lease) -> bool:
        """Whether every rank has mapped the extents of these slots."""
        if not self.reported:
            return False
        mappings, run = self.by_rank.values(), session.reader.daemon_run
        if any(one.daemon_run != run for one in mappings):
            return False
        least = min(one.extents for one in mappings)
        return least >= session.reader.extents or least >= lease.extents

    @property
    def read_directly(self) -> bool:
        """Whether every rank reads blocks on disk itself."""
        return self.reported and all(one.direct for one in self.by_rank.values())

    def ready(self) -> None:
        """All ranks can read."""
        self._unready_since = None

    def unready_s(self, now: float) -> float:
        """Some rank cannot read: for how many seconds this has been so."""
        if self._unready_since is None:
            self._unready_since = now
        return now - self._unready_since


class UnverifiedPages:
    """Pages that a load within a step fills, and pages computed from them, until the load is known to be
    good.

    The engine computes from such pages before it knows the result. It keeps the pages of a failed load in
    its own cache while it computes them again, which may take several steps, and another request may
    compute from them meanwhile. Loads of other connectors are not reported by this plugin's ranks. So an
    unverified page and the blocks after it are not saved, and a page that was not filled is unverified
    until a step computes it. With several groups no page is unverified: a failed load within a step then
    ends the engine.
    """

    def __init__(self, layout: Layout) -> None:
        self._group = layout.groups[0]
        self._page_tokens = layout.block_tokens // self._group.parts
        # page -> the step whose report verifies it. Negative for loads of this connector: if one fails, the
        # ranks cancel the saves of that step themselves, so saves need not wait for the report.
        self._step_of: dict[int, int] = {}
        self._loaded: set[int] = set()  # unverified pages that were loaded, not computed
        # Unverified pages that were partly computed again: by which request, up to which token.
        self._in_part: dict[int, tuple[str, int]] = {}
        self._pending = False  # whether a report will verify some pages
        self._holders: set[str] = set()  # requests that had unverified pages when last served

    def __len__(self) -> int:
        return len(self._step_of)

    def begun(
        self, step: int, scheduled: Any, prompts: Mapping[str, Prompt], ours: Container[str],
        fresh: Iterable[int],
    ) -> None:  # fmt: skip
        """A step begins. This connector loads within it for the requests in `ours`; other connectors may load
        for others. `fresh`: the pages of this connector's loads, including those between steps."""
        if not (self._step_of or scheduled.has_sync_kv_loads):
            return
        cached = scheduled.scheduled_cached_reqs
        first = {new.req_id for new in scheduled.scheduled_new_reqs} | set(cached.resumed_req_ids)
        self._verify(fresh)
        for request_id, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if groups and request_id not in first:
                self._verify(groups[0])
        # A request without unverified pages when last served has no page that this step loads into.
        self._holders &= prompts.keys() if self._step_of else set()
        # In the engine's order: a request may share pages that an earlier one fills in the same step.
        for request_id, tokens in scheduled.num_scheduled_tokens.items():
            if request_id not in first and request_id not in self._holders:
                continue
            prompt = prompts.get(request_id)
            groups = scheduled.kv_connector_block_state.get_block_ids(request_id)
            if prompt is None or groups is None or len(groups) > 1:
                continue
            (pages,) = groups
            if request_id in first:
                mark = -step if request_id in ours else step
                self._start_request(prompt, pages, mark if scheduled.has_sync_kv_loads else 0)
            self._computed(prompt.request, pages, tokens)
            if self._step_of.keys().isdisjoint(pages):
                self._holders.discard(request_id)
            else:
                self._holders.add(request_id)

    def _start_request(self, prompt: Prompt, pages: Sequence[int], mark: int) -> None:
        """A request starts to be served. The report of step `mark` verifies its loaded pages; 0: they are
        good already. The pages that the engine had itself do not change."""
        size, before = self._page_tokens, prompt.request.num_computed_tokens
        if before <= prompt.lookup.computed:
            return
        loaded = pages[prompt.lookup.computed // size : -(-before // size)]
        if mark:
            self._mark(loaded, mark)
            self._loaded.update(loaded)
        elif (
            prompt.request.request_id not in self._holders
        ):  # otherwise it may have had these pages before
            self._verify(loaded)

    def _computed(self, request: Any, pages: Sequence[int], tokens: int) -> None:
        """The step computes tokens: their pages are verified with the last page that they depend on."""
        size, before = self._page_tokens, request.num_computed_tokens
        stop, held = before + tokens, set(pages[: -(-before // size)])
        if before % size and self._in_part:
            owner, last = self._in_part.get(pages[before // size], ("", 0))
            if owner == request.request_id and before <= last:
                held.remove(pages[before // size])
        latest = max((self._step_of[page] for page in self._step_of.keys() & held), default=0)
        if not self._has_all(pages, before, stop):
            latest = UNFILLED
        if latest:
            self._mark(pages[before // size : -(-stop // size)], latest)
            return
        self._verify(pages[before // size : stop // size])
        if stop % size and pages[stop // size] in self._step_of:
            # A request that shares this page treats it as a whole page.
            self._in_part[pages[stop // size]] = request.request_id, stop

    def _has_all(self, pages: Sequence[int], before: int, stop: int) -> bool:
        """Whether all pages exist that these tokens are computed from. After a failed load the engine
        continues at the first page of the load, and lacks the pages before it that a window or a state had
        dropped."""
        size = self._page_tokens
        if self._group.kind == "window":
            first = max(0, before - self._group.window_tokens)
            return all(pages[first // size : -(-stop // size)])
        return self._group.kind == "full" or before == 0 or bool(pages[(before - 1) // size])

    def _mark(self, pages: Iterable[int], mark: int) -> None:
        self._step_of |= dict.fromkeys(pages, mark)
        self._step_of.pop(0, None)  # 0 means no page
        self._pending = self._pending or mark != UNFILLED
        self._loaded.difference_update(pages)
        for page in self._in_part.keys() & pages if self._in_part else ():
            del self._in_part[page]

    def _verify(self, pages: Iterable[int]) -> None:
        """These pages are filled again, or verified."""
        for page in pages:
            self._step_of.pop(page, None)

    def reported(self, step: int, invalid: Collection[int]) -> None:
        """This step has ended, and these pages were not filled."""
        if not self._step_of.keys().isdisjoint(invalid):
            # Pages computed since may depend on them. Other loaded pages wait for their own step's report.
            good = self._loaded.difference(invalid)
            self._step_of = {
                page: step_of if page in good else UNFILLED
                for page, step_of in self._step_of.items()
            }
        elif not self._pending:
            return
        self._step_of = {
            page: step_of for page, step_of in self._step_of.items() if abs(step_of) > step
        }
        self._pending = any(step_of != UNFILLED for step_of in self._step_of.values())
        self._loaded &= self._step_of.keys()
        if not self._step_of:
            self._in_part.clear()

    def verified_until(self, groups: Sequence[Sequence[int]], start: int, stop: int) -> int:
        """The end of the verified blocks of a request from `start` on, at most `stop`."""
        parts = self._group.parts
        if self._step_of and len(groups) == 1:
            for at, page in enumerate(groups[0][start * parts : stop * parts]):
                if self._step_of.get(page, 0) > 0:
                    return start + at // parts
        return stop
