"""The spaces of one tenant: who uses them, and which of them the store knows."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.catalog.leases import SessionId
from kvtier.errors import Refused
from kvtier.key import KEY_BYTES
from kvtier.layout import KINDS, KvSpec
from kvtier.planning.recompute import predict
from kvtier.wire import LIMIT_KEYS, LIMIT_LOOKS
from kvtier_kernels import Store

if TYPE_CHECKING:
    from kvtier.catalog.changes import Watch

IDENTITY = struct.Struct("<IIIB3x32s32s")  # space, group, shard, whether a parent, key, parent
IDENTITY_BYTES = IDENTITY.size
LIMIT_SPACES = 4096


@dataclass(slots=True)
class Space:
    """One model configuration of this tenant. `number` is its name on the wire and never another's;
    `index` the store's, while something is kept there."""

    number: int
    identity: bytes
    spec: KvSpec
    places: int
    users: set[SessionId] = field(default_factory=set)
    index: int = -1
    watches: dict[SessionId, Watch] = field(default_factory=dict)
    prefill: tuple[float, float] | None = None  # seconds a token, and for each token before it
    used_tokens: int = 0  # as its clients report when they release their leases
    loaded_bytes: int = 0

    def recompute_s(self, blocks: int, before: int) -> float:
        """What computing so many blocks takes after others; without limit where nobody has said."""
        if self.prefill is None:
            return float("inf")
        tokens = self.spec.block_tokens
        return predict(self.prefill, blocks * tokens, before * tokens)

    def place_of(self, group: int, shard: int) -> int:
        """Where this group and shard are among the space's places."""
        return sum(one.shards for one in self.spec.cache_groups[:group]) + shard

    @property
    def reach(self) -> int:
        """How far up a chain one look may go."""
        return min(LIMIT_KEYS, LIMIT_LOOKS // self.places)

    def check_keys(self, keys: bytes) -> None:
        if len(keys) % KEY_BYTES or len(keys) > LIMIT_KEYS * KEY_BYTES:
            text = f"{len(keys)} bytes of keys: {KEY_BYTES} each, at most {LIMIT_KEYS} keys"
            raise Refused("bad_request", text)
        looks = len(keys) // KEY_BYTES * self.places
        if looks > LIMIT_LOOKS:
            text = f"{looks} keys times groups times shards, at most {LIMIT_LOOKS}: ask in parts"
            raise Refused("bad_request", text)

    def check_place(self, group: int, shard: int) -> None:
        groups = self.spec.cache_groups
        if not (0 <= group < len(groups) and 0 <= shard < groups[group].shards):
            raise Refused("bad_request", f"the space has no group {group}, shard {shard}")


class Spaces:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._of: dict[int, Space] = {}
        self._by_identity: dict[bytes, Space] = {}
        self._by_index: dict[int, Space] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[Space]:
        return iter(self._of.values())

    def open(self, identity: bytes, spec: KvSpec, session: SessionId) -> Space:
        """The space of this identity, made on first sight. One that a start found under another description
        is not this space, and is not found by its identity from then on."""
        space = self._by_identity.get(identity)
        if space is None or space.spec != spec:
            if len(self._of) >= LIMIT_SPACES:
                self._retire(list(self._of.values()))
            if len(self._of) >= LIMIT_SPACES:
                raise Refused("too_many", f"this tenant has {LIMIT_SPACES} spaces already")
            space = Space(self._next, identity, spec, spec.places)
            self._next += 1
            self._of[space.number] = self._by_identity[identity] = space
        space.users.add(session)
        return space

    def at(self, number: int) -> Space:
        space = self._of.get(number)
        if space is None:
            text = f"space {number} was never opened, or holds nothing and is used by nobody"
            raise Refused("unknown_space", text)
        return space

    def named(self, identity: bytes) -> Space | None:
        """The space of this identity, if there is one."""
        return self._by_identity.get(identity)

    def at_index(self, index: int) -> Space:
        """The space that the store knows by this number."""
        return self._by_index[index]

    @property
    def watched(self) -> bool:
        return any(space.watches for space in self._of.values())

    def settle(self, space: Space) -> None:
        """Give the space its place in the store: something is about to be saved to it."""
        if space.index < 0:
            self._add(space)
            self._by_index[space.index] = space

    def _add(self, space: Space) -> None:
        spec = space.spec
        groups = [
            (KINDS.index(group.kind), group.window_blocks(spec.block_tokens), spec.group_block_bytes(at))
            for at, group in enumerate(spec.cache_groups)
        ]  # fmt: skip
        shards = [group.shards for group in spec.cache_groups]
        try:
            space.index = self._store.add_space(groups, shards)
        except ValueError:
            self._retire([other for other in self._of.values() if other is not space])
            try:
                space.index = self._store.add_space(groups, shards)
            except ValueError as error:
                raise Refused("too_many", f"this tenant's spaces: {error}") from error

    def unsettle(self, space: Space) -> bool:
        """Take the space from the store, if it holds nothing there."""
        if space.index >= 0 and self._store.drop_space(space.index):
            del self._by_index[space.index]
            space.index = -1
        return space.index < 0

    def leave(self, session: SessionId) -> None:
        """The session uses its spaces no more."""
        left = [space for space in self._of.values() if session in space.users]
        for space in left:
            space.users.discard(session)
            space.watches.pop(session, None)
        self._retire(left)

    def leave_one(self, session: SessionId, space: Space) -> None:
        """The session uses this space no more."""
        space.users.discard(session)
        self._retire([space])

    def _retire(self, spaces: Iterable[Space]) -> None:
        """Those go that nobody uses and that hold nothing."""
        for space in spaces:
            if not space.users and self.unsettle(space):
                del self._of[space.number]
                if self._by_identity.get(space.identity) is space:
                    del self._by_identity[space.identity]
