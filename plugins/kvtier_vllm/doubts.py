"""Pages that a load within a step fills, and those that are computed from them, until it is known to be good.

An engine computes from such pages before it knows. It keeps those of a load that failed in its own cache
while it computes them once more, which may take several steps: another request that finds them there computes
from nothing. And what another connector loads, no rank of ours hears of. So a doubtful page is not saved, nor
what follows it, and one that was not filled is doubtful until a step computes it anew. No vLLM here.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any

from kvtier_vllm.layout import Layout
from kvtier_vllm.prompt import Prompt

BAD = 1 << 62  # later than any step: no report makes this page good


class Doubts:
    """Those of one engine. With several groups there are none: a load within a step that fails ends it."""

    def __init__(self, layout: Layout) -> None:
        self._group = layout.groups[0]
        self._page_tokens = layout.block_tokens // self._group.parts
        # page -> the step whose report tells. Negative where the load is ours: the ranks call off what that
        # step was to save themselves, so nothing waits for the report.
        self._of: dict[int, int] = {}
        self._loaded: set[int] = set()  # those of them that were loaded, and nothing computed into
        # Those that were computed anew in part: by whom, and as far as which token.
        self._in_part: dict[int, tuple[str, int]] = {}
        self._pending = False  # whether a report is to tell of some
        self._holders: set[str] = set()  # requests that had such pages when they were last served

    def __len__(self) -> int:
        return len(self._of)

    def begun(
        self, step: int, scheduled: Any, prompts: Mapping[str, Prompt], ours: Container[str],
        fresh: Iterable[int],
    ) -> None:  # fmt: skip
        """A step begins, within which we load for the requests that are `ours`, and others may for more.
        `fresh`: the pages that loads of ours go to, between steps too."""
        if not (self._of or scheduled.has_sync_kv_loads):
            return
        cached = scheduled.scheduled_cached_reqs
        first = {new.req_id for new in scheduled.scheduled_new_reqs} | set(cached.resumed_req_ids)
        self._forget(fresh)
        for request_id, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if groups and request_id not in first:
                self._forget(groups[0])
        # Who had sure pages alone when it was last served has none of those that this step loads into.
        self._holders &= prompts.keys() if self._of else set()
        # In the engine's order: a request may share pages that one before it fills in the same step.
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
                self._given(prompt, pages, mark if scheduled.has_sync_kv_loads else 0)
            self._computed(prompt.request, pages, tokens)
            if self._of.keys().isdisjoint(pages):
                self._holders.discard(request_id)
            else:
                self._holders.add(request_id)

    def _given(self, prompt: Prompt, pages: Sequence[int], mark: int) -> None:
        """A request is served that was not: of what was loaded for it this step's report tells, or with 0
        it is good already. What the engine had itself is as it was."""
        size, before = self._page_tokens, prompt.request.num_computed_tokens
        if before <= prompt.computed:
            return
        loaded = pages[prompt.computed // size : -(-before // size)]
        if mark:
            self._doubt(loaded, mark)
            self._loaded.update(loaded)
        elif prompt.request.request_id not in self._holders:  # else they may be what it had already
            self._forget(loaded)

    def _computed(self, request: Any, pages: Sequence[int], tokens: int) -> None:
        """So many tokens more: as good as the worst page before them."""
        size, before = self._page_tokens, request.num_computed_tokens
        stop, held = before + tokens, set(pages[: -(-before // size)])
        if before % size and self._in_part:
            who, last = self._in_part.get(pages[before // size], ("", 0))
            if who == request.request_id and before <= last:
                held.remove(pages[before // size])
        worst = max((self._of[page] for page in self._of.keys() & held), default=0)
        if not self._has_all(pages, before, stop):
            worst = BAD
        if worst:
            self._doubt(pages[before // size : -(-stop // size)], worst)
            return
        self._forget(pages[before // size : stop // size])
        if stop % size and pages[stop // size] in self._of:
            # Who shares this page takes it for a whole one.
            self._in_part[pages[stop // size]] = request.request_id, stop

    def _has_all(self, pages: Sequence[int], before: int, stop: int) -> bool:
        """Whether these tokens have what they are computed from. Where a load has failed, the engine goes on
        at its first page, and has none before it that a window, or a state, had left behind."""
        size = self._page_tokens
        if self._group.kind == "window":
            first = max(0, before - self._group.window_tokens)
            return all(pages[first // size : -(-stop // size)])
        return self._group.kind == "full" or before == 0 or bool(pages[(before - 1) // size])

    def _doubt(self, pages: Iterable[int], mark: int) -> None:
        self._of |= dict.fromkeys(pages, mark)
        self._of.pop(0, None)  # no page: what a window has left behind
        self._pending = self._pending or mark != BAD
        self._loaded.difference_update(pages)
        for page in self._in_part.keys() & pages if self._in_part else ():
            del self._in_part[page]

    def _forget(self, pages: Iterable[int]) -> None:
        """These are filled anew."""
        for page in pages:
            self._of.pop(page, None)

    def reported(self, step: int, invalid: Collection[int]) -> None:
        """This step is over, and these pages were not filled."""
        if not self._of.keys().isdisjoint(invalid):
            # What was computed since may be from them. What else was loaded is as good as its own step tells.
            good = self._loaded.difference(invalid)
            self._of = {page: of if page in good else BAD for page, of in self._of.items()}
        elif not self._pending:
            return
        self._of = {page: of for page, of in self._of.items() if abs(of) > step}
        self._pending = any(of != BAD for of in self._of.values())
        self._loaded &= self._of.keys()
        if not self._of:
            self._in_part.clear()

    def sure(self, groups: Sequence[Sequence[int]], start: int, stop: int) -> int:
        """How far from block `start` on a request's pages may be saved: `stop` at most."""
        parts = self._group.parts
        if self._of and len(groups) == 1:
            for at, page in enumerate(groups[0][start * parts : stop * parts]):
                if self._of.get(page, 0) > 0:
                    return start + at // parts
        return stop
