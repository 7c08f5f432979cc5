"""The connector under test, which records the content of every page when it is saved and after it was
loaded.

It reads pages from the tensors as the engine sees them, not from the plugin's addresses. A file named
`break` in the folder of the records makes a load fail: `swap`, `zero`, `stale`, or `stale 1` in shard 1
only; a file named `order` contains the page order that is sent to the daemon."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from kvtier import Client, KvSpec
from kvtier.connection import Connection
from kvtier.key import KEY_BYTES
from kvtier.wire import SLOT, SLOT_BYTES
from kvtier_vllm.connector import KvtierConnector
from kvtier_vllm.daemon import Reconnect
from kvtier_vllm.forecast import Forecast
from kvtier_vllm.layout import ORDER_MARK

FOLDER = Path(os.environ["KVTIER_TEST_RECORDS"])


def record(**fields: Any) -> None:
    with (FOLDER / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(fields) + "\n")


def name_of(load: Any) -> str:
    """A name that is unique among all loads of all engines: a preempted request is loaded again."""
    return f"{load.request_id} {load.number}"


def broken() -> str:
    """How a load is to fail now, or an empty string."""
    try:
        return (FOLDER / "break").read_text()
    except FileNotFoundError:
        return ""


def swap(read: Any, others: list[Any]) -> None:
    """Exchange its first two slots; a state has only one, and is exchanged with that of the next group."""
    one, two = read.slots[:SLOT_BYTES], read.slots[SLOT_BYTES : 2 * SLOT_BYTES]
    if two:
        read.slots = two + one + read.slots[2 * SLOT_BYTES :]
    else:
        read.slots, others[0].slots = others[0].slots, read.slots
        assert len(read.slots) == SLOT_BYTES


def watch(side: Any, *names: str) -> None:
    """Record the longest time that the engine spent in each of these calls."""
    longest = dict.fromkeys(names, 0.0)

    def watched(name: str) -> Any:
        call = getattr(side, name)

        def timed(*args: Any) -> Any:
            before = time.monotonic()
            result = call(*args)
            seconds = time.monotonic() - before
            if seconds > longest[name]:
                longest[name] = seconds
                record(what="called", name=name, seconds=seconds)
            return result

        return timed

    for name in names:
        setattr(side, name, watched(name))


def watch_waiting() -> None:
    """Record which threads wait for the daemon: only the plugin's own threads may."""

    def watched(kind: Any, name: str) -> None:
        call = getattr(kind, name)

        def recording_call(*args: Any) -> Any:
            thread = threading.current_thread().name
            if not thread.startswith("kvtier-"):
                record(what="waits", name=name, thread=thread)
            return call(*args)

        setattr(kind, name, recording_call)

    watched(Connection, "wait")
    watched(Connection, "send")
    watched(Reconnect, "wait_first")


def tell_orders() -> None:
    """While the file `order` exists, open spaces with the page order that it contains."""
    call = Client.open

    def recording_call(client: Client, spec: KvSpec) -> Any:
        order_file = FOLDER / "order"
        if order_file.exists():
            layout, mark, _ = spec.layout.partition(ORDER_MARK)
            assert mark
            spec = msgspec.structs.replace(spec, layout=layout + mark + order_file.read_text())
        return call(client, spec)

    setattr(Client, "open", recording_call)  # noqa: B010


