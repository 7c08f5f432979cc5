"""The spaces of one tenant: their sessions, and which of them have blocks in the store."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.errors import Refused, bad_request
from kvtier.key import KEY_BYTES
from kvtier.layout import KINDS, KvSpec
from kvtier.recompute import predict
from kvtier.wire import LIMIT_KEYS, LIMIT_LOOKS
from kvtier_daemon.catalog.leases import NOBODY, SessionId
from kvtier_kernels import Store

if TYPE_CHECKING:
    from kvtier_daemon.catalog.watch import SpaceWatch

IDENTITY = struct.Struct("<IIIB3x32s32s")  # space, group, shard, whether a parent, key, parent
IDENTITY_BYTES = IDENTITY.size
LIMIT_SPACES = 4096


@dataclass(slots=True)
class KnownSpace:
    """One model configuration of this tenant. `number` names it on the wire and is never reused. `index` is
    the store's number while the space has blocks. It refers to no part of the daemon, but `Lookup` to it."""

    number: int
    identity: bytes
    spec: KvSpec
    places: int
    block_bytes: tuple[int, ...]  # of one shard's part of a block, by group
    users: set[SessionId] = field(default_factory=set)
    index: int = -1
    prefill: tuple[float, float] | None = None  # seconds per token, and per token before it
    used_tokens: int = 0  # as clients report when they release leases
    loaded_bytes: int = 0
    family: bytes | None = None  # once it is computed
    reach: int = field(init=False)  # how many blocks before a block one call may visit

    def __post_init__(self) -> None:
        self.reach = min(LIMIT_KEYS, LIMIT_LOOKS // self.places)

    def recompute_s(self, blocks: int, before: int) -> float:
        """How long computing these blocks takes after `before` others; infinite if no client reported it."""
        if self.prefill is None:
            return float("inf")
        tokens = self.spec.block_tokens
        return predict(self.prefill, blocks * tokens, before * tokens)

    def place_of(self, group: int, shard: int) -> int:
        """The index of this group and shard among the space's places."""
        if not group:
            return shard
        return sum(one.shards for one in self.spec.cache_groups[:group]) + shard

    def check_keys(self, keys: bytes) -> None:
        """Raise Refused unless these are whole keys, and as many as one request may have."""
        if len(keys) % KEY_BYTES == 0 and len(keys) <= self.reach * KEY_BYTES:
            return
        blocks, rest = divmod(len(keys), KEY_BYTES)
        if rest or blocks > LIMIT_KEYS:
            text = (
                f"keys: got {len(keys)} bytes, expected at most {LIMIT_KEYS} keys of "
                f"{KEY_BYTES} bytes each"
            )
            raise bad_request(text)
        looks = blocks * self.places
        text = f"{looks} keys times groups times shards, at most {LIMIT_LOOKS}: split the request"
        raise bad_request(text)

    def check_place(self, group: int, shard: int) -> None:
        groups = self.spec.cache_groups
        if not (0 <= group < len(groups) and 0 <= shard < groups[group].shards):
            raise bad_request(f"the space has no group {group}, shard {shard}")


class SpaceTable:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._of: dict[int, KnownSpace] = {}
        self._by_identity: dict[bytes, KnownSpace] = {}
        self._by_index: dict[int, KnownSpace] = {}
        self._next = 0
        self.watches: dict[int, dict[SessionId, SpaceWatch]] = {}  # by the number of the space
        self.keep: Callable[[], None] = lambda: None  # called before a space gets its first block

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[KnownSpace]:
        return iter(self._of.values())

    def open(self, identity: bytes, spec: KvSpec, session: SessionId = NOBODY) -> KnownSpace:
        """The space of this identity; created at its first use. It replaces a space that was restored at the
        start with the same identity and another description."""
        space = self._by_identity.get(identity)
        if space is None or space.spec != spec:
            if len(self._of) >= LIMIT_SPACES:
                self.retire(list(self._of.values()))
            if len(self._of) >= LIMIT_SPACES:
                raise Refused("too_many", f"this tenant has {LIMIT_SPACES} spaces already")
            space = KnownSpace(self._next, identity, spec, spec.places, sizes_of(spec))
            self._next += 1
            self._of[space.number] = self._by_identity[identity] = space
        space.users.add(session)
        return space

    def restore(self, number: int, identity: bytes, spec: KvSpec) -> KnownSpace:
        """The space that had this number in an earlier daemon, with a place in the store."""
        space = KnownSpace(number, identity, spec, spec.places, sizes_of(spec))
        self._next = max(self._next, number + 1)
        self._of[number] = self._by_identity[identity] = space
        self.settle(space)
        return space

    def at(self, number: int) -> KnownSpace:
        """The space of this number. Numbers are never reused."""
        space = self._of.get(number)
        if space is None:
            text = (
                f"space {number} was never opened, or was removed because it was empty and unused"
            )
            raise Refused("unknown_space", text)
        return space

    def named(self, identity: bytes) -> KnownSpace | None:
        """The space of this identity, if there is one."""
        return self._by_identity.get(identity)

    def at_index(self, index: int) -> KnownSpace:
        """The space with this number in the store."""
        return self._by_index[index]

    @property
    def watched(self) -> bool:
        return any(self.watches.values())

    def settle(self, space: KnownSpace) -> None:
        """Add the space to the store, because a save to it follows."""
        if space.index < 0:
            self._add(space)
            self._by_index[space.index] = space
            self.keep()

    def _add(self, space: KnownSpace) -> None:
        spec = space.spec
        groups = [
            (KINDS.index(group.kind), group.window_blocks(spec.block_tokens), nbytes)
            for group, nbytes in zip(spec.cache_groups, space.block_bytes, strict=True)
        ]  # fmt: skip
        shards = [group.shards for group in spec.cache_groups]
        try:
            space.index = self._store.add_space(groups, shards, space.number)
        except ValueError:
            self.retire([other for other in self._of.values() if other is not space])
            try:
                space.index = self._store.add_space(groups, shards, space.number)
            except ValueError as error:
                raise Refused("too_many", f"this tenant's spaces: {error}") from error

    def unsettle(self, space: KnownSpace) -> bool:
        """Remove the space from the store if it has no blocks."""
        if space.index >= 0 and self._store.drop_space(space.index):
            del self._by_index[space.index]
            space.index = -1
        return space.index < 0

    def leave(self, session: SessionId) -> None:
        """The session stops using its spaces."""
        left = [space for space in self._of.values() if session in space.users]
        for space in left:
            space.users.discard(session)
            self.watches.get(space.number, {}).pop(session, None)
        self.retire(left)

    def leave_one(self, session: SessionId, space: KnownSpace) -> None:
        """The session stops using this space."""
        space.users.discard(session)
        self.retire([space])

    def retire(self, spaces: Iterable[KnownSpace]) -> None:
        """Remove those of these spaces that no session uses and that have no blocks."""
        for space in spaces:
            if not space.users and self.unsettle(space):
                del self._of[space.number]
                self.watches.pop(space.number, None)
                if self._by_identity.get(space.identity) is space:
                    del self._by_identity[space.identity]


def sizes_of(spec: KvSpec) -> tuple[int, ...]:
    """Return the bytes of a block of one shard, by group."""
    return tuple(map(spec.group_block_bytes, range(len(spec.cache_groups))))
