"""A client that uses all of the daemon without a pause: `python soaking.py SOCKET SEED`. Ends when its
standard input is closed; raises if a block has wrong bytes."""

from __future__ import annotations

import random
import select
import sys

from kvtier import Client, KvtierError, Refused
from kvtier.space import Space
from support.specs import pattern, spec_of

CHAINS, BLOCKS = 120, 24
MODELS, RARE = 6, 100


def told_to_end() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


class SoakClient:
    def __init__(self, socket: str, seed: int) -> None:
        self._socket = socket
        self._chance = random.Random(seed)
        self._seed = seed
        self._usual = [self._save] * 6 + [self._load] * 12
        self._rare = [self._forget, self._abort, self._pin, self._lease, self._tell, self._expire]

    def connect_once(self) -> None:
        """One connection: it is used for a while, and then closed or lost."""
        chance = self._chance
        client = Client.connect(
            self._socket, populate=False, timeout_s=60, name=f"soak {self._seed}"
        )
        try:
            # Some models come and go: the cache has lost their last blocks when they are used again.
            name = f"soak {chance.randrange(MODELS if chance.random() < 0.9 else RARE)}"
            space = client.open(spec_of(name, layers=chance.choice((1, 2))))
            for _ in range(chance.randrange(10, 60)):
                chance.choice(self._usual if chance.random() < 0.8 else self._rare)(client, space)
            if chance.random() < 0.3:
                client.link.connection.give_up("lost")
        finally:
            client.close()

    def _keys(self, space: Space) -> list[bytes]:
        # Half of the requests are for a tenth of the chains.
        of = CHAINS // 10 if self._chance.random() < 0.5 else CHAINS
        tokens = [self._chance.randrange(of), *range(1, BLOCKS * space.spec.block_tokens)]
        return space.keys(tokens)[: self._chance.randrange(4, BLOCKS)]

    def _save(self, client: Client, space: Space) -> None:
        keys = self._keys(space)
        space.save(keys, [pattern(key, space.spec.block_bytes) for key in keys])

    def _expire(self, client: Client, space: Space) -> None:
        keys = self._keys(space)
        space.save(keys, [pattern(key, space.spec.block_bytes) for key in keys], ttl_s=2.0)

    def _load(self, client: Client, space: Space) -> None:
        keys = self._keys(space)
        with space.load(keys) as blocks:
            copies = [bytes(block) for block in blocks if block is not None]
        # Its end raises StaleLease if a slot was reused meanwhile.
        for key, found in zip(keys, copies, strict=False):
            if found != pattern(key, len(found)):
                raise AssertionError(f"wrong bytes in block {key.hex()}")

    def _forget(self, client: Client, space: Space) -> None:
        space.forget(self._keys(space))

    def _abort(self, client: Client, space: Space) -> None:
        with space.reserve(self._keys(space)):
            pass

    def _pin(self, client: Client, space: Space) -> None:
        keys = self._keys(space)
        space.pin(keys, 1.0)
        space.hint(keys, self._chance.random())
        if self._chance.random() < 0.5:
            space.unpin(keys)

    def _lease(self, client: Client, space: Space) -> None:
        """A lease that ends by its deadline, or with the connection."""
        space.lease(self._keys(space), deadline_ms=200)

    def _tell(self, client: Client, space: Space) -> None:
        client.stats()
        client.explain()
        client.explain(keys=self._keys(space)[:1].packed)


if __name__ == "__main__":
    soaking = SoakClient(sys.argv[1], int(sys.argv[2]))
    while not told_to_end():
        try:
            soaking.connect_once()
        except Refused as error:
            if error.code not in ("disk_failed", "too_many"):
                raise
        except KvtierError as error:
            print(error, file=sys.stderr)
