"""What is to be saved, and which pages wait for it. No page is held: when one is given to somebody else, the
save is named to the ranks, which end its copy before that step (see `Step.overwritten`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier import Keys
from kvtier.key import KEY_BYTES
from kvtier.wire import LIMIT_RESERVED
from kvtier_vllm.doubts import Doubts
from kvtier_vllm.layout import Cached, Layout
from kvtier_vllm.messages import Hole, Report, Save, Write
from kvtier_vllm.options import Options
from kvtier_vllm.prompt import Prompt

TRIES = 3  # to save what left a hole
LIMIT_BLOCKS = 1024  # of one save: the step's thread names their pages and keys


@dataclass(slots=True)
class Saving:
    """A save that some ranks have not answered yet: whose, of which blocks and pages, and after how many
    `holes` of the prompt it was begun. `windows`: of blocks that are held only while a window has them;
    `behind`: and that are left behind by the step, which ends after so many `tokens`."""

    prompt: Prompt
    first: int
    stop: int
    holes: int
    pages: set[int]
    nbytes: int
    ranks: int
    windows: bool
    behind: bool
    tokens: int


class Saves:
    """Those of one engine. `counts` is told what was not saved."""

    def __init__(self, layout: Layout, options: Options, counts: Counter[str]) -> None:
        self._layout = layout
        self._options = options
        self._most_bytes = options.saving_bytes
        self._counts = counts
        self.doubts = Doubts(layout)
        self._states_of = {
            group.group_id: at for at, group in enumerate(layout.groups) if group.kind == "state"
        }
        self._windows = any(group.kind == "window" for group in layout.groups)
        self._parts = {group.group_id: group.parts for group in layout.groups}
        self._bytes_of = [group.block_bytes for group in layout.groups]
        # Without states: few blocks have any, and all layers' of one may be most of its bytes.
        kept = [group.block_bytes for group in layout.groups if group.kind != "state"]
        self._block_bytes = sum(kept) or layout.block_bytes
        self._of: dict[int, Saving] = {}
        self._on: dict[int, tuple[int, ...]] = {}  # page -> the saves that wait for it
        self._nbytes = 0

    def overwritten(self, scheduled: Any, fresh: set[int]) -> list[int]:
        """The saves whose pages this step gives to somebody else; `fresh` are those that it loads into."""
        if not self._of:
            return []
        pages = set(fresh)
        for new in scheduled.scheduled_new_reqs:
            self._add_fresh(pages, new.block_ids, new.num_computed_tokens)
        cached = scheduled.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            if cached.new_block_ids[at]:
                resumed = request_id in cached.resumed_req_ids
                first = cached.num_computed_tokens[at] if resumed else 0
                self._add_fresh(pages, cached.new_block_ids[at], first)
        return sorted({save for page in self._on.keys() & pages for save in self._on[page]})

    def _add_fresh(self, pages: set[int], groups: Sequence[Sequence[int]], computed: int) -> None:
        # Groups that are not kept have their pages from the same pool.
        for group_id, ids in enumerate(groups):
            pages.update(
                ids[computed * self._parts.get(group_id, 0) // self._layout.block_tokens :]
            )

    def named(self, scheduled: Any) -> Mapping[str, Sequence[tuple[int, int, int]]]:
        """The states that the engine says are whole when this step ends: group, page and tokens, of each
        request."""
        return scheduled.kv_connector_block_state.boundary_state_offloads if self._states_of else {}

    def seen(self, prompt: Prompt) -> None:
        """A step goes on with this request. What the engine had of it at its first was saved when it was
        computed, unless the daemon says it was not."""
        prompt.unfilled = False
        if prompt.saved is None:
            own = prompt.request.num_computed_tokens // self._layout.block_tokens
            prompt.saved = own if prompt.known is None else min(own, prompt.known)

    def filled(
        self, prompt: Prompt, tokens: int, scheduled: Any, keys_of: Callable[[], Keys],
        most: int, number: Callable[[], int],
    ) -> list[Save]:  # fmt: skip
        """Saves of the blocks that so many tokens fill, `most` at once, and as far as pages may wait. Each by
        itself, and what may be given away first before the others: what a window leaves behind with the next
        step, what it has still, all else."""
        request, block = prompt.request, self._layout.block_tokens
        before = request.num_computed_tokens
        assert prompt.saved is not None
        end = min(before + tokens, self._limit(prompt)) // block
        if end <= prompt.saved or prompt.tries >= TRIES:
            return []
        keys, first = keys_of(), prompt.saved
        named = self.named(scheduled).get(request.request_id)
        room = (self._most_bytes - self._nbytes) // self._block_bytes
        last = min(end, len(keys), first + min(room, most, LIMIT_BLOCKS))
        ids, whole = None, keys
        if last > first or named:
            # Only now: the engine lists all pages of a request that is asked for.
            ids = scheduled.kv_connector_block_state.get_block_ids(request.request_id)
            if ids is None:
                return []
            whole = keys[: self.doubts.sure(ids, first, end)]
            last = min(last, len(whole))
        last = max(last, first)
        self._count_left(last, end, before, before + tokens)
        if ids is None or (last == first and not named):
            return []
        end = prompt.saved = last
        behind: list[Write] = []
        inside: list[Write] = []
        others: list[Write] = []
        for index, group in enumerate(self._layout.groups):
            if group.kind == "window":
                left = min(max(first, group.left_behind(before + tokens, block)), end)
                behind += self._writes(index, ids, keys, first, left)
                inside += self._writes(index, ids, keys, left, end)
            elif group.kind == "full":
                others += self._writes(index, ids, keys, first, end)
        # They are named once; what of attention has no room yet follows.
        others += self._states(prompt, first, whole, ids, scheduled)
        found = []
        for writes in (behind, inside, others):
            if writes:
                nbytes = sum(len(w.keys) // KEY_BYTES * self._bytes_of[w.group] for w in writes)
                saving = Saving(
                    prompt, first, end, prompt.holes,
                    pages={page for write in writes for page in write.block_ids},
                    nbytes=nbytes, ranks=self._layout.shards.ranks,
                    windows=writes is not others, behind=writes is behind, tokens=before + tokens,
                )  # fmt: skip
                found.append(self._begun(number(), saving, writes))
        return found

    def _count_left(self, saved: int, filled: int, before: int, after: int) -> None:
        """Blocks that a window leaves behind with this step, between so many tokens, and nobody will save."""
        block = self._layout.block_tokens
        for group in self._layout.groups if self._windows else ():
            first = max(saved, group.left_behind(before, block))
            left = min(filled, group.left_behind(after, block)) - first
            if left > 0:
                self._counts["drop:overwritten"] += left

    def in_order(self, saves: Iterable[Save]) -> list[Save]:
        """Those of windows before all others."""
        found = list(saves)
        if self._windows:
            found.sort(key=lambda save: not self._of[save.number].windows)
        return found

    def _writes(
        self, index: int, ids: Sequence[Sequence[int]], keys: Keys, start: int, stop: int
    ) -> Iterator[Write]:
        group = self._layout.groups[index]
        mine = ids[group.group_id]
        for run, run_end in runs(group, mine, start, stop):
            for first in range(run, run_end, LIMIT_RESERVED):
                end = min(run_end, first + LIMIT_RESERVED)
                part = keys[first:end]
                pages = list(mine[first * group.parts : end * group.parts])
                yield Write(index, pages, part.packed, part.parent)

    def _states(
        self, prompt: Prompt, first: int, keys: Keys, ids: Sequence[Sequence[int]], scheduled: Any
    ) -> list[Write]:
        """The states that are whole when this step ends, as the engine says: it goes on in another page. What
        the request doesn't hold any more may be somebody else's by now."""
        found = []
        for group_id, page, tokens in self.named(scheduled).get(prompt.request.request_id, ()):
            block, rest = divmod(tokens, self._layout.block_tokens)
            if rest or not first < block <= len(keys) or group_id not in self._states_of:
                continue
            if page and ids[group_id][block - 1] == page:
                key = keys[block - 1 : block]
                found.append(Write(self._states_of[group_id], [page], key.packed, key.parent))
            elif page:
                self._counts["drop:overwritten"] += 1
        return found

    def _limit(self, prompt: Prompt) -> int:
        """How many leading tokens of a request are to be saved."""
        request = prompt.request
        tokens: int = request.num_tokens if self._options.save_decode else request.num_prompt_tokens
        return tokens

    def _begun(self, number: int, saving: Saving, writes: list[Write]) -> Save:
        self._of[number] = saving
        others = [(page, (*self._on[page], number)) for page in self._on.keys() & saving.pages]
        self._on |= dict.fromkeys(saving.pages, (number,))
        self._on.update(others)
        self._nbytes += saving.nbytes
        return Save(number, writes)

    def reported(self, report: Report) -> list[int]:
        """Take what the ranks have saved; the saves that all have answered. Where blocks are missing, what is
        saved after them could not be found: they are saved again while the request has them, or nothing is
        that follows them."""
        for number, hole in report.holes.items():
            self._left_hole(self._of[number], hole)
        return [number for number, ranks in report.saves.items() if self._over(number, ranks)]

    def _left_hole(self, saving: Saving, hole: Hole) -> None:
        prompt = saving.prompt
        if saving.windows and hole.drops["drop:overwritten"] and self._left(saving):
            # The request goes on without these pages, and so does a hit that ends further on.
            self._counts.update(hole.drops)
            return
        if not hole.again:
            prompt.tries = TRIES
        elif saving.holes == prompt.holes and not hole.grows:
            # Others that were begun with this one, and called off with it, are no tries of their own.
            # What is further on than the last hole is another: a window leaves pages at every step.
            prompt.holes += 1
            prompt.tries = 1 if saving.first > prompt.hole else prompt.tries + 1
            prompt.hole = saving.first
        self.again(prompt, saving.first)
        if prompt.tries >= TRIES or prompt.over:
            self._counts.update(hole.drops)
            prompt.dropped = max(prompt.dropped, saving.stop)

    def _left(self, saving: Saving) -> bool:
        """Whether the request has gone on, and its windows with it. Else it was preempted, or the saves of
        its step were called off: it has these pages, or will again."""
        block, computed = self._layout.block_tokens, saving.prompt.request.num_computed_tokens
        return computed // block >= saving.stop and (
            saving.behind
            or any(
                group.left_behind(computed, block) > group.left_behind(saving.tokens, block)
                for group in self._layout.groups
            )
        )

    @staticmethod
    def again(prompt: Prompt, first: int) -> None:
        """Blocks from here on are not saved after all."""
        if prompt.saved is not None:
            prompt.saved = min(prompt.saved, first)

    def _over(self, number: int, ranks: int) -> bool:
        saving = self._of[number]
        saving.ranks -= ranks
        if saving.ranks:
            return False
        del self._of[number]
        self._nbytes -= saving.nbytes
        for page in saving.pages:
            saves = self._on.pop(page)
            if len(saves) > 1:
                self._on[page] = tuple(save for save in saves if save != number)
        return True

    def finished(self, prompt: Prompt) -> None:
        """The request is over: count what of it was not saved."""
        prompt.over = True
        if not prompt.may_save or prompt.saved is None or prompt.unfilled:
            return
        whole = (
            min(prompt.request.num_computed_tokens, self._limit(prompt))
            // self._layout.block_tokens
        )
        first = max(prompt.saved, prompt.dropped)
        if whole > first:
            why = "no_time" if prompt.session is not None else "no_daemon"
            why = "after_hole" if prompt.tries >= TRIES else why
            self._counts[f"drop:{why}"] += whole - first

    @property
    def in_flight(self) -> dict[str, int]:
        return {"saves": len(self._of), "pages": len(self._on), "bytes": self._nbytes}


def runs(group: Cached, ids: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The ranges of consecutive blocks that have their pages."""
    if all(ids[start * group.parts : stop * group.parts]):
        if start < stop:
            yield start, stop
        return
    first = start
    for at in range(start, stop + 1):
        if at == stop or not group.whole(ids, at):
            if first < at:
                yield first, at
            first = at + 1
