"""From a seed: the configuration of the daemon, and the list of operations."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from kvtier.layout import Group, KvSpec

CHAINS, DEPTH = 4, 6
TENANTS = ("one", "two")
OTHER_PAGES, FRAME_PAGES = 4, 2  # of a segment: head, tombstones, footer; of a frame


@dataclass(frozen=True)
class SimulatedConfig:
    """What differs between seeds. Sizes are in pages of 4 KiB."""

    tenants: int
    clients: int
    memory_pages: int  # of each tenant
    extent_pages: int
    keep_s: int
    directories: int
    segment_pages: int
    segments: int  # of each tenant in each directory
    write: str
    admission: str
    codec: str
    scrub_bytes: int
    policy: str
    send_buffer: int
    tick_s: float
    iteration_s: float
    memory_s: float  # the time to allocate an extent
    has_faults: bool
    spaces: tuple[int, ...]  # that clients use
    chains: int  # of each space
    is_portioned: bool  # the daemon does its work in very small portions
    resumes: float  # the share of connections that continue a lost one
    compressed_pages: int  # of each tenant
    has_direct_reads: bool  # clients may read the segments themselves
    has_guests: bool  # each tenant has another user, which connects never and may leave


@dataclass(frozen=True)
class Operation:
    """`number` seeds what is random in it, so that it does the same if others are left out."""

    at: float
    kind: str
    number: int


# Kinds of operations and their weights.
OF_CLIENTS = {
    "save": 45, "load": 50, "match": 4, "prefetch": 2, "forget": 6, "pin": 3, "unpin": 1, "hint": 2,
    "release": 3, "cancel": 3, "bye": 2, "drop": 4, "die": 2, "stall": 1, "read_only": 1, "list": 1,
    "stats": 1, "explain": 1, "grow": 1, "watch": 1, "adopt": 2, "purge": 1, "half": 1, "recheck": 2,
}  # fmt: skip
OF_ENGINES, MORE = ("direct", "resident", "resident"), 12  # one for each MORE others
OF_OPERATORS = {"tier": 6, "reload": 2}
OF_DISKS = {"slow": 4, "fail": 6, "hang": 3, "rot": 1}
OF_MACHINES = {"stop": 3, "kill": 3, "power": 3}


@lru_cache(1)
def config_of(seed: int) -> SimulatedConfig:
    chance = random.Random(f"config {seed}")
    pick = chance.choice
    # Of its own, so that it changes nothing else in the seed.
    compressed = random.Random(f"compressed {seed}").choice((0, 3, 8, 32))
    directories = pick((0, 1, 1, 1, 1, 1, 1, 2))
    memory_pages, segment_pages = pick((6, 8, 8, 12, 16, 24, 48)), pick((12, 16, 24))
    # More than the memory: a cold tier that is smaller is written again and again.
    fit = -(-memory_pages // (max(1, directories) * ((segment_pages - OTHER_PAGES) // FRAME_PAGES)))
    return SimulatedConfig(
        tenants=pick((1, 1, 2)),
        clients=pick((1, 2, 3, 4)),
        memory_pages=memory_pages,
        extent_pages=pick((8, 16, 64)),
        keep_s=pick((0, 0, 60)),
        directories=directories,
        segment_pages=segment_pages,
        segments=fit + pick((2, 2, 3, 6)),
        write=pick(("back", "through", "through")),
        admission=pick(("auto", "all")),
        scrub_bytes=pick((0, 0, 0, 1 << 20)),
        codec=pick(("raw", "raw", "auto", "zstd")),
        policy=pick(("auto", "lru", "s3fifo")),
        send_buffer=pick((0, 0, 0, 2048)),
        tick_s=pick((1e-6, 1e-6, 2e-5, 2e-4)),
        iteration_s=pick((1e-5, 1e-4, 1e-3)),
        memory_s=pick((0.0, 0.0, 0.5)),
        has_faults=bool(directories) and chance.random() < 0.7,
        spaces=pick(((0,), (0,), (1,), (2,), (0, 2), (0, 1, 2))),
        chains=pick((1, 2, 2, CHAINS)),
        is_portioned=chance.random() < 0.5,
        has_guests=chance.random() < 0.5,
        resumes=pick((0.0, 0.5, 1.0)),
        compressed_pages=compressed if directories else 0,
        has_direct_reads=bool(directories) and random.Random(f"direct {seed}").random() < 0.7,
    )


def plan_of(seed: int) -> list[Operation]:
    config = config_of(seed)
    chance = random.Random(f"plan {seed}")
    weights = dict(OF_CLIENTS)
    weights |= OF_MACHINES if chance.random() < 0.6 else {}
    if config.directories:
        weights |= OF_OPERATORS
        weights |= OF_DISKS if config.has_faults else {}
    # Each seed prefers some kinds, so that some plans have much of one kind.
    for kind in chance.sample(sorted(weights), 4):
        weights[kind] *= chance.choice((0, 3, 5))
    kinds, shares = list(weights), list(weights.values())
    at, plan = 0.05, []
    pace = chance.choice((0.003, 0.01, 0.03, 0.1))
    for _ in range(chance.choice((20, 60, 80, 100))):
        at += chance.expovariate(1 / pace) if chance.random() < 0.97 else 6 * chance.random()
        plan.append(Operation(at, chance.choices(kinds, shares)[0], chance.getrandbits(32)))
    # Of its own, as above.
    chance = random.Random(f"more {seed}")
    for _ in range(len(plan) // MORE):
        kind = chance.choice(OF_ENGINES)
        plan.append(Operation(at * chance.random(), kind, chance.getrandbits(32)))
    return sorted(plan, key=lambda one: one.at)


# --- what clients save ---------------------------------------------------------------------------


def _spec(name: str, groups: tuple[Group, ...]) -> KvSpec:
    return KvSpec(
        model=name, weights="rev:1", dtype="bfloat16", block_tokens=16, cache_groups=groups
    ).checked()


FULL = Group(layers=1, kv_heads=1, head_dim=64)  # blocks of one page
SPECS = (
    _spec("plain", (FULL,)),
    _spec("sharded", (Group(layers=1, kv_heads=1, head_dim=128, shards=2),)),  # of two pages
    _spec(
        "window", (FULL, Group(kind="window", layers=1, kv_heads=1, head_dim=32, window_tokens=32))
    ),
)


def _keys(space: int, chain: int) -> list[bytes]:
    """The keys of a chain. Two chains share their first blocks."""
    names = [
        f"{space} {chain // 2 if at < DEPTH // 2 else f'tail {chain}'} {at}" for at in range(DEPTH)
    ]
    return [blake2b(name.encode(), digest_size=32).digest() for name in names]


KEYS = [[_keys(space, chain) for chain in range(CHAINS)] for space in range(len(SPECS))]
ALL_KEYS = [sorted({key for chain in chains for key in chain}) for chains in KEYS]


def places(space: int) -> list[tuple[int, int]]:
    """All groups and shards."""
    groups = SPECS[space].cache_groups
    return [(at, shard) for at, group in enumerate(groups) for shard in range(group.shards)]


def block_bytes(space: int, group: int) -> int:
    spec = SPECS[space]
    return spec.cache_groups[group].block_bytes(spec.dtype, spec.block_tokens)
