"""Finding what is here, and holding it: read leases and pins."""

from __future__ import annotations

import heapq
import secrets
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtier.catalog.blocks import ID_BYTES, Blocks
from kvtier.catalog.departures import EXPIRED
from kvtier.catalog.leases import NOBODY, LeaseId, Leases, SessionId
from kvtier.catalog.spaces import Space
from kvtier.errors import Refused
from kvtier.key import KEY_BYTES
from kvtier.wire import LIMIT_TOLD_SLOTS, Part

LIMIT_HELD_IDS = 1 << 24  # over all leases of a tenant: 64 MiB
LIMIT_LET_GO_IDS = 1 << 17  # by themselves, in one call: some ms. The next call goes on
LIMIT_PINS = 4096
LIMIT_PINNED_IDS = 1 << 17  # one look at all of them takes some ms
LIMIT_PIN_S = 7 * 24 * 3600.0
PIN_SHARE = 0.25
TOKEN_BYTES = 16


@dataclass(slots=True, frozen=True)
class Held:
    """The blocks of one group and shard under a lease, `first` being their place in the prefix."""

    group: int
    shard: int
    first: int
    ids: bytes


@dataclass(slots=True)
class ReadLease:
    """The right to read what it holds, until every holder let go or the deadline passed."""

    id: LeaseId
    token: bytes
    deadline: float
    holders: Counter[SessionId]
    space: Space
    parts: list[Held]
    prefix_blocks: int


@dataclass(slots=True, frozen=True)
class Pin:
    """What a lease of nobody's holds, and what that takes of the arena."""

    ids: array[int]
    nbytes: int


