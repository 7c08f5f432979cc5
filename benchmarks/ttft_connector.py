"""The connector under the clock: kvtier's, with each call's time written down, and how a request is loaded
chosen by the request itself: {"bench": {"load": "sync" or "async", "floor": true}} in its kv_transfer_params.

`floor`: blocks that were never saved, copied from memory of the worker's own: no daemon, no lease, no slots.
What a perfect connector of this interface costs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvtier.wire import SLOT
from kvtier_kernels import Mapping, Pieces, scatter
from kvtier_vllm.connector import KvtierConnector
from kvtier_vllm.messages import LoadOrder, ReadOrder
from ttft_journal import Journal

FLOOR = b"floor"


class FloorReader:
    """Reads slots that never move, of one run that never ends."""

    extents = 1
    daemon_run = FLOOR

    def __init__(self, nbytes: int) -> None:
        memory = os.memfd_create("floor")
        os.posix_fallocate(memory, 0, nbytes)
        self._mapping = Mapping(memory, nbytes, True)
        self._mapping.populate()
        os.close(memory)

    def scatter(
        self,
        slots: bytes,
        pieces: Pieces,
        block_ids: Sequence[int],
        threads: int = 1,
        nice: int = 0,
        parts: int = 1,
    ) -> int:
        scatter(pieces, block_ids, [self._mapping], slots, threads, nice=nice)
        return len(block_ids)


class BenchConnector(KvtierConnector):
    """See above."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._journal = Journal(Path(os.environ["KVTIER_BENCH_RECORDS"]))
        self._floor_blocks = int(os.environ["KVTIER_BENCH_FLOOR_BLOCKS"])
        self._floors = 0
        self._default = self._scheduler._loads.options if self._scheduler is not None else None

    # --- the scheduler's side

    def _wish(self, request: Any) -> dict[str, Any]:
        wish: dict[str, Any] = (request.kv_transfer_params or {}).get("bench", {})
        return wish

    def _choose(self, request: Any) -> dict[str, Any]:
        wish = self._wish(request)
        if self._scheduler is not None and self._default is not None:
            load = wish.get("load", self._default.load)
            self._scheduler._loads.options = msgspec.structs.replace(self._default, load=load)
        return wish

    def on_new_request(self, request: Any) -> None:
        self._journal.timed("queued", lambda: super(BenchConnector, self).on_new_request(request))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        wish = self._choose(request)
        if wish.get("floor"):
            block = self._layout.block_tokens
            blocks = min((request.num_tokens - 1) // block, self._floor_blocks)
            tokens = blocks * block - num_computed_tokens
            return (tokens, wish["load"] == "async") if tokens > 0 else (0, False)
        began = time.perf_counter()
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._journal.write(
            "matched", 0 if answer[0] is None else answer[0] + 1, began, time.perf_counter()
        )
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        wish = self._choose(request)
        if wish.get("floor") and num_external_tokens:
            # Adds a load that the scheduler's side knows nothing of: its end is dropped below.
            ids = blocks.get_block_ids()[0]
            stop = min((request.num_tokens - 1) // self._layout.block_tokens, self._floor_blocks)
            count = num_external_tokens // self._layout.block_tokens
            nbytes = self._layout.block_bytes
            slots = b"".join(SLOT.pack(0, 0, at * nbytes, 0) for at in range(stop - count, stop))
            self._floors += 1
            load = LoadOrder(
                -self._floors, request.request_id, FLOOR, wish["load"] == "sync",
                [[ReadOrder(0, list(ids[stop - count : stop]), slots)]],
            )  # fmt: skip
            self._scheduler._loads.begun.append(load)
            return
        self._journal.timed(
            "allocated",
            lambda: super(BenchConnector, self).update_state_after_alloc(
                request, blocks, num_external_tokens
            ),
        )

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        began = time.perf_counter()
        meta = super().build_connector_meta(scheduler_output)
        saves = len(meta.step.saves) if meta.step is not None else 0
        self._journal.write("build", saves, began, time.perf_counter())
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        report = meta.report
        for number in [number for number in report.loads if number < 0]:
            del report.loads[number]
        report.loaded = [copied for copied in report.loaded if copied.number >= 0]
        self._journal.timed(
            "output", lambda: super(BenchConnector, self).update_connector_output(connector_output)
        )

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return self._journal.timed(
            "finished",
            lambda: super(BenchConnector, self).request_finished_all_groups(request, block_ids),
        )

    # --- a worker's side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        loads = self._worker.loads
        if self._floor_blocks:
            nbytes = self._floor_blocks * self._layout.block_bytes
            self._floor = FloorReader(nbytes)
        plain = loads._load

        def load(one: LoadOrder) -> bool:
            if one.daemon_run == FLOOR:
                self._worker.mappings.readers[FLOOR] = self._floor
            good = self._journal.timed("copy", lambda: plain(one), int(one.now))
            self._worker.mappings.readers.pop(FLOOR, None)
            return bool(good)

        loads._load = load
        saves = self._worker.saves
        save = saves._save
        saves._save = lambda copy: self._journal.timed("save", lambda: save(copy))

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._journal.timed(
            "begin",
            lambda: super(BenchConnector, self).handle_preemptions(kv_connector_metadata),
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._step()
        self._journal.timed(
            "start_load",
            lambda: super(BenchConnector, self).start_load_kv(forward_context, **kwargs),
            len(step.loads) if step is not None else 0,
        )

    def wait_for_save(self) -> None:
        step = self._step()
        self._journal.timed(
            "saved",
            lambda: super(BenchConnector, self).wait_for_save(),
            len(step.saves) if step is not None else 0,
        )

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return self._journal.timed(
            "results",
            lambda: super(BenchConnector, self).get_transfer_results(finished_req_ids),
        )

    def build_connector_worker_meta(self) -> Any:
        return self._journal.timed(
            "report", lambda: super(BenchConnector, self).build_connector_worker_meta()
        )
