"""Saves: which blocks to save, and which pages their copies read. No page is held back: if the engine gives
a page to another request, the step names the save to the ranks, which end its copy first
(`Step.overwritten`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kvtier import Keys
from kvtier.key import KEY_BYTES
from kvtier.wire import LIMIT_RESERVED
from kvtier_plugins.residency import Block, EngineBlocks
from kvtier_vllm.layout import Cached, Layout
from kvtier_vllm.loads import StepLoad, UnverifiedPages
from kvtier_vllm.messages import Hole, RankReport, Save, WriteOrder
from kvtier_vllm.options import Options
from kvtier_vllm.prompt import Prompt

TRIES = 3  # to save the blocks of a hole
LIMIT_BLOCKS = 1024  # of one save: the scheduler's thread lists their pages and keys


@dataclass(slots=True)
class StepSave:
    """A save of blocks [first, stop) that some ranks have not reported yet. `holes`: of the prompt when the
    save began; `windows`: the engine keeps these blocks only while a window contains them; `behind`: the
    window leaves them behind with this step, which ends after this many `tokens`."""

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
    """The saves of one engine. Writes the save state of prompts. `counts`: blocks that are not saved."""

    def __init__(self, layout: Layout, options: Options, counts: Counter[str]) -> None:
        self._layout = layout
        self._options = options
        self._most_bytes = options.saving_bytes
        self._counts = counts
        self.unverified = UnverifiedPages(layout)
        self._states_of = {
            group.group_id: at for at, group in enumerate(layout.groups) if group.kind == "state"
        }
        self._windows = any(group.kind == "window" for group in layout.groups)
        self._group_bytes = [group.block_bytes for group in layout.groups]
        # Without states: few blocks have one, and it may be most of the bytes of its block.
        kept = [group.block_bytes for group in layout.groups if group.kind != "state"]
        self._block_bytes = sum(kept) or layout.block_bytes
        self._pending: dict[int, StepSave] = {}
        self._saves_of: dict[int, tuple[int, ...]] = {}  # page -> the saves that read it
        self._nbytes = 0

    def overwritten(self, pages: set[int]) -> list[int]:
        """The saves that read one of these pages."""
        return sorted(
            {save for page in self._saves_of.keys() & pages for save in self._saves_of[page]}
        )

    def whole_states(self, scheduled: Any) -> Mapping[str, Sequence[tuple[int, int, int]]]:
        """The states that are whole when this step ends, by request: group, page and tokens."""
        return scheduled.kv_connector_block_state.boundary_state_offloads if self._states_of else {}

    def served(self, prompt: Prompt) -> None:
        """A step serves this request. The blocks that the engine had before its first step were saved when
        they were computed, unless the daemon lacks them."""
        state, stored = prompt.save, prompt.lookup.stored
        state.unfilled = False
        if state.saved is None:
            own = prompt.request.num_computed_tokens // self._layout.block_tokens
            state.saved = own if stored is None else min(own, stored)

    def loaded(self, prompt: Prompt, stop: int) -> None:
        """The blocks before `stop` are loaded, so they need no save."""
        prompt.save.saved = max(stop, prompt.save.saved or 0)

    def load_failed(self, load: StepLoad) -> None:
        """This load left pages unfilled: save its blocks once they are computed."""
        load.prompt.save.save_again(load.first)
        load.prompt.save.unfilled = True

    def filled(
        self, prompt: Prompt, tokens: int, scheduled: Any, keys_of: Callable[[], Keys],
        most: int, number: Callable[[], int],
    ) -> list[Save]:  # fmt: skip
        """Up to three saves of the blocks that this many tokens fill, of at most `most` blocks and within the
        bytes that may wait: first the blocks that a window leaves behind with this step, then those that it
        still contains, then all others."""
        request, state, block = prompt.request, prompt.save, self._layout.block_tokens
        before = request.num_computed_tokens
        assert state.saved is not None
        end = min(before + tokens, savable_tokens(prompt.request, self._options)) // block
        if end <= state.saved or state.tries >= TRIES:
            return []
        keys, first = keys_of(), state.saved
        states = self.whole_states(scheduled).get(request.request_id)
        room = self.room
        last = min(end, len(keys), first + min(room, most, LIMIT_BLOCKS))
        ids, whole = None, keys
        if last > first or states:
            # As late as possible: the engine lists all pages of the request.
            ids = scheduled.kv_connector_block_state.get_block_ids(request.request_id)
            if ids is None:
                return []
            whole = keys[: self.unverified.verified_until(ids, first, end)]
            last = min(last, len(whole))
        last = max(last, first)
        self._count_left_behind(last, end, before, before + tokens)
        if ids is None or (last == first and not states):
            return []
        end = state.saved = last
        behind: list[WriteOrder] = []
        inside: list[WriteOrder] = []
        others: list[WriteOrder] = []
        for index, group in enumerate(self._layout.groups):
            if group.kind == "window":
                left = min(max(first, group.left_behind(before + tokens, block)), end)
                behind += self._writes(index, ids, keys, first, left)
                inside += self._writes(index, ids, keys, left, end)
            elif group.kind == "full":
                others += self._writes(index, ids, keys, first, end)
        # The engine reports each state once; blocks without room now follow with later steps.
        others += self._states(prompt, first, whole, ids, scheduled)
        found = []
        for writes in (behind, inside, others):
            if writes:
                nbytes = sum(len(w.keys) // KEY_BYTES * self._group_bytes[w.group] for w in writes)
                save = StepSave(
                    prompt, first, end, state.holes,
                    pages={page for write in writes for page in write.block_ids},
                    nbytes=nbytes, ranks=self._layout.shards.ranks,
                    windows=writes is not others, behind=writes is behind, tokens=before + tokens,
                )  # fmt: skip
                found.append(self.begin(number(), save, writes))
        return found

    def _count_left_behind(self, saved: int, filled: int, before: int, after: int) -> None:
        """Count blocks that windows leave behind unsaved with the step from token `before` to `after`."""
        block = self._layout.block_tokens
        for group in self._layout.groups if self._windows else ():
            first = max(saved, group.left_behind(before, block))
            left = min(filled, group.left_behind(after, block)) - first
            if left > 0:
                self._counts["drop:overwritten"] += left

    def in_order(self, saves: Iterable[Save]) -> list[Save]:
        """Put the saves of windows before all others."""
        found = list(saves)
        if self._windows:
            found.sort(key=lambda save: not self._pending[save.number].windows)
        return found

    def _writes(
        self, index: int, ids: Sequence[Sequence[int]], keys: Keys, start: int, stop: int
    ) -> Iterator[WriteOrder]:
        group = self._layout.groups[index]
        mine = ids[group.group_id]
        for run, run_end in runs(group, mine, start, stop):
            for first in range(run, run_end, LIMIT_RESERVED):
                end = min(run_end, first + LIMIT_RESERVED)
                part = keys[first:end]
                pages = list(mine[first * group.parts : end * group.parts])
                yield WriteOrder(index, pages, part.packed, part.parent)

    def _states(
        self, prompt: Prompt, first: int, keys: Keys, ids: Sequence[Sequence[int]], scheduled: Any
    ) -> list[WriteOrder]:
        """Writes of the states that are whole when this step ends: the engine continues in another page. A
        page that the request no longer holds may belong to another request."""
        found = []
        for group_id, page, tokens in self.whole_states(scheduled).get(
            prompt.request.request_id, ()
        ):
            block, rest = divmod(tokens, self._layout.block_tokens)
            if rest or not first < block <= len(keys) or group_id not in self._states_of:
                continue
            if page and ids[group_id][block - 1] == page:
                key = keys[block - 1 : block]
                found.append(WriteOrder(self._states_of[group_id], [page], key.packed, key.parent))
            elif page:
                self._counts["drop:overwritten"] += 1
        return found

    def begin(self, number: int, save: StepSave, writes: list[WriteOrder]) -> Save:
        """These writes are the save of this number, until all ranks have reported it."""
        self._pending[number] = save
        shared = self._saves_of.keys() & save.pages
        others = [(page, (*self._saves_of[page], number)) for page in shared]
        self._saves_of |= dict.fromkeys(save.pages, (number,))
        self._saves_of.update(others)
        self._nbytes += save.nbytes
        return Save(number, writes, save.prompt.options.ttl_s)

    def prompt_of(self, save: int) -> Prompt:
        return self._pending[save].prompt

    def reported(self, report: RankReport) -> list[int]:
        """Process the ranks' report; return the saves that all ranks have reported. Blocks after a hole
        cannot be found, so a hole is saved again while the request has its blocks; if that fails, no later
        block of the request is saved."""
        for number, hole in report.holes.items():
            self._add_hole(self._pending[number], hole)
        return [number for number, ranks in report.saves.items() if self._ended(number, ranks)]

    def _add_hole(self, save: StepSave, hole: Hole) -> None:
        state = save.prompt.save
        if save.windows and hole.drops["drop:overwritten"] and self._left_behind(save):
            # The request continues without these pages, as does a hit that ends at a later block.
            self._counts.update(hole.drops)
            return
        if not hole.again:
            state.tries = TRIES
        elif save.holes == state.holes and not hole.growing:
            # Saves that began together and were cancelled together count as one try. A hole after the last
            # one is a new hole: a window leaves pages behind at every step.
            state.holes += 1
            state.tries = 1 if save.first > state.hole else state.tries + 1
            state.hole = save.first
        state.save_again(save.first)
        if state.tries >= TRIES or state.finished:
            self._counts.update(hole.drops)
            state.dropped = max(state.dropped, save.stop)

    def _left_behind(self, save: StepSave) -> bool:
        """Whether the request and its windows have advanced. Otherwise it was preempted, or the saves of its
        step were cancelled, and it has these pages or will have them again."""
        block, computed = self._layout.block_tokens, save.prompt.request.num_computed_tokens
        return computed // block >= save.stop and (
            save.behind
            or any(
                group.left_behind(computed, block) > group.left_behind(save.tokens, block)
                for group in self._layout.groups
            )
        )

    def _ended(self, number: int, ranks: int) -> bool:
        save = self._pending[number]
        save.ranks -= ranks
        if save.ranks:
            return False
        del self._pending[number]
        self._nbytes -= save.nbytes
        for page in save.pages:
            saves = self._saves_of.pop(page)
            if len(saves) > 1:
                self._saves_of[page] = tuple(one for one in saves if one != number)
        return True

    def finished(self, prompt: Prompt) -> None:
        """The request has ended: count its blocks that were not saved."""
        state = prompt.save
        state.finished = True
        if not prompt.may_save or state.saved is None or state.unfilled:
            return
        whole = (
            min(prompt.request.num_computed_tokens, savable_tokens(prompt.request, self._options))
            // self._layout.block_tokens
        )
        first = max(state.saved, state.dropped)
        if whole > first:
            why = "no_time" if prompt.session is not None else "no_daemon"
            why = "after_hole" if state.tries >= TRIES else why
            self._counts[f"drop:{why}"] += whole - first

    @property
    def room(self) -> int:
        """How many more blocks may wait to be copied."""
        return (self._most_bytes - self._nbytes) // self._block_bytes

    @property
    def in_flight(self) -> dict[str, int]:
        return {"saves": len(self._pending), "pages": len(self._saves_of), "bytes": self._nbytes}


class LazySaves:
    """Saves blocks only when the engine is about to drop them: those in the first `look` pages that it would
    give to another request. Blocks that no request uses any longer, so their content is final. If a page is
    given away before its copy has ended, the step names the save (`Step.overwritten`), and the block is lost.
    """

    def __init__(
        self, layout: Layout, saves: Saves, blocks: EngineBlocks,
        next_pages: Callable[[int], Iterable[int]], look: int,
    ) -> None:  # fmt: skip
        self._layout = layout
        self._saves = saves
        self._blocks = blocks
        self._next_pages = next_pages
        self._look = look
        self._begun: set[Block] = set()  # of the pages that were next at the last call
        request = SimpleNamespace(lora_request=None, num_computed_tokens=0)
        self._prompt = Prompt(request, b"", False, True)
        self._prompt.save.finished = True  # nothing is tried again

    def takes(self, prompt: Prompt) -> bool:
        """Whether the blocks of this prompt are saved late."""
        return prompt.options.ttl_s is None and not prompt.options.has_pin_requests

    def take(self, number: Callable[[], int]) -> list[Save]:
        """The save of the blocks that the engine is about to drop, within the bytes that may wait."""
        found = self._blocks.copies_in(self._next_pages(self._look))
        begun, self._begun = self._begun, {copy.block for copy in found}
        new = dict.fromkeys(
            copy.block for copy in found if copy.savable and copy.block not in begun
        )
        by_block = {copy.block: copy for copy in found}
        room = min(self._saves.room, LIMIT_BLOCKS)
        chosen = [by_block[block] for block in new][: max(0, room)]
        self._begun.difference_update(list(new)[max(0, room) :])
        if not chosen:
            return []
        writes: list[WriteOrder] = []
        nbytes, last = 0, (-1, b"")
        for copy in reversed(chosen):  # the tail of a request is dropped first
            group, key = copy.block
            if last != (group, copy.parent):
                writes.append(WriteOrder(group, [], b"", copy.parent))
            writes[-1].block_ids += copy.pages
            writes[-1].keys += key
            nbytes += self._layout.groups[group].block_bytes
            last = copy.block
        save = StepSave(
            self._prompt, 0, 0, 0, pages={page for write in writes for page in write.block_ids},
            nbytes=nbytes, ranks=self._layout.shards.ranks, windows=False, behind=False, tokens=0,
        )  # fmt: skip
        return [self._saves.begin(number(), save, writes)]

    def forget(self) -> None:
        """The content of some pages is not what the engine meant: save none of the known blocks."""
        self._blocks.forget_savable()


def fresh_pages(layout: Layout, scheduled: Any, loaded: set[int]) -> set[int]:
    """The pages that this step gives to another request; `loaded`: those that it loads into."""
    pages, parts = set(loaded), {group.group_id: group.parts for group in layout.groups}

    def add(groups: Sequence[Sequence[int]], computed: int) -> None:
        # Groups that kvtier does not keep take pages from the same pool.
        for group_id, ids in enumerate(groups):
            pages.update(ids[computed * parts.get(group_id, 0) // layout.block_tokens :])

    for new in scheduled.scheduled_new_reqs:
        add(new.block_ids, new.num_computed_tokens)
    cached = scheduled.scheduled_cached_reqs
    for at, request_id in enumerate(cached.req_ids):
        if cached.new_block_ids[at]:
            resumed = request_id in cached.resumed_req_ids
            first = cached.num_computed_tokens[at] if resumed else 0
            add(cached.new_block_ids[at], first)
    return pages


def savable_tokens(request: Any, options: Options) -> int:
    """How many leading tokens of a request may be saved."""
    tokens: int = request.num_tokens if options.save_decode else request.num_prompt_tokens
    return tokens


def runs(group: Cached, ids: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The ranges of consecutive blocks that have all their pages."""
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
