"""The copies of the SGLang backend, against a plain loop of streaming stores (the NT loop) of equal size.

128 pages of 1 MiB, as SGLang asks for them: their names become keys, the daemon leases them, and they are
copied into a host pool, whose layout decides how many pieces a page has. SGLang is not needed: its own class
adds a comparison of two labels to each of these calls.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import mmap
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import harness
from bench_warm import buffers, nothing
from harness import Arm, Daemon, Row, pairs, ratio_row
from kvtier_daemon.tools.machine_limits import copies
from kvtier_kernels import nt_loops
from kvtier_plugins.page_store import PageStore, RankCache
from kvtier_sglang.identity import KV, ModelFacts, RankPlace, describe
from kvtier_sglang.options import StorageOptions
from kvtier_sglang.pages import find_pages
from support.host_pools import PAGE_TOKENS, HostPool, Tensor, hashes, indices_of

MIB = 1 << 20
PAGES, LAYERS = 128, 32
WIDTH = MIB // (2 * LAYERS * PAGE_TOKENS * 2)  # float16 elements of K of one token and layer
BAR = 0.9
prompts = itertools.count()


def pool_of(layout: str) -> HostPool:
    """A pool of two batches, in huge pages, faulted in and all different."""
    pool = HostPool(layout, 2 * PAGES, LAYERS, WIDTH)
    shape = pool.kv_buffer.array.shape
    memory = mmap.mmap(-1, pool.kv_buffer.array.nbytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    words = np.frombuffer(memory, np.uint64)
    words[:] = np.arange(len(words))
    pool.kv_buffer = Tensor(np.frombuffer(memory, np.float16).reshape(shape))
    return pool


def rows_of(socket: str, layout: str, threads: int, rounds: int) -> list[Row]:
    pool, place = pool_of(layout), RankPlace(0, 1, "stage 0 of 1", 1, True)
    pages = {KV: find_pages(pool)}
    assert pages[KV].pieces.block_bytes == MIB
    spec = describe(ModelFacts("bench", "0" * 40, "auto", 0, 1, "", "", {}), pages, place)
    store = PageStore(
        RankCache(spec, pages, "sglang", logging.getLogger(), place.shard, place.writes),
        StorageOptions(socket=socket, copy_threads=threads),
    )
    time.sleep(1.5)  # the mapping is faulted in by a thread
    first, second = indices_of(range(PAGES)), indices_of(range(PAGES, 2 * PAGES))
    todo: dict[str, Any] = {}

    def prepare() -> None:
        todo["keys"] = hashes(PAGES, str(next(prompts)))

    def save() -> None:
        assert all(store.save(KV, todo["keys"], first))

    def load() -> None:
        assert all(store.load(KV, todo["keys"], second))

    # Valid first: what comes back is what went in.
    prepare()
    save()
    pool.page(PAGES)[...] = 0
    load()
    assert pool.read(range(PAGES)) == pool.read(range(PAGES, 2 * PAGES))
    for _ in range(16):  # fill the tier: steady state evicts
        prepare()
        save()
    loop: Callable[[], None]
    sources, targets = buffers(PAGES, MIB), buffers(PAGES, MIB)
    if threads == 1:
        loop = lambda: nt_loops(targets, sources)  # noqa: E731
    else:
        loop = copies(targets, sources, threads)[f"streaming stores, {threads} threads"]
    rows = []
    for name, run, before, bar in (
        ("batch_get_v1", load, nothing, BAR),
        ("batch_set_v1", save, prepare, None),
    ):
        one, other = Arm(run, before), Arm(loop)
        ratios = pairs(one, other, rounds, warmups=2)
        title = f"{name}, 128 pages of 1 MiB, {layout}, to the NT loop by {threads}"
        rows.append(ratio_row(title, ratios, bar, PAGES * MIB, one, other))
    store.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--rounds", type=int, default=harness.ROUNDS)
    arguments = parser.parse_args()
    rows: list[Row] = []
    probes = [harness.noise()]
    with tempfile.TemporaryDirectory() as folder, Daemon(Path(folder), "1GiB") as daemon:
        daemon.wait_for_arena()
        for layout in ("page_first", "layer_first"):
            for threads in (1, 2):
                rows += rows_of(daemon.socket, layout, threads, arguments.rounds)
    probes.append(harness.noise())
    return harness.report("sglang", rows, probes, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