class RecordingConnector(KvtierConnector):
    """See the module's description."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asked: dict[str, tuple[float, float]] = {}
        watch_waiting()
        tell_orders()
        if self._scheduler is not None:
            watch(self._scheduler, "queued", "matched", "allocated", "step", "reported", "finished")

    # --- the scheduler's side: how long a request is kept waiting, which key belongs into which page

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        before = time.monotonic()
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        after = time.monotonic()
        if found[0] is None:
            # Measured from after the first such answer to before the last, so it is at most the
            # time that the plugin counted.
            self._asked.setdefault(request.request_id, (after, before))
            self._asked[request.request_id] = (self._asked[request.request_id][0], before)
        elif request.request_id in self._asked:
            first, last = self._asked.pop(request.request_id)
            record(what="waited", seconds=max(0.0, last - first))
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        side = self._scheduler
        if side is None:
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            return
        assert self._layout is not None
        prompt = side._prompts.get(request.request_id)
        lease = prompt.lookup.lease if prompt is not None else None
        keys = prompt.keys if prompt is not None else None
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if lease is not None and num_external_tokens:
            assert keys is not None
            first = lease.ready - num_external_tokens // self._layout.block_tokens
            ids = blocks.get_block_ids()
            for number, group in enumerate(self._layout.groups):
                pages, parts = ids[group.group_id], group.parts
                wanted = [at for at in range(first * parts, lease.ready * parts) if pages[at]]
                record(
                    what="wanted", load=name_of(side._loads.begun[-1]), group=number,
                    pages=[pages[at] for at in wanted],
                    keys=[f"{keys[at // parts].hex()}.{at % parts}" for at in wanted],
                )  # fmt: skip

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        done = super().request_finished_all_groups(request, block_ids)
        if self._scheduler is not None:
            record(what="held", counts=dict(self._scheduler.counts), **self._scheduler.in_flight)
        return done

    # --- a worker's side: what the pages hold

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        if self._worker is not None:
            watch(self._worker, "begin", "start_saves", "report", "end_copies")
            watch(self._worker.loads, "received")
        self._caches = kv_caches
        self._loading: dict[str, Any] = {}

    def _digests(self, group: int, page: int) -> list[str]:
        assert self._layout is not None
        digests = []
        for name, _ in self._layout.groups[group].pages:
            tensor = self._caches[name]
            parts = tensor.shape[0] // self._kv_cache_config.num_blocks
            held = tensor[page * parts : (page + 1) * parts].contiguous().flatten()
            data = held.view(torch.uint8).numpy().tobytes()
            digests.append(hashlib.sha256(data).hexdigest()[:16])
        return digests

    def wait_for_save(self) -> None:
        step = self._step()
        for save in step.saves if step is not None else ():
            for write in save.writes:
                parts = self._layout.groups[write.group].parts
                for at, page in enumerate(write.block_ids):
                    place = at // parts * KEY_BYTES
                    key = f"{write.keys[place : place + KEY_BYTES].hex()}.{at % parts}"
                    record(
                        what="saved", shard=self._worker.state.shard, key=key, group=write.group,
                        layers=self._digests(write.group, page),
                    )  # fmt: skip
        super().wait_for_save()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._step()
        how = broken()
        for load in step.loads if step is not None else ():
            read, *others = load.shards[self._worker.state.shard]
            if how == "swap":
                swap(read, others)
            if how in ("stale", f"stale {self._worker.state.shard}"):
                # As if the first slot had been reused: another generation.
                extent, reserved, offset, generation = SLOT.unpack_from(read.slots)
                other = SLOT.pack(extent, reserved, offset, generation + 1)
                read.slots = other + read.slots[SLOT_BYTES:]
            self._loading[load.request_id] = load
        super().start_load_kv(forward_context, **kwargs)
        for load in step.loads if step is not None else ():
            if load.now:
                pages = load.shards[self._worker.state.shard][0].block_ids
                if self._worker.loads._bad_blocks.isdisjoint(pages):
                    self._loaded(load.request_id, how)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving - results.failed_recving:
            self._loaded(request_id, broken())
        return results

    def _loaded(self, request_id: str, how: str) -> None:
        load = self._loading.pop(request_id)
        for at, read in enumerate(load.shards[self._worker.state.shard]):
            for place, page in enumerate(read.block_ids):
                if not page:
                    continue
                if how == "zero" and at == place == 0:
                    name, _ = self._layout.groups[read.group].pages[0]
                    tensor = self._caches[name]
                    parts = tensor.shape[0] // self._kv_cache_config.num_blocks
                    tensor[page * parts : (page + 1) * parts] = 0
                record(
                    what="loaded", shard=self._worker.state.shard, load=name_of(load),
                    group=read.group, page=page, now=load.now,
                    layers=self._digests(read.group, page),
                )  # fmt: skip


class PatientConnector(RecordingConnector):
    """A connector that expects recompute to take forever: it loads every block that is on disk."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        setattr(Forecast, "recompute_s", lambda *_: float("inf"))  # noqa: B010
        setattr(Forecast, "prefill", (0.0, 0.0))  # noqa: B010
