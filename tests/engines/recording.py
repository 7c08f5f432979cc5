"""The connector under test, writing down what every page holds when it is saved and when it has been loaded.

What a page holds is read from the tensors as the engine sees them, not from where the plugin says it is.
A file named `break` in the folder of the records makes a load go wrong: `swap`, `zero`, or `stale`.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from kvtier.key import KEY_BYTES
from kvtier.wire import SLOT, SLOT_BYTES
from kvtier_vllm.connector import KvtierConnector

FOLDER = Path(os.environ["KVTIER_TEST_RECORDS"])


def record(**fields: Any) -> None:
    with (FOLDER / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(fields) + "\n")


class RecordingConnector(KvtierConnector):
    """See above."""

    # --- the scheduler's side: which key belongs into which page

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        side = self._scheduler
        assert side is not None and self._layout is not None
        prompt = side._prompts.get(request.request_id)
        lease = prompt.lease if prompt is not None else None
        if lease is not None and num_external_tokens:
            assert prompt is not None and prompt.keys is not None
            first = lease.ready - num_external_tokens // self._layout.block_tokens
            ids = blocks.get_block_ids()
            for number, group in enumerate(self._layout.groups):
                pages = ids[group.group_id]
                wanted = [at for at in range(first, lease.ready) if pages[at]]
                record(
                    what="wanted", request=request.request_id, group=number,
                    pages=[pages[at] for at in wanted],
                    keys=[prompt.keys[at].hex() for at in wanted],
                )  # fmt: skip
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        done = super().request_finished_all_groups(request, block_ids)
        assert self._scheduler is not None
        record(what="held", counts=dict(self._scheduler.counts), **self._scheduler.in_flight)
        return done

    # --- a worker's side: what the pages hold

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
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
                keys = [
                    write.keys[at : at + KEY_BYTES] for at in range(0, len(write.keys), KEY_BYTES)
                ]
                for key, page in zip(keys, write.block_ids, strict=True):
                    record(
                        what="saved", shard=self._worker._shard, key=key.hex(), group=write.group,
                        layers=self._digests(write.group, page),
                    )  # fmt: skip
        super().wait_for_save()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._step()
        broken = FOLDER / "break"
        how = broken.read_text() if broken.exists() else ""
        for load in step.loads if step is not None else ():
            read = load.shards[self._worker._shard][0]
            if how == "swap":
                one, two = read.slots[:SLOT_BYTES], read.slots[SLOT_BYTES : 2 * SLOT_BYTES]
                read.slots = two + one + read.slots[2 * SLOT_BYTES :]
            if how == "stale":
                # As if the first slot had been given away: another generation.
                extent, reserved, offset, generation = SLOT.unpack_from(read.slots)
                other = SLOT.pack(extent, reserved, offset, generation + 1)
                read.slots = other + read.slots[SLOT_BYTES:]
            self._loading[load.request_id] = load
        super().start_load_kv(forward_context, **kwargs)
        for load in step.loads if step is not None else ():
            if load.now and how != "stale":
                self._loaded(load.request_id, how)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        broken = FOLDER / "break"
        for request_id in results.finished_recving - results.failed_recving:
            self._loaded(request_id, broken.read_text() if broken.exists() else "")
        return results

    def _loaded(self, request_id: str, how: str) -> None:
        load = self._loading.pop(request_id)
        for at, read in enumerate(load.shards[self._worker._shard]):
            for place, page in enumerate(read.block_ids):
                if how == "zero" and at == place == 0:
                    name, _ = self._layout.groups[read.group].pages[0]
                    tensor = self._caches[name]
                    parts = tensor.shape[0] // self._kv_cache_config.num_blocks
                    tensor[page * parts : (page + 1) * parts] = 0
                record(
                    what="loaded", shard=self._worker._shard, request=request_id,
                    group=read.group, page=page, now=load.now,
                    layers=self._digests(read.group, page),
                )  # fmt: skip
