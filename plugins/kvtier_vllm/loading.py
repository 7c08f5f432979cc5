"""What is loaded, into which pages and within which step; its leases are held until every rank has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvtier.client import Lease
from kvtier.wire import SLOT_BYTES
from kvtier_vllm.forecast import Forecast
from kvtier_vllm.layout import Layout
from kvtier_vllm.messages import Load, Read, Report
from kvtier_vllm.options import Options
from kvtier_vllm.prompt import Hit, Prompt
from kvtier_vllm.stats import Stats
from kvtier_vllm.timeline import Timelines

SHARE_OF_A_STEP = 0.05  # that loads may add to it while others are served


@dataclass(slots=True)
class Loading:
    """A load that some ranks have not answered yet: whose, and from which block on."""

    prompt: Prompt
    lease: Lease
    first: int
    hit: Hit
    ranks: int
    nbytes: int = 0  # that they have loaded


class Loads:
    """Those of one engine."""

    def __init__(
        self,
        layout: Layout,
        options: Options,
        forecast: Forecast,
        stats: Stats,
        timelines: Timelines,
    ) -> None:
        self.options = options
        self._layout = layout
        self._forecast = forecast
        self._stats = stats
        self._timelines = timelines
        self.begun: list[Load] = []  # for the next step to bring
        self._of: dict[int, Loading] = {}
        self._fresh: set[int] = set()  # pages that they go to
        self._served: set[str] = set()  # by the last step
        self._within_step_s = 0.0  # what those of the next one are expected to take

    def __len__(self) -> int:
        """How many are on their way."""
        return len(self._of)

    # --- before and with a step --------------------------------------------------------------

    def between_steps(self, prompt: Prompt, blocks: int) -> bool:
        """Whether so many blocks are better loaded between steps than within the next."""
        # Where a load fails within a step, a page of one group can't be told from another's, nor can the
        # other ranks know that what they computed with it is nothing to keep. And a state, or a window,
        # stands for all that is before it: the engine has nothing else to go back to.
        groups = self._layout.groups
        one = len(groups) == self._layout.shards.ranks == 1 and groups[0].kind == "full"
        if not one or self.options.load == "async":
            return True
        if self.options.load == "sync":
            return False
        # Everybody in the step waits for its loads.
        alone = self._served <= {prompt.request.request_id}
        most_s = self._forecast.step_s() * (1.0 if alone else SHARE_OF_A_STEP)
        return self._takes_s(blocks) + self._within_step_s > most_s

    def _takes_s(self, blocks: int) -> float:
        return self._forecast.load_s(self._layout.load_bytes(blocks))

    def begin(
        self,
        number: int,
        prompt: Prompt,
        lease: Lease,
        block_ids: Sequence[Sequence[int]],
        tokens: int,
    ) -> int:
        """Load the last so many tokens of what is leased, which is this load's from now on. The end of it,
        in blocks."""
        session = prompt.session
        assert session is not None
        stop = lease.ready
        start = stop - tokens // self._layout.block_tokens
        shards = [
            list(self._reads(lease, shard, block_ids, start, stop))
            for shard in range(self._layout.shards.count)
        ]
        hit = prompt.hit = self._hit(prompt, start, stop)
        prompt.got = prompt.got[0] + hit.warm, prompt.got[1] + hit.cold
        self._timelines.allocated(hit.request_id, {"warm": hit.warm, "cold": hit.cold})
        now = not prompt.between
        if now:
            self._within_step_s += self._takes_s(stop - start)
        self.begun.append(Load(number, hit.request_id, session.reader.daemon_run, now, shards))
        self._of[number] = Loading(prompt, lease, start, hit, self._layout.shards.ranks)
        for read in (read for reads in shards for read in reads):
            self._fresh.update(read.block_ids)
        return stop

    def _hit(self, prompt: Prompt, start: int, stop: int) -> Hit:
        """Blocks [start, stop), by where they were when this request first asked for them."""
        first, last = prompt.coming
        cold = max(0, min(stop, last) - max(start, first))
        tokens = self._layout.block_tokens
        return Hit(prompt.request.request_id, (stop - start - cold) * tokens, cold * tokens)

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

    def take(self, served: Iterable[str]) -> tuple[list[Load], set[int]]:
        """What this step brings, which serves these requests; and the pages that it loads into."""
        self._served, self._within_step_s = set(served), 0.0
        begun, self.begun = self.begun, []
        fresh, self._fresh = self._fresh, set()
        return begun, fresh

    def finished(self, request_id: str) -> None:
        """This request is served no more; a load of it that is on its way ends by itself."""
        self._served.discard(request_id)

    # --- what the ranks report ---------------------------------------------------------------

    def copied(self, report: Report) -> None:
        """Take what the ranks have copied, whole loads or not."""
        if report.load_s:
            self._forecast.loaded(report.load_bytes, report.load_s)
        for copied in report.loaded:
            loading = self._of[copied.number]
            loading.nbytes += copied.nbytes
            hit = loading.hit
            hit.good = hit.good and copied.good
            self._timelines.copied(hit.request_id, copied)
            self._stats.counts["loaded_bytes"] += copied.nbytes
            self._stats.took("load_s", copied.ended - copied.begun)

    def failed(self, report: Report) -> list[Loading]:
        """Those that have left pages unfilled, by this report."""
        return [self._of[number] for number in report.failed]

    def over(self, report: Report) -> None:
        """Let go of what all ranks have answered."""
        for number, ranks in report.loads.items():
            self._answered(number, ranks)

    def _answered(self, number: int, ranks: int) -> None:
        loading, counts = self._of[number], self._stats.counts
        loading.ranks -= ranks
        if loading.ranks:
            return
        del self._of[number]
        hit = loading.hit
        if hit.good:
            loading.lease.release(hit.warm, loading.nbytes, hit.cold)
        else:
            loading.lease.release()
            got = loading.prompt.got
            loading.prompt.got = got[0] - hit.warm, got[1] - hit.cold
        self._timelines.mark(hit.request_id, "reported")
        if hit.good:
            counts["hit_tokens:warm"] += hit.warm
            counts["hit_tokens:cold"] += hit.cold
            counts["loaded_tokens"] += hit.warm + hit.cold
        else:
            counts["failed_tokens"] += hit.warm + hit.cold
