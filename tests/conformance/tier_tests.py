"""The contract of tiers. A test class inherits `TierTests` and creates a tier.

A tier may lose any block; it never returns other bytes than those put under that exact identity."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import pytest


@dataclass(frozen=True)
class Identity:
    """Everything that identifies a block's bytes."""

    space: str = "space"
    group: int = 0
    shard: int = 0
    key: bytes = bytes(32)


class Tier(Protocol):
    """A tier, as the tests use it. Blocks of one space have one size, `block_bytes`."""

    capacity_bytes: int
    block_bytes: int

    def put(self, identity: Identity, data: bytes) -> bool:
        """Store a block if there is room, or if another block can be evicted for it. Returns whether it
        was stored."""

    def get(self, identity: Identity) -> bytes | None:
        """The bytes put under this identity, or None."""

    def hold(self, identity: Identity) -> bool:
        """Keep the block from being evicted until `release`. Returns False if it is not stored."""

    def release(self, identity: Identity) -> None: ...

    def forget(self, identity: Identity) -> None:
        """Make the block impossible to find."""

    def used_bytes(self) -> int: ...

    def close(self) -> None: ...


def name(number: int) -> bytes:
    return random.Random(number).randbytes(32)


class TierTests:
    """The contract. A subclass implements `make_tier`, and may add tests."""

    def make_tier(self, folder: Path) -> Tier:
        """A tier with room for 16 to 64 blocks, with two groups and two shards in each space."""
        raise NotImplementedError(type(self).__name__)  # subclasses implement it

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = self.make_tier(tmp_path)
        yield tier
        tier.close()

    def blocks(self, tier: Tier) -> int:
        return tier.capacity_bytes // tier.block_bytes

    def data(self, tier: Tier, number: int) -> bytes:
        return random.Random(f"data {number}").randbytes(tier.block_bytes)

    def test_a_stored_block_is_returned_complete(self, tier: Tier) -> None:
        for number in range(8):
            assert tier.put(Identity(key=name(number)), self.data(tier, number))
        for number in reversed(range(8)):
            assert tier.get(Identity(key=name(number))) == self.data(tier, number)

    def test_a_block_that_was_never_stored_is_not_found(self, tier: Tier) -> None:
        assert tier.get(Identity(key=name(1))) is None
        assert not tier.hold(Identity(key=name(1)))

    @pytest.mark.parametrize(
        "change", [{"space": "other"}, {"group": 1}, {"shard": 1}, {"key": name(9)}], ids=str
    )
    def test_another_identity_is_another_block(self, tier: Tier, change: dict[str, object]) -> None:
        first = Identity(key=name(1))
        second = replace(first, **change)  # type: ignore[arg-type]
        assert tier.put(first, self.data(tier, 1))
        assert tier.get(second) is None
        assert tier.put(second, self.data(tier, 2))
        assert tier.get(first) == self.data(tier, 1)
        assert tier.get(second) == self.data(tier, 2)

    def test_a_block_put_again_keeps_its_bytes(self, tier: Tier) -> None:
        identity = Identity(key=name(1))
        tier.put(identity, self.data(tier, 1))
        tier.put(identity, self.data(tier, 2))
        assert tier.get(identity) == self.data(tier, 1)

    def test_a_full_tier_evicts_old_blocks_for_new_ones(self, tier: Tier) -> None:
        count = 4 * self.blocks(tier)
        for number in range(count):
            assert tier.put(Identity(key=name(number)), self.data(tier, number))
            assert tier.get(Identity(key=name(number))) == self.data(tier, number)
            assert tier.used_bytes() <= tier.capacity_bytes
        assert tier.get(Identity(key=name(0))) is None
        assert tier.used_bytes() >= 0.75 * tier.capacity_bytes

    def test_a_held_block_stays_under_pressure(self, tier: Tier) -> None:
        held = Identity(key=name(10_000))
        tier.put(held, self.data(tier, 10_000))
        assert tier.hold(held)
        for number in range(3 * self.blocks(tier)):
            tier.put(Identity(key=name(number)), self.data(tier, number))
        assert tier.get(held) == self.data(tier, 10_000)
        tier.release(held)
        for number in range(5000, 5000 + 3 * self.blocks(tier)):
            tier.put(Identity(key=name(number)), self.data(tier, number))
        assert tier.get(held) is None

    def test_a_tier_full_of_held_blocks_refuses_new_ones_and_keeps_the_held_ones(
        self, tier: Tier
    ) -> None:
        held = []
        for number in range(4 * self.blocks(tier)):
            identity = Identity(key=name(number))
            if not tier.put(identity, self.data(tier, number)):
                break
            assert tier.hold(identity)
            held.append((identity, number))
        assert len(held) >= self.blocks(tier) // 2
        for identity, number in held:
            assert tier.get(identity) == self.data(tier, number)

    def test_a_forgotten_block_is_not_found_and_can_be_stored_again(self, tier: Tier) -> None:
        identity = Identity(key=name(1))
        tier.put(identity, self.data(tier, 1))
        tier.forget(identity)
        assert tier.get(identity) is None
        assert tier.put(identity, self.data(tier, 2))
        assert tier.get(identity) == self.data(tier, 2)

    def test_any_order_of_operations_gives_right_bytes_or_none(self, tier: Tier) -> None:
        chance = random.Random(4)
        put: dict[Identity, int] = {}
        for turn in range(600):
            identity = Identity(
                space=chance.choice(["space", "other"]), group=chance.randrange(2),
                shard=chance.randrange(2), key=name(chance.randrange(3 * self.blocks(tier))),
            )  # fmt: skip
            found = tier.get(identity)
            if found is not None:
                assert found == self.data(tier, put[identity])
            if chance.random() < 0.2:
                tier.forget(identity)
                assert tier.get(identity) is None
            elif found is None and tier.put(identity, self.data(tier, turn)):
                put[identity] = turn
