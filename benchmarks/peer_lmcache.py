"""A client of LMCache's daemon, run by LMCache's own Python: does what each line of JSON on stdin says, and
answers with one.

It looks up through the adapter that LMCache gives vLLM's scheduler. It stores and retrieves in two ways: into
and out of the daemon's shared memory by one plain copy a chunk, between LMCache's own `prepare` and `commit`;
and through the whole adapter of vLLM's worker, whose copy without a GPU is LMCache's fallback in torch.
Seconds are those from the first call to the answer.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import numpy as np
import torch
import zmq
from lmcache.integration.vllm.vllm_multi_process_adapter import (
    DEFAULT_MQ_TIMEOUT,
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    ParallelStrategy,
)
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

from peer_bytes import TOKENS, Blocks, tokens_of

POLL_S = 0.00005
ALONE = ParallelStrategy(
    mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1
)
MODE = {"lmcache.mp.mp_transfer_mode": "engine_driven"}  # what `auto` is for host memory
WAITING = {"lmcache.mp.nonblocking_lookup_status": False}  # answers as soon as they are there


class Peer:
    """One model's connection: blocks to store and retrieve, an engine's cache of `pages` as large."""

    def __init__(self, url: str, nbytes: int, blocks: int, pages: int, defaults: bool) -> None:
        self.blocks, self.pages = Blocks(nbytes, blocks), pages
        self.model = f"bench-{nbytes}-{pages}"
        head = min(128, nbytes // (2 * 2 * TOKENS))
        shape = (2, max(1, pages), TOKENS, nbytes // (2 * 2 * TOKENS * head), head)
        self.cache = torch.zeros(shape, dtype=torch.bfloat16)
        config = MODE if defaults else MODE | WAITING
        context = zmq.Context()
        common = (url, context, self.model, TOKENS, ALONE)
        self.scheduler = LMCacheMPSchedulerAdapter([url], *common[1:], extra_config=config)
        self.worker = LMCacheMPWorkerAdapter(*common, extra_config=config)
        layers = {"model.layers.0.self_attn.attn": self.cache}
        self.worker.register_kv_caches(layers, layout_hints={"kv_layout": "NHD"})
        self.memory = self.worker.transfer_ctx.engine_driven_context
        # With a GPU it would pin these pages; without, the first round would pay for mapping them.
        np.frombuffer(self.memory._shm_buffer, np.uint8)[::4096] |= 0
        self.turns = 0

    def close(self) -> dict[str, Any]:
        self.worker.shutdown()
        self.scheduler.shutdown()
        return {}

    def _name(self) -> str:
        self.turns += 1
        return f"request-{self.turns}"

    def _key(self, prompt: int, blocks: int, name: str) -> IPCCacheServerKey:
        tokens = tuple(tokens_of(prompt, blocks))
        return IPCCacheServerKey(
            model_name=self.model, world_size=1, worker_id=0, token_ids=tokens, start=0, end=len(tokens),
            request_id=name, num_kv_readers=1,
        )  # fmt: skip

    def _end(self, name: str) -> None:
        self.scheduler.end_session(name)
        self.scheduler.cleanup_lookup_result(name)

    def store(self, prompt: int, blocks: int) -> dict[str, Any]:
        self.blocks.fill(prompt)
        sources = torch.from_numpy(self.blocks.sources)
        name = self._name()
        key = self._key(prompt, blocks, name)
        started = time.perf_counter()
        given = self.memory.prepare_store(key, self.worker.instance_id)
        assert given is not None, "LMCache's daemon has no shared memory"
        for slot, block in zip(*given, strict=True):
            slot.view(torch.int64).view(-1).copy_(sources[block])
        # Nothing to commit means that the daemon has them all, as its own adapter takes it.
        ok = not given[1] or self.memory.commit_store(key, self.worker.instance_id, [])
        took = time.perf_counter() - started
        self._end(name)
        return {"s": took, "ok": bool(ok), "stored": len(given[1])}

    def lookup(self, prompt: int, blocks: int) -> dict[str, Any]:
        tokens, name = tokens_of(prompt, blocks), self._name()
        started = time.perf_counter()
        found = self._look(name, tokens)
        took = time.perf_counter() - started
        if found:
            self.scheduler.free_lookup_locks(tokens, 0, found, name)
        self._end(name)
        return {"s": took, "found": found // TOKENS}

    def _look(self, name: str, tokens: list[int]) -> int:
        self.scheduler.maybe_submit_lookup_request(name, tokens)
        while (found := self.scheduler.check_lookup_result(name)) is None:
            time.sleep(POLL_S)
        return int(found)

    def retrieve(self, prompt: int, blocks: int) -> dict[str, Any]:
        """Look a prompt up, and copy out what there is."""
        targets = torch.from_numpy(self.blocks.targets)
        self.blocks.targets[:, ::64] = 0
        name = self._name()
        tokens = tokens_of(prompt, blocks)
        slots: list[torch.Tensor] = []
        started = time.perf_counter()
        found = self._look(name, tokens) // TOKENS
        if found:
            key = self._key(prompt, found, name)
            slots = self.memory.prepare_retrieve(key, self.worker.instance_id) or []
            for block, slot in enumerate(slots):
                targets[block].copy_(slot.view(torch.int64).view(-1))
            self.memory.commit_retrieve(key, self.worker.instance_id)
        took = time.perf_counter() - started
        self._end(name)
        self.blocks.fill(prompt)
        return {"s": took, "found": len(slots), "wrong": self.blocks.wrong(len(slots))}

    # --- through the worker's adapter, from one half of an engine's pages and into the other --------

    def store_pages(self, prompt: int) -> dict[str, Any]:
        half, name = self.pages // 2, self._name()
        words = self.cache[:, :half].view(torch.int64)
        words.view(2, half, -1)[:, :, ::64] = torch.arange(half)[None, :, None] + prompt * 1000
        tokens = tokens_of(prompt, half)
        op = LoadStoreOp(tokens, [list(range(half))], 0, len(tokens))
        started = time.perf_counter()
        self.worker.submit_store_request(name, op, self.worker.create_recorded_event())
        ok = self.worker.store_futures.pop(name).result(timeout=60)
        took = time.perf_counter() - started
        self._end(name)
        return {"s": took, "ok": bool(ok)}

    def retrieve_pages(self, prompt: int) -> dict[str, Any]:
        half, name = self.pages // 2, self._name()
        tokens = tokens_of(prompt, half)
        self.cache[:, half:].zero_()
        op = LoadStoreOp(tokens, [list(range(half, 2 * half))], 0, len(tokens))
        started = time.perf_counter()
        found = self._look(name, tokens) // TOKENS
        assert found == half, f"{found} of {half} found"
        self.worker.submit_retrieve_request(name, op, self.worker.create_recorded_event())
        ok = self.worker.retrieve_futures.pop(name)[0].result(timeout=60)
        took = time.perf_counter() - started
        self._end(name)
        words = self.cache.view(torch.int64)
        return {
            "s": took,
            "ok": bool(ok),
            "wrong": int(not torch.equal(words[:, :half], words[:, half:])),
        }

    def wait(self, prompt: int, blocks: int, patience_s: float) -> dict[str, Any]:
        """How long a lookup and a store take, each in a thread of its own; none where it still waits."""
        done: dict[str, Any] = {"lookup": None, "store": None, "timeout_s": DEFAULT_MQ_TIMEOUT}
        name, other = self._name(), self._name()
        key = self._key(prompt + 1, blocks, other)
        started = time.perf_counter()

        def look() -> None:
            found = self._look(name, tokens_of(prompt, blocks))
            done["lookup"] = [time.perf_counter() - started, f"{found // TOKENS} blocks"]

        def save() -> None:
            try:
                self.memory.prepare_store(key, self.worker.instance_id)
                done["store"] = [time.perf_counter() - started, "answered"]
            except Exception as error:  # noqa: BLE001 - whatever it ends with is the result
                done["store"] = [time.perf_counter() - started, type(error).__name__]

        threads = [threading.Thread(target=run, daemon=True) for run in (look, save)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, started + patience_s - time.perf_counter()))
        return dict(done)


def main() -> None:
    peers: dict[str, Peer] = {}
    for line in sys.stdin:
        who, what, given = json.loads(line)
        if what == "connect":
            peers[who] = Peer(**given)
            answer: dict[str, Any] = {}
        else:
            answer = getattr(peers[who], what)(**given)
        if what == "close":
            del peers[who]
        print("=" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
