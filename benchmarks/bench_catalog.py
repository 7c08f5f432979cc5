"""The catalog's store at a million blocks: memory a block, and the calls that a daemon makes.

Validates the answers first. No arena memory is needed: only the generation table is real.
"""

import argparse
import gc
import json
import os
import platform
import random
import statistics
import struct
import sys
import time
from array import array
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))  # `models`
from kvtier_kernels import Store
from models.policies.native import Lru

PAGE = 4096
BATCH = 1024
FRAME = struct.Struct("<IIIBBBB")
ROW = struct.Struct("<32s32sIHHIIHHQQQ16sI")
SEGMENT_FRAMES = 16 * BATCH  # 1 GiB of 64 KiB blocks
BARS = {  # what the design asks for
    "memory_bytes_a_block": 128,
    "memory_bytes_a_clean_block": 128,
    "match_us": 40,
    "match_cold_us": 40,
    "restore_1m_ms": 1000,
    "match_ratio": 1.5,
    "plan_us": 600,
    "plan_leased_us": 600,
    "commit_us": 50,
    "lease_us": 50,
    "unlease_us": 50,
    "refreshed_us": 50,
}


def rss_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def microseconds(call, times, prepare=lambda: ()):
    taken = []
    for _ in range(times):
        arguments = prepare()
        start = time.perf_counter_ns()
        call(*arguments)
        taken.append((time.perf_counter_ns() - start) / 1000)
    taken.sort()
    return {
        "median": round(statistics.median(taken), 1),
        "p10": round(taken[len(taken) // 10], 1),
        "p90": round(taken[len(taken) * 9 // 10], 1),
    }


class Catalog:
    """A store full of chains of 1,024 keys, and its policy."""

    def __init__(self, blocks, rnd, block_bytes=PAGE):
        self.rnd = rnd
        self.store, self.lru = Store(), Lru()
        self.table = array("Q", bytes(8 * blocks))
        self.table[:] = array("Q", [1]) * blocks  # its pages are the arena's, not the store's
        gc.collect()
        before = rss_bytes()
        self.store.add_extent(blocks * PAGE, self.table)
        self.space = self.store.add_space([(0, 0, block_bytes)], [1])
        self.chains = []
        while self.store.room(self.space, 0, BATCH) == BATCH:
            self.save(rnd.randbytes(32 * BATCH))
        self.blocks = self.store.counts()["blocks"]["ready"]
        self.rss_growth = rss_bytes() - before

    def save(self, keys):
        ids, _ = self.store.reserve(self.space, 0, 0, None, keys, bytes(len(keys) // 32))
        self.store.commit(ids, bytes(4 * len(ids)))
        self.lru.added(ids)
        if len(self.chains) < 2000:
            self.chains.append(keys)
        return ids

    def memory(self):
        keys = sum(map(sys.getsizeof, self.chains))  # this benchmark's own
        return {
            "blocks": self.blocks,
            "rss_bytes_a_block": round((self.rss_growth - keys) / self.blocks, 1),
            "memory_bytes_a_block": round(
                (self.store.memory_bytes() + self.lru.memory_bytes()) / self.blocks, 1
            ),
        }

    def match(self, times=400):
        def prepare():  # the keys of a request have just been read from its socket
            return self.space, bytes(bytearray(self.rnd.choice(self.chains)))

        for _ in range(20):
            assert self.store.match(*prepare())[0] == BATCH
        return microseconds(self.store.match, times, prepare)

    def match_newest(self, times=100):
        """Chains that took the places of evicted ones."""
        self.chains = self.chains[-times:]
        return self.match(times)

    def match_scattered(self, times=400):
        """The worst case: no two consecutive records are adjacent, so a key costs two cache misses."""
        some = self.chains[:: max(1, len(self.chains) // 64)]
        keys = [key[at : at + 32] for key in some for at in range(0, 32 * BATCH, 32)]

        def prepare():
            return self.space, b"".join(self.rnd.sample(keys, BATCH))

        assert self.store.match(*prepare())[0] == BATCH
        return microseconds(self.store.match, times, prepare)

    def plan(self, times=200):
        """The store's share of a save that must evict: make_room and reserve. Then it commits."""
        taken = []
        for _ in range(times):
            keys = self.rnd.randbytes(32 * BATCH)
            victims = self.lru.victims(BATCH)
            start = time.perf_counter_ns()
            evicted, orphans, _ = self.store.make_room(self.space, 0, BATCH, victims)
            ids, _ = self.store.reserve(self.space, 0, 0, None, keys, bytes(BATCH))
            taken.append((time.perf_counter_ns() - start) / 1000)
            assert len(evicted) == len(ids) == 4 * BATCH
            self.lru.gone(evicted)
            self.lru.demoted(orphans)
            self.store.commit(ids, b"")
            self.lru.added(ids)
            self.chains.append(keys)
        taken.sort()
        return {
            "median": round(statistics.median(taken), 1),
            "p10": round(taken[len(taken) // 10], 1),
            "p90": round(taken[len(taken) * 9 // 10], 1),
        }

    def victims(self, times=100):
        return microseconds(self.lru.victims, times, lambda: (BATCH,))

    def events(self, times=100):
        """Commit, lease, unlease and touch of 1,024 blocks from all over the store."""
        out = {}
        for checksums in (b"", bytes(16 * BATCH)):
            taken = []
            for _ in range(times):
                victims = self.lru.victims(BATCH)
                evicted, orphans, _ = self.store.make_room(self.space, 0, BATCH, victims)
                self.lru.gone(evicted)
                self.lru.demoted(orphans)
                keys = self.rnd.randbytes(32 * BATCH)
                ids, _ = self.store.reserve(self.space, 0, 0, None, keys, bytes(BATCH))
                start = time.perf_counter_ns()
                self.store.commit(ids, checksums)
                taken.append((time.perf_counter_ns() - start) / 1000)
                self.lru.added(ids)
            out["commit_with_checksums" if checksums else "commit"] = {
                "median": round(statistics.median(taken), 1)
            }
        everywhere = array("I", [0]) * BATCH

        def spread():
            ids = self.rnd.sample(range(self.blocks), BATCH)
            everywhere[:] = array("I", ids)
            return (everywhere.tobytes(),)

        out["refreshed_at_random"] = microseconds(self.lru.refreshed, times, spread)
        chains = [self.store.present(self.space, 0, 0, keys) for keys in self.chains]
        chains = [ids for ids in chains if len(ids) == 4 * BATCH]
        assert chains
        for what, call in (
            ("refreshed", self.lru.refreshed),
            ("lease", self.store.lease),
            ("unlease", self.store.unlease),
        ):
            turns = iter(chains)
            out[what] = microseconds(call, len(chains), lambda turns=turns: (next(turns),))
        return out

    def lease_the_old_end(self, share):
        """Leased blocks leave the policy, as in the catalog."""
        ids = self.lru.victims(self.blocks)
        for at in range(0, len(ids) // 4 - BATCH, BATCH):
            batch = array("I", ids[4 * at : 4 * (at + BATCH)])
            leased = array("I", [i for i in batch if self.rnd.random() < share]).tobytes()
            self.store.lease(leased)
            self.lru.held(leased)

    def write_all(self):
        """Every block gets a frame."""
        for at, keys in enumerate(self.chains):
            ids = self.store.present(self.space, 0, 0, keys)
            segment, first = divmod(at * BATCH, SEGMENT_FRAMES)
            frames = b"".join(
                FRAME.pack(segment, 1 + 2 * (first + i), PAGE, 0, 1, 1, 0)
                for i in range(len(ids) // 4)
            )
            assert self.store.framed(1, ids, frames, bytes(4 * len(ids))) == b""


def footers(rnd, blocks):
    """The rows of segments full of chains of 1,024 keys."""
    segments = []
    parent = b""
    for first in range(0, blocks, SEGMENT_FRAMES):
        rows = []
        for at in range(min(SEGMENT_FRAMES, blocks - first)):
            parent = b"" if at % BATCH == 0 else parent
            key = rnd.randbytes(32)
            page = 1 + 2 * at
            rows.append(
                ROW.pack(
                    key, parent, 0, 0, 0, page, 2, 1, 0, PAGE, PAGE, first + at, key[:16], bool(parent)
                )
            )  # fmt: skip
            parent = key
        segments.append(b"".join(rows))
    return segments


def restore(rnd, segments, times=100):
    """A restart: everything is on disk, and then asked for."""
    store = Store()
    space = store.add_space([(0, 0, PAGE)], [1])
    start = time.perf_counter_ns()
    for number, rows in enumerate(segments):
        store.restore(1, space, rows, number)
    taken_ms = (time.perf_counter_ns() - start) / 1e6
    blocks = store.counts()["below"][0]
    assert blocks == sum(map(len, segments)) // ROW.size

    def prepare():
        rows = rnd.choice(segments)
        first = rnd.randrange(len(rows) // ROW.size // BATCH) * BATCH * ROW.size
        starts = range(first, first + BATCH * ROW.size, ROW.size)
        return space, b"".join(rows[at : at + 32] for at in starts)

    assert store.match(*prepare())[:2] == (0, BATCH)
    return {
        "rows": blocks,
        "ms": round(taken_ms, 1),
        "memory_bytes_a_block": round(store.memory_bytes() / blocks, 1),
        "match": microseconds(store.match, times, prepare),
    }


def validate(rnd):
    """What is saved is found, what is evicted is not, and what is restored can be read."""
    store = Store()
    store.add_extent(3000 * PAGE, bytearray(3000 * 8))
    store.add_space([(0, 0, PAGE)], [1])
    saved = []
    for _ in range(12):
        keys = rnd.randbytes(32 * 512)
        victims = b"".join(store.present(0, 0, 0, old) for old in saved)
        due = max(0, 512 - store.room(0, 0, 512))
        assert store.make_room(0, 0, 512, victims)[::2] == (victims[: 4 * due], b"")
        ids, slots = store.reserve(0, 0, 0, None, keys, bytes(512))
        assert len(ids) == 4 * 512 and slots == store.slots(ids)
        store.commit(ids, b"")
        assert store.match(0, keys) == (512, 512, [(0, 0, 0, ids)])
        saved = [*saved, keys][-5:]
    store.check()
    (rows,) = footers(rnd, 2 * BATCH)
    assert store.restore(1, 0, rows, 1) == (2 * BATCH, 0, b"")
    ids, _ = store.in_segment(1)
    assert store.missing(0, rows[:32], 1) == [(0, 0, ids[:4], b"")]
    assert store.counts()["below"] == [2 * BATCH, 0, 0]
    store.check()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out_to = parser.parse_args().out
    rnd = random.Random(1)
    validate(rnd)
    small = Catalog(10_240, rnd)
    results = {"match_10k": small.match()}
    large = Catalog(1_000_448, rnd)
    results["memory"] = large.memory()
    results["match_1m"] = large.match()
    results["match_10k_again"] = small.match()
    results["match_scattered_10k"] = small.match_scattered()
    results["match_scattered_1m"] = large.match_scattered()
    large.write_all()
    results["match_1m_clean"] = large.match()
    results["memory_bytes_a_clean_block"] = large.memory()["memory_bytes_a_block"]
    for number in range(large.blocks // SEGMENT_FRAMES + 1):
        large.store.drop_segment(number)
    results["restore"] = restore(rnd, footers(rnd, 1_000_448))
    results["victims"] = large.victims()
    results["plan"] = large.plan()
    results["match_1m_after_plans"] = large.match_newest()
    results |= large.events()
    large.store.check()
    large.lease_the_old_end(0.9)
    results["plan_leased"] = large.plan(60)
    large.store.check()

    memory = results["memory"]
    measured = {
        "memory_bytes_a_block": max(memory["rss_bytes_a_block"], memory["memory_bytes_a_block"]),
        "memory_bytes_a_clean_block": results["memory_bytes_a_clean_block"],
        "match_us": results["match_1m"]["median"],
        "match_cold_us": results["restore"]["match"]["median"],
        "restore_1m_ms": results["restore"]["ms"],
        "match_ratio": round(
            results["match_1m"]["median"]
            / min(results["match_10k"]["median"], results["match_10k_again"]["median"]),
            2,
        ),
        "plan_us": results["plan"]["median"],
        "plan_leased_us": results["plan_leased"]["median"],
        "commit_us": results["commit"]["median"],
        "lease_us": results["lease"]["median"],
        "unlease_us": results["unlease"]["median"],
        "refreshed_us": results["refreshed"]["median"],
    }
    for what, bar in BARS.items():
        print(f"{what:24} {measured[what]:8} bar {bar:6}  {measured[what] / bar:5.2f} of it")
    for what, numbers in results.items():
        print(f"{what:24} {numbers}")
    if out_to is not None:
        environment = {"python": platform.python_version(), "machine": platform.processor()}
        environment |= {"kernel": platform.release(), "cpus": os.cpu_count()}
        out = {"environment": environment, "bars": BARS, "measured": measured, "results": results}
        out_to.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
