"""Pages that a load within a step fills, and those that are computed from them, until it is known to be good.

An engine computes from such pages before it knows. It keeps those of a load that failed in its own cache
while it computes them once more, which may take several steps: another request that finds them there computes
from nothing. And what another connector loads, no rank of ours hears of. So a doubtful page is not saved, nor
what follows it, and one that was not filled is doubtful until a step computes it anew. No vLLM here.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any

from kvtier_vllm.layout import Layout
from kvtier_vllm.prompt import Prompt

BAD = 1 << 62  # later than any step: no report makes this page good


class Doubts:
    """Those of one engine. With several groups there are none: a load within a step that fails ends it."""

    def __init__(self, layout: Layout) -> None:
        self._parts = layout.groups[0].parts
        self._page_tokens = layout.block_tokens // self._parts
        # page -> the step whose report tells. Negative where the load is ours: the ranks call off what that
        # step was to save themselves, so nothing waits for the report.
        self._of: dict[int, int] = {}
        self._holders: set[str] = set()  # requests that had such pages when they were last served

    def __len__(self) -> int:
        return len(self._of)

    def begun(
        self, step: int, scheduled: Any, prompts: Mapping[str, Prompt], ours: Container[str],
        fresh: Collection[int],
    ) -> None:  # fmt: skip
        """A step begins, within which we load for the requests that are `ours`, and others may for more.
        `fresh`: the pages that loads of ours go to, between steps too."""
        if not (self._of or scheduled.has_sync_kv_loads):
            return
        cached = scheduled.scheduled_cached_reqs
        first = {new.req_id for new in scheduled.scheduled_new_reqs} | set(cached.resumed_req_ids)
        for page in fresh:
            self._of.pop(page, None)
        for request_id, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if groups and request_id not in first:
                for page in groups[0]:
                    self._of.pop(page, None)
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
            before = prompt.request.num_computed_tokens
            if scheduled.has_sync_kv_loads and request_id in first and before > prompt.computed:
                mark = -step if request_id in ours else step
                self._mark(pages, prompt.computed, before, mark)
            held = pages[: -(-before // self._page_tokens)]
            worst = max((self._of[page] for page in self._of.keys() & held), default=0)
            self._mark(pages, before, before + tokens, worst)
            if self._of.keys().isdisjoint(pages):
                self._holders.discard(request_id)
            else:
                self._holders.add(request_id)

    def _mark(self, pages: Sequence[int], start: int, stop: int, mark: int) -> None:
        """The pages of tokens [start, stop) are doubtful, or with 0 are not."""
        some = pages[start // self._page_tokens : -(-stop // self._page_tokens)]
        if mark:
            self._of |= dict.fromkeys(some, mark)
        else:
            for page in some:
                self._of.pop(page, None)

    def reported(self, step: int, invalid: Container[int]) -> None:
        """This step is over, and these pages were not filled."""
        if not self._of:
            return
        if any(page in invalid for page in self._of):
            # What the steps that have begun since compute from them is no better.
            self._of = dict.fromkeys(self._of, BAD)
        else:
            self._of = {page: of for page, of in self._of.items() if abs(of) > step}

    def sure(self, groups: Sequence[Sequence[int]], start: int, stop: int) -> int:
        """How far from block `start` on a request's pages may be saved: `stop` at most."""
        if self._of and len(groups) == 1:
            for at, page in enumerate(groups[0][start * self._parts : stop * self._parts]):
                if self._of.get(page, 0) > 0:
                    return start + at // self._parts
        return stop
