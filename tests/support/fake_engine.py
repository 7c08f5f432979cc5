"""A fake engine: it schedules and pages as vLLM does, computes nothing, and knows the content that every page
must have. Both sides of the plugin run in it, with a real daemon."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvtier import Group, KvSpec
from kvtier_vllm.events import no_extra_keys
from kvtier_vllm.layout import Cached, Layout, Page, Pages, Shards
from kvtier_vllm.messages import Step, WriteOrder
from kvtier_vllm.options import Options
from kvtier_vllm.scheduler import SchedulerSide
from kvtier_vllm.worker import WorkerSide

BLOCK = 16
LAYERS = 2
PAGE_BYTES = 4096
STEP_S = 0.002


def layout_of(
    windows: Sequence[int] = (0,), ranks: int = 1, replicas: int = 1, parts: Sequence[int] = ()
) -> Layout:
    """Return a layout with a group for each of `windows` (0: full attention); `parts`, if blocks differ."""
    groups = tuple(
        Cached(
            number, "window" if window else "full", window,
            tuple((f"{number}.{layer}", PAGE_BYTES) for layer in range(LAYERS)),
            parts[number] if parts else 1,
        )
        for number, window in enumerate(windows)
    )  # fmt: skip
    return Layout(BLOCK, BLOCK, groups, Shards(ranks, replicas))


def in_stages(layout: Layout) -> Layout:
    """Return this layout of two ranks as that of two pipeline stages."""
    return replace(layout, shards=replace(layout.shards, stages=2))


def smaller_stage(layout: Layout, pages: Pages) -> tuple[Layout, Pages]:
    """Return those of a pipeline stage that has only the first layer of each group."""
    groups = tuple(replace(group, pages=group.pages[:1]) for group in layout.groups)
    fewer = tuple(group[:1] for group in pages.groups)
    return replace(layout, groups=groups), replace(pages, groups=fewer)


def spec_for(layout: Layout) -> KvSpec:
    groups = [
        Group(kind=group.kind, layers=LAYERS, window_tokens=group.window_tokens,
              opaque_bytes=group.block_bytes, shards=layout.shards.count)
        for group in layout.groups
    ]  # fmt: skip
    return KvSpec.groups(groups, model="fake", dtype="uint8", block_tokens=BLOCK, weights="rev:1")


@dataclass(eq=False)
class FakeRequest:
    request_id: str
    tokens: list[int]
    num_computed_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: Any = None
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    cached: int = 0
    failed: bool = False
    loading: bool = False
    between: bool = False
    aborted: bool = False
    steps_asked: int = 0
    sources: tuple[int, int] = (0, 0)  # loaded blocks, from memory and from disk
    pages: list[list[int]] = field(default_factory=list)
    prompt_tokens: int = 0  # the other tokens are its answer
    resident: int = 0  # tokens in the engine's own prefix cache

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt_tokens or len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        text, hashes = b"", []
        for at in range(0, self.num_tokens // BLOCK * BLOCK, BLOCK):
            text = hashlib.sha256(text + repr(self.tokens[at : at + BLOCK]).encode()).digest()
            hashes.append(text)
        return hashes

    @property
    def done(self) -> bool:
        return self.num_computed_tokens >= self.num_tokens


class FakeEngine:
    """The pages of every rank, and requests that are computed step by step."""

    def __init__(
        self, socket: str, layout: Layout | None = None, pages: int = 64, **options: Any
    ) -> None:
        self.layout = layout or layout_of()
        events = no_extra_keys if options.pop("events", False) else None
        loads = options.pop("loads", True)  # False: the role of a producer
        self.by_layers = options.pop("by_layers", False)  # each layer waits for its loads
        self.options = Options(socket=socket, **options)
        shape = (len(self.layout.groups), LAYERS, pages, PAGE_BYTES)
        self.memory = [np.zeros(shape, np.uint8) for _ in range(self.layout.shards.ranks)]
        self.scheduler = SchedulerSide(self.layout, self.options, events=events, loads=loads)
        self.workers = [self.worker(rank, self._pages(pages)) for rank in range(len(self.memory))]
        self.scheduler.open(spec_for(self.layout))
        self.free = list(range(1, pages))
        self.waiting: list[FakeRequest] = []
        self.loading: dict[str, FakeRequest] = {}
        self.received: dict[str, int] = {}
        self.fresh: list[int] = []  # pages that were given to a request since the last step
        self.numbers = 0
        self.writes: list[WriteOrder] = []
        self.bad_pages: set[int] = set()
        self.whole_states: dict[str, list[tuple[int, int, int]]] = {}  # for the next step

    def worker(self, rank: int, pages: Pages) -> WorkerSide:
        memory = [self.memory[rank].reshape(-1)]
        return WorkerSide(self.layout, self.options, rank, pages, memory)

    def _pages(self, pages: int) -> Pages:
        groups = range(len(self.layout.groups))
        stride = pages * PAGE_BYTES
        return Pages(
            tuple(
                tuple(
                    Page(0, (group * LAYERS + layer) * stride, PAGE_BYTES, PAGE_BYTES)
                    for layer in range(LAYERS)
                )
                for group in groups
            ),
            "fake",
        )

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    def add(self, tokens: Sequence[int], **changes: Any) -> FakeRequest:
        self.numbers += 1
        request = FakeRequest(f"r{self.numbers}", list(tokens), **changes)
        self.scheduler.queued(request)
        self.waiting.append(request)
        return request

    def content(self, rank: int, group: int, layer: int, request: FakeRequest, at: int) -> bytes:
        """Return the correct content of page `at` of a request on this rank."""
        shard, (block, part) = self.layout.shards.of(rank), divmod(at, self.parts(group))
        seed = request.block_hashes[block] + bytes([shard, group, layer, part])
        return hashlib.sha256(seed).digest() * (PAGE_BYTES // 32)

    def compute(self, request: FakeRequest, start: int, stop: int) -> None:
        for rank, group, layer in np.ndindex(len(self.memory), len(self.layout.groups), LAYERS):
            parts = self.parts(group)
            for at in range(start // BLOCK * parts, stop // BLOCK * parts):
                if page := request.pages[group][at]:
                    data = np.frombuffer(self.content(rank, group, layer, request, at), np.uint8)
                    self.memory[rank][group, layer, page] = data

    def parts(self, group: int) -> int:
        return self.layout.groups[group].parts

    def wrong_pages(self, request: FakeRequest) -> list[tuple[int, int, int, int]]:
        """Return the (rank, group, layer, page) of every page with wrong content."""
        blocks = request.num_computed_tokens // BLOCK
        return [
            (rank, group, layer, at)
            for rank, group, layer in np.ndindex(len(self.memory), len(self.layout.groups), LAYERS)
            for at in range(blocks * self.parts(group))
            if (page := request.pages[group][at])
            and bytes(self.memory[rank][group, layer, page])
            != self.content(rank, group, layer, request, at)
        ]

    def allocate(self, request: FakeRequest, computed: int, tokens: int) -> None:
        """Allocate pages for `tokens` tokens, except for blocks that a window or a state no longer needs."""
        request.pages = []
        for group in self.layout.groups:
            skipped, size = 0, BLOCK // group.parts
            if group.kind != "full":
                window = group.window_tokens if group.kind == "window" else 1
                skipped = max(0, computed - window) // size
            count = -(-tokens // size) - skipped
            pages, self.free = self.free[:count], self.free[count:]
            assert len(pages) == count, "the fake engine is out of pages"
            request.pages.append([0] * skipped + pages)
            self.fresh += pages

    def step(self) -> None:
        """Run one step of the engine: schedule, execute, process the reports."""
        running: dict[str, int] = {}
        new, now = [], []
        for request in list(self.waiting):
            own = request.resident
            count, between = self.scheduler.matched(request, own)
            request.steps_asked += 1
            if count is None:
                continue
            self.waiting.remove(request)
            request.cached = own + count
            self.allocate(request, own + count, own + count if between else request.num_tokens)
            self.compute(request, 0, own)
            self.scheduler.allocated(request, request.pages, count)
            request.between = between
            request.sources = self.scheduler.hit_of(request.request_id)
            if between:
                request.loading = True
                self.loading[request.request_id] = request
                continue
            request.num_computed_tokens = own + count
            now.append(request)
        for request in [r for r in self.loading.values() if not r.loading]:
            del self.loading[request.request_id]
            if request.aborted:
                continue
            if request.failed:
                request.num_computed_tokens = 0
            self.extend(request)
            self.scheduler.allocated(request, request.pages, 0)
            now.append(request)
        for request in now:
            running[request.request_id] = request.num_tokens - request.num_computed_tokens
            ids = tuple(request.pages)
            new.append(
                SimpleNamespace(
                    req_id=request.request_id, block_ids=ids,
                    num_computed_tokens=request.num_computed_tokens,
                )
            )  # fmt: skip
        self.carry_out({request.request_id: request for request in now}, running, new)

    def touch_pages(self, step: Step) -> None:
        """What the engine does to pages before it hands the step to the connector."""
        self.fresh.clear()

    def extend(self, request: FakeRequest) -> None:
        for group, pages in zip(self.layout.groups, request.pages, strict=True):
            count = -(-request.num_tokens * group.parts // BLOCK) - len(pages)
            pages += self.free[:count]
            self.fresh += self.free[:count]
            self.free = self.free[count:]

    def carry_out(
        self, requests: dict[str, FakeRequest], tokens: dict[str, int], new: list[Any]
    ) -> None:
        named, self.whole_states = self.whole_states, {}
        scheduled = SimpleNamespace(
            num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], resumed_req_ids=set()
            ),
            has_sync_kv_loads=any(
                request.cached and not request.between for request in requests.values()
            ),
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: tuple(requests[name].pages), boundary_state_offloads=named
            ),
        )  # fmt: skip
        step = self.scheduler.step(scheduled)
        self.writes += [write for save in step.saves for write in save.writes]
        failed: set[str] = set()
        self.touch_pages(step)
        for worker in self.workers:
            worker.begin(step)
            worker.loads.start(step.loads, self.by_layers)
        for name, count in tokens.items():
            request = requests[name]
            start = request.num_computed_tokens
            request.num_computed_tokens += count
            self.compute(request, start, request.num_computed_tokens)
        reports = []
        for worker in self.workers:
            worker.start_saves(step.saves)
            self.bad_pages |= worker.loads.bad_blocks()
            received, bad = worker.loads.received()
            failed |= bad
            for name in received:
                self.received[name] = self.received.get(name, 0) + 1
            reports.append(worker.report())
        for name in [n for n, ranks in self.received.items() if ranks == len(self.workers)]:
            del self.received[name]
            request = self.loading[name]
            request.loading = False
            request.num_computed_tokens = request.cached
            request.failed = name in failed
        report = reports[0]
        for other in reports[1:]:
            report = report.add(other)
        self.scheduler.reported(report, failed)
        time.sleep(STEP_S)

    def run(self, request: FakeRequest, seconds: float = 60.0) -> FakeRequest:
        """Step until the request has been computed."""
        self.until(lambda: request.done, seconds)
        return request

    def until(self, holds: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"still not so after {seconds} s"
            self.step()

    def finish(self, request: FakeRequest) -> None:
        """End or cancel a request and free its pages, in the order of its tokens."""
        request.aborted = not request.done
        if request in self.waiting:
            self.waiting.remove(request)
        self.scheduler.finished(request)
        self.free = [page for pages in request.pages for page in pages if page] + self.free

    def serve(self, tokens: Sequence[int], **changes: Any) -> FakeRequest:
        """Serve a request from its queueing until its saves have ended."""
        request = self.run(self.add(tokens, **changes))
        self.until(lambda: not self.scheduler.in_flight["saves"])
        assert not self.wrong_pages(request), self.wrong_pages(request)
        self.finish(request)
        return request

    def settle(self) -> None:
        """Step until the plugin holds no block."""
        self.until(lambda: not any(self.scheduler.in_flight.values()))
