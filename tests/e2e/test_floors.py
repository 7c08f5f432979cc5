"""Wide limits of speed and size, far from the values of the benchmarks: they detect a broken path."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from kvtier import KvSpec
from kvtier.key import token_keys
from kvtier_kernels import Store, blake3, memcpy
from models.policies.native import Lru
from support.daemons import Daemon

MIB = 1 << 20
SPEC = KvSpec.dense(
    model="floors", layers=8, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16,
    weights="rev:1",
)  # fmt: skip


def ratio(one: Callable[[], object], other: Callable[[], object], rounds: int = 7) -> float:
    """The median ratio of the other's time to this one's, in pairs."""
    ratios = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        one()
        between = time.perf_counter()
        other()
        ratios.append((time.perf_counter() - between) / (between - started))
    return median(ratios[1:])


def reaches(
    floor: float, one: Callable[[], object], other: Callable[[], object], tries: int = 4
) -> bool:
    """Whether the ratio reaches the limit in one of several tries: other load on the machine slows down
    the one that waits for another process more often."""
    found: list[float] = []
    while len(found) < tries and max(found, default=0.0) <= floor:
        found.append(ratio(one, other))
    print(f"{floor}: {found}")
    return found[-1] > floor


def test_saves_and_loads_move_at_memory_speed(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(warm="512MiB")
    with daemon.connect(populate=True) as client:
        space = client.open(SPEC)
        count = 128 * MIB // SPEC.block_bytes
        source, target = bytearray(128 * MIB), bytearray(128 * MIB)
        source[::4096] = target[::4096] = b"x" * (len(source) // 4096)
        prompts = iter(range(1000))

        def save() -> None:
            keys = space.keys([next(prompts)] * (16 * count))
            assert space.save(keys, source).stored == count

        kept = space.keys([1000] * (16 * count))
        space.save(kept, source)
        assert reaches(0.4, lambda: space.load_into(kept, target), lambda: memcpy(target, source))
        for _ in range(4):
            save()
        assert reaches(0.4, save, lambda: memcpy(target, source))


def test_a_match_costs_little_more_than_a_ping(shared_daemon: Daemon) -> None:
    with shared_daemon.connect() as client:
        space = client.open(SPEC)
        keys = space.keys(list(range(16 * 64)))
        space.save(keys, bytes(64 * SPEC.block_bytes))
        many = space.keys(list(range(16 * 1024)))

        def matches() -> None:
            for _ in range(20):
                space.match(many)

        def pings() -> None:
            for _ in range(20):
                client.ping()

        assert ratio(matches, pings) > 0.1
        space.forget(keys)


def test_keys_cost_little_more_than_their_hashes() -> None:
    tokens, data = list(range(16 * 1024)), bytes(97)

    def hashes() -> None:
        for _ in range(1024):
            blake3(data)

    assert reaches(0.5, lambda: token_keys(bytes(32), tokens, 16), hashes)


def test_a_block_uses_128_bytes_of_the_catalog() -> None:
    store, policy, count = Store(), Lru(), 1 << 18
    store.add_extent(count * 4096, bytearray(count * 8))
    space = store.add_space([(0, 0, 4096)], [1])
    for number in range(count // 1024):
        keys = token_keys(bytes(32), [number] * (16 * 1024), 16).packed
        ids, _ = store.reserve(space, 0, 0, None, keys, bytes(1024))
        store.commit(ids, b"")
        policy.added(ids)
    assert len(policy) == count
    assert (store.memory_bytes() + policy.memory_bytes()) / count <= 128


def test_an_idle_daemon_is_small(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(warm="256MiB")
    assert daemon.process_bytes() <= 80 * MIB