class Reading:
    def __init__(self, blocks: Blocks, leases: Leases) -> None:
        self._blocks = blocks
        self._leases = leases
        self._of: dict[LeaseId, ReadLease] = {}
        self._by_token: dict[bytes, ReadLease] = {}
        self._deadlines: list[tuple[float, LeaseId]] = []
        self._left: deque[tuple[SessionId, LeaseId]] = deque()  # of sessions that are over
        self._pins: dict[LeaseId, Pin] = {}
        self._held_ids = 0

    def find(self, space: Space, keys: bytes) -> tuple[int, int, list[Held]]:
        """How much of the prefix is ready, how much more the disk has, and the blocks that the first is
        restored from."""
        if space.index < 0:
            return 0, 0, []
        ready, restorable, parts = self._blocks.store.match(space.index, keys)
        return ready, restorable - ready, [Held(*part) for part in parts]

    def find_after(self, space: Space, keys: bytes, first: int) -> tuple[int, int, list[Held]]:
        """The same for a client that holds the blocks before `first` itself: they count as ready."""
        ready, coming, parts = self.find(space, keys[first * KEY_BYTES :])
        return first + ready, coming, [replace(held, first=first + held.first) for held in parts]

    def tell(self, parts: Sequence[Held], shards: Sequence[int]) -> tuple[Part, ...]:
        """Where the blocks of these shards lie."""
        told = [held for held in parts if held.shard in shards]
        slots = sum(len(held.ids) for held in told) // ID_BYTES
        if slots > LIMIT_TOLD_SLOTS:
            raise Refused(
                "bad_request", f"{slots} slots in one reply: ask for fewer shards at once"
            )
        store = self._blocks.store
        return tuple(
            Part(held.group, held.shard, held.first, store.slots(held.ids)) for held in told
        )

    # --- leases ------------------------------------------------------------------------------

    def hold(
        self,
        session: SessionId,
        space: Space,
        parts: list[Held],
        prefix_blocks: int,
        deadline: float,
    ) -> ReadLease:
        self._leases.check(session)
        ids_held = sum(len(held.ids) for held in parts) // ID_BYTES
        if self._held_ids + ids_held > LIMIT_HELD_IDS:
            raise Refused("too_many", f"this tenant's leases hold {self._held_ids} blocks already")
        self._blocks.lease([held.ids for held in parts])
        self._held_ids += ids_held
        lease = ReadLease(
            self._leases.make(session), secrets.token_bytes(TOKEN_BYTES), deadline,
            Counter({session: 1}), space, parts, prefix_blocks,
        )  # fmt: skip
        self._of[lease.id] = lease
        self._by_token[lease.token] = lease
        heapq.heappush(self._deadlines, (deadline, lease.id))
        return lease

    def with_token(self, token: bytes) -> ReadLease:
        lease = self._by_token.get(token)
        if lease is None:
            raise Refused("unknown_lease", "no lease has this token: it ended, or never was")
        return lease

    def join(self, session: SessionId, lease: ReadLease) -> None:
        lease.holders[session] += 1
        self._leases.join(session, lease.id)

    def release(self, session: SessionId, lease_id: LeaseId) -> Space | None:
        """End the session's reading under this lease; return its space. One that ran out is no error."""
        lease = self._of.get(lease_id)
        if lease is None:
            if not self._leases.existed(lease_id):
                raise Refused("unknown_lease", f"lease {lease_id} is none to release")
            return None
        if session not in lease.holders:
            raise Refused("unknown_lease", f"lease {lease_id} is not this session's")
        self._let_go(session, lease)
        return lease.space

    def expire(self, now: float) -> int:
        """End the leases whose deadline has passed, and those of sessions that are over; how many ran
        out. Whoever still reads under one sees the slot's generation change if it is given away.

        One call lets go of so many blocks, the next one goes on.
        """
        self._blocks.departures.now = now
        least = self._held_ids - LIMIT_LET_GO_IDS
        self._go_on(least)
        ended = 0
        while self._deadlines and self._deadlines[0][0] <= now and self._held_ids > least:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self._of.get(lease_id)
            if lease is not None:
                if (pin := self._pins.get(lease_id)) is not None:
                    names = self._blocks.store.keys_of(pin.ids.tobytes())
                    self._blocks.departures.note(names, EXPIRED)
                self._end(lease)
                ended += 1
        return ended

    def end_session(self, session: SessionId, leases: Sequence[LeaseId]) -> None:
        """The session lets go of these leases, of as many blocks as one call may; `expire` goes on."""
        self._left += [(session, lease_id) for lease_id in leases]
        self._go_on(self._held_ids - LIMIT_LET_GO_IDS)

    def _go_on(self, least: int) -> None:
        """Let go of what sessions left behind, while more than `least` blocks are held."""
        while self._left and self._held_ids > least:
            session, lease_id = self._left.popleft()
            lease = self._of.get(lease_id)
            if lease is not None and session in lease.holders:
                self._let_go(session, lease, lease.holders[session])

    def _let_go(self, session: SessionId, lease: ReadLease, times: int = 1) -> None:
        lease.holders[session] -= times
        if lease.holders[session] <= 0:
            del lease.holders[session]
            self._leases.leave(session, lease.id)
        if not lease.holders:
            self._end(lease)

    def _end(self, lease: ReadLease) -> None:
        del self._of[lease.id], self._by_token[lease.token]
        self._pins.pop(lease.id, None)
        for session in lease.holders:
            self._leases.leave(session, lease.id)
        self._leases.ended()
        for held in lease.parts:
            self._held_ids -= len(held.ids) // ID_BYTES
            self._blocks.unlease(held.ids)
        # A lease that was released leaves its deadline behind; sweep before they outnumber the living.
        if len(self._deadlines) > 64 + 2 * len(self._of):
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._of]
            heapq.heapify(self._deadlines)

    # --- pins --------------------------------------------------------------------------------

    def pin(self, space: Space, keys: bytes, ttl_s: float, now: float) -> int:
        """Keep the ready prefix for `ttl_s`, as far as pins may go; how many blocks that is.

        It takes the place of pins that hold nothing but blocks of this prefix.
        """
        ready, _, parts = self.find(space, keys[: LIMIT_PINNED_IDS // space.places * KEY_BYTES])
        if not ready:
            return 0
        within = self._pins_that(set(_ids_of(parts)).issuperset)
        kept = [pin for lease_id, pin in self._pins.items() if lease_id not in within]
        store = self._blocks.store
        per_block = sum(
            store.slot_bytes(space.index, at) * group.shards
            for at, group in enumerate(space.spec.cache_groups)
        )
        nbytes = store.counts()["capacity_bytes"] * PIN_SHARE - sum(pin.nbytes for pin in kept)
        ids = LIMIT_PINNED_IDS - sum(len(pin.ids) for pin in kept)
        blocks = max(0, min(ready, int(nbytes // per_block), ids // space.places))
        if blocks < ready:
            # A shorter prefix may need blocks that the longer one did without: what of it is restorable?
            blocks, _, parts = self.find(space, keys[: blocks * KEY_BYTES])
        if not blocks:
            return 0
        if len(kept) >= LIMIT_PINS:
            raise Refused("too_many", f"this tenant has {LIMIT_PINS} pins already")
        lease = self.hold(NOBODY, space, parts, blocks, now + min(ttl_s, LIMIT_PIN_S))
        self._pins[lease.id] = Pin(_ids_of(parts), per_block * blocks)
        for lease_id in within:
            self._end(self._of[lease_id])
        return blocks

    def unpin(self, space: Space, keys: bytes) -> int:
        """End the pins that hold nothing but blocks of this prefix; how many blocks they held."""
        if space.index < 0:
            return 0
        prefix = set(array("I", self._blocks.store.resident(space.index, keys)))
        ended = self._pins_that(prefix.issuperset)
        blocks = sum(self._of[lease_id].prefix_blocks for lease_id in ended)
        for lease_id in ended:
            self._end(self._of[lease_id])
        return blocks

    @property
    def pinned_bytes(self) -> int:
        """What pins keep of the arena."""
        return sum(pin.nbytes for pin in self._pins.values())

    def unpin_forgotten(self) -> None:
        """End the pins that hold a block which is READY no more: forgetting outweighs keeping."""
        ready = self._blocks.store.ready
        for lease_id in self._pins_that(lambda ids: ready(ids.tobytes()) < len(ids)):
            self._end(self._of[lease_id])

    def _pins_that(self, test: Callable[[array[int]], bool]) -> set[LeaseId]:
        return {lease_id for lease_id, pin in self._pins.items() if test(pin.ids)}


def _ids_of(parts: Sequence[Held]) -> array[int]:
    return array("I", b"".join(held.ids for held in parts))
