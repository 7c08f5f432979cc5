"""A client that saves and loads blocks in a loop and checks every byte, for tests and benchmarks that end the
daemon meanwhile: `python loading_client.py SOCKET SEED RECONNECT_S`.

Prints a line per turn, and a JSON object with its counts once its standard input is closed.
"""

from __future__ import annotations

import json
import random
import select
import sys
import time
from collections.abc import Callable
from typing import Any

from kvtier import Client, Keys, KvSpec, StaleLease, Unavailable

CHAINS, CHAIN = 8, 24
SPEC = KvSpec.dense(
    model="loop", layers=4, kv_heads=4, head_dim=64, dtype="bfloat16", block_tokens=16, weights="rev:1"
)  # fmt: skip


def content(key: bytes) -> bytes:
    return (key * (SPEC.block_bytes // len(key) + 1))[: SPEC.block_bytes]


class LoadingClient:
    def __init__(self, client: Client, seed: int) -> None:
        self._client = client
        self._space = client.open(SPEC)
        self._chance = random.Random(seed)
        self._seed = seed
        self._gone: set[int] = set()  # own chains that were forgotten
        self._target = bytearray(CHAIN * SPEC.block_bytes)
        self.counts = dict.fromkeys(
            ("turns", "calls", "failed", "wrong", "returned", "saved", "loaded", "stale"), 0
        )
        self.longest_s = 0.0
        self.errors: list[str] = []

    def turn(self) -> None:
        number = self._chance.randrange(CHAINS)
        is_own = number % 2 == 0  # the others are shared by all clients
        first = 1000 * self._seed + number if is_own else number
        keys = self._space.keys([first, *range(1, CHAIN * SPEC.block_tokens)])
        forget = is_own and self._chance.random() < 0.1
        turns = [self._load, self._load_into, self._lease, self._save, self._reserve]
        if forget:
            self._call(lambda: self._space.forget(keys))
            self._gone.add(number)
            self._returned(number, keys)
        else:
            self._call(lambda: self._chance.choice(turns)(number, keys))
        self.counts["turns"] += 1

    def _call(self, call: Callable[[], Any]) -> None:
        began = time.monotonic()
        try:
            call()
        except StaleLease:
            self.counts["stale"] += (
                1  # evicted during the restart: the caller discards what it read
            )
        except Exception as error:  # noqa: BLE001  # counted
            self.counts["failed"] += 1
            self.errors.append(f"{type(error).__name__}: {error}")
        self.counts["calls"] += 1
        self.longest_s = max(self.longest_s, time.monotonic() - began)

    def _returned(self, number: int, keys: Keys) -> None:
        if number in self._gone:
            self._call(lambda: self._count("returned", self._space.match(keys).ready))

    def _count(self, name: str, count: int) -> None:
        self.counts[name] += count

    def _check(self, keys: Keys, blocks: list[Any]) -> None:
        wrong = sum(bytes(one) != content(key) for key, one in zip(keys, blocks, strict=False))
        self._count("wrong", wrong)
        self._count("loaded", len(blocks) - wrong)

    def _load(self, number: int, keys: Keys) -> None:
        self._returned(number, keys)
        with self._space.load(keys, deadline_ms=60_000) as blocks:
            copies = [bytes(one) for one in blocks if one is not None]
        self._check(keys, copies)

    def _load_into(self, number: int, keys: Keys) -> None:
        ready = self._space.load_into(keys, self._target)
        size = SPEC.block_bytes
        self._check(keys, [self._target[at * size : (at + 1) * size] for at in range(ready)])

    def _lease(self, _: int, keys: Keys) -> None:
        ticket, answers = self._space.begin_lease(keys, deadline_ms=60_000), {}
        until = time.monotonic() + 60
        while ticket not in answers:
            answers = self._client.poll()
            if not answers:
                if time.monotonic() > until:
                    raise Unavailable("no answer to a begun request")
                time.sleep(0.0005)
        lease = answers[ticket]
        if lease.ready:
            part = lease.part(0, 0)
            copies = [bytes(view) for view in lease.views(part, SPEC.block_bytes)]
            self._check(keys, copies[: lease.fresh(part)])
        lease.release()

    def _save(self, number: int, keys: Keys) -> None:
        blocks = [content(key) for key in keys]
        self._gone.discard(number)
        self._count("saved", self._space.save(keys, blocks).stored)

    def _reserve(self, number: int, keys: Keys) -> None:
        """Write slowly, and commit in two parts: a restart comes between."""
        self._gone.discard(number)
        with self._space.reserve(keys) as saving:
            for at, (key, slot) in enumerate(saving.items()):
                slot[:] = content(key)
                if at == len(saving) // 2:
                    time.sleep(0.002)
                    saving.commit(at)
            self._count("saved", len(saving))


def main() -> None:
    socket, seed, reconnect_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    with Client.connect(
        socket, timeout_s=max(5.0, reconnect_s), reconnect_s=reconnect_s, populate=False
    ) as client:
        one = LoadingClient(client, seed)
        while not select.select([sys.stdin], [], [], 0)[0]:
            one.turn()
            print(one.counts["turns"], flush=True)
    print(json.dumps({**one.counts, "longest_s": one.longest_s, "errors": one.errors[:5]}))


if __name__ == "__main__":
    main()
