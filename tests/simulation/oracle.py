"""What the daemon may answer, from what clients asked and got. Knows nothing of the daemon's inside."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .virtual import CLOCK

if TYPE_CHECKING:
    from .machine import Machine

UNIT = struct.Struct("<QQ")
OTHER_BITS = 0x5EED_0F_5EED_0F_5EED
Place = tuple[int, int, int, int, bytes]  # tenant, space, group, shard, key
NEVER = float("inf")


@dataclass(slots=True)
class Value:
    """One content of a block, which only one save wrote."""

    number: int
    place: Place
    run: int  # of the daemon that granted its slot
    commit_sent: bool = False
    committed_at: float = NEVER  # when the commit was answered
    forgotten_at: float = NEVER  # when a forget after the commit was answered
    expires_at: float = NEVER
    is_kept_only_in_memory: bool = False


@dataclass(slots=True)
class User:
    """Who writes to a slot, until it says so, or reads it under a lease with this deadline."""

    page: int  # the first of its slot
    generation: int
    writes: bool
    deadline: float

    @property
    def is_protected(self) -> bool:
        return self.writes or self.deadline > CLOCK.now


@dataclass(slots=True)
class Pin:
    """A prefix that must be found until then."""

    space: int
    keys: list[bytes]
    answered_at: float
    until: float


def content(number: int, nbytes: int) -> bytes:
    return UNIT.pack(number, number ^ OTHER_BITS) * (nbytes // UNIT.size)


class Oracle:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._values: dict[int, Value] = {}
        self._of: defaultdict[Place, list[Value]] = defaultdict(list)
        # Who uses a page of an extent; of a memfd, which a daemon may leave to the next one.
        self._users: dict[tuple[int, int], dict[int, User]] = {}
        self._last_user = 0
        self.expiring: set[int] = set()  # tenants with blocks that expire
        self.pins: defaultdict[int, list[Pin]] = defaultdict(list)
        # The requests in progress that may end pins, by tenant.
        self._unpinning: defaultdict[int, set[int]] = defaultdict(set)
        self._last_unpin = 0
        self.loads = self.blocks_loaded = 0

    # --- values ------------------------------------------------------------------------------

    def new_value(self, place: Place, run: int) -> Value:
        value = Value(len(self._values) + 1, place, run)
        self._values[value.number] = value
        self._of[place].append(value)
        return value

    def permits(self, value: Value, asked_at: float, run: int) -> str:
        """Why a load that was asked then must not return this value; empty if it may."""
        if not value.commit_sent:
            return "was never committed"
        if value.forgotten_at < asked_at:
            return f"was forgotten at {value.forgotten_at:.3f}"
        if value.expires_at < asked_at:
            return f"has expired at {value.expires_at:.3f}"
        if value.is_kept_only_in_memory and run != value.run and not self._machine.config.keep_s:
            return "expires, and was kept after a restart"
        return ""

    def check_block(self, data: bytes, place: Place, asked_at: float, run: int, how: str) -> None:
        """Check the bytes that a client read from a slot that it had a right to read."""
        self.blocks_loaded += 1
        number, other = UNIT.unpack_from(data)
        value = self._values.get(number)
        text = f"{how}: the block {_named(place)}, asked for at {asked_at:.3f},"
        if value is None or other != number ^ OTHER_BITS:
            self._machine.violate(f"{text} has bytes that nobody saved")
        if data != data[: UNIT.size] * (len(data) // UNIT.size):
            self._machine.violate(f"{text} has bytes of several saves")
        if value.place != place:
            self._machine.violate(f"{text} has the bytes of {_named(value.place)}")
        if why := self.permits(value, asked_at, run):
            self._machine.violate(f"{text} has value {number}, which {why}")

    def may_be_present(self, place: Place, asked_at: float, run: int) -> bool:
        """Whether a block may be there. Expired blocks are forgotten in portions, so some may still be."""
        return any(
            not self.permits(value, asked_at, run) or value.expires_at < asked_at
            for value in self._of[place]
        )

    def values_of(self, tenant: int, space: int, keys: set[bytes] | None) -> Iterator[Value]:
        for place, values in self._of.items():
            if place[:2] == (tenant, space) and (keys is None or place[4] in keys):
                yield from values

    def committed_before(
        self, tenant: int, space: int, keys: set[bytes] | None, at: float
    ) -> list[Value]:
        """The values that a forget which is asked then removes for good, if it is answered."""
        return [one for one in self.values_of(tenant, space, keys) if one.committed_at < at]

    def forgotten(self, values: list[Value]) -> None:
        for value in values:
            value.forgotten_at = min(value.forgotten_at, CLOCK.now)

    # --- slots -------------------------------------------------------------------------------

    def use(
        self, memory: int, pages: range, new: User, generation_of: Callable[[int], int], where: str
    ) -> int:
        """Somebody uses these pages of an extent from now on; nobody else may write to them. Readers whose
        lease has ended must find another generation. Return a number for `end_use`."""
        self._last_user += 1
        for page in pages:
            users = self._users.setdefault((memory, page), {})
            for user, one in users.items():
                if not (new.writes or one.writes):
                    continue
                what = f"page {page} of {where}"
                given = f"was given to another {'writer' if new.writes else 'reader'}"
                if one.is_protected:
                    how = "written" if one.writes else "read under a lease"
                    self._machine.violate(f"{what} is {how} by user {user} and {given}")
                if generation_of(one.page) == one.generation:
                    self._machine.violate(
                        f"{what} {given}, and user {user}, whose lease has ended, cannot see that"
                    )
            users[self._last_user] = new
        return self._last_user

    def end_use(self, memory: int, pages: range, user: int) -> None:
        for page in pages:
            self._users.get((memory, page), {}).pop(user, None)

    def end_reads(self) -> None:
        """The daemon has ended, and all read leases with it: a client may learn that late. Its writers keep
        their slots in memory that is kept."""
        for users in self._users.values():
            for one in users.values():
                one.deadline = min(one.deadline, CLOCK.now)

    # --- pins --------------------------------------------------------------------------------

    def check_found(
        self, tenant: int, space: int, keys: list[bytes], asked_at: float, ready: int
    ) -> None:
        """A lookup found `ready` blocks: pinned blocks must be among them."""
        self.loads += 1
        if tenant in self.expiring:
            return  # while expired blocks are forgotten, no block is found
        for pin in self.pins[tenant]:
            if pin.space == space and pin.answered_at < asked_at and pin.until > CLOCK.now:
                count = len(pin.keys)
                if keys[:count] == pin.keys and ready < count:
                    self._machine.violate(
                        f"{count} blocks of space {space} were pinned at {pin.answered_at:.3f}, and {ready} "
                        "are found"
                    )

    def unpins(self, tenant: int) -> int:
        """A request is asked that may end pins of this tenant, from now on until it is answered. Return its
        number for `unpinned` and `pinned`."""
        self._last_unpin += 1
        self._unpinning[tenant].add(self._last_unpin)
        self.pins[tenant].clear()
        return self._last_unpin

    def unpinned(self, tenant: int, number: int) -> None:
        self._unpinning[tenant].discard(number)
        self.pins[tenant].clear()

    def pinned(self, tenant: int, number: int, pin: Pin) -> None:
        """The pin with this number was answered. Another request that may end it was not asked since, and
        is not in progress: the daemon may carry it out after the pin, also if its client has gone."""
        if number == self._last_unpin and not self._unpinning[tenant]:
            self.pins[tenant].append(pin)

    def restarted(self) -> None:
        """Pins are not checked after a restart. Answers of the last daemon may still arrive."""
        self._last_unpin += 1
        self._unpinning.clear()
        self.pins.clear()


def _named(place: Place) -> str:
    tenant, space, group, shard, key = place
    return f"tenant {tenant} space {space} group {group} shard {shard} key {key.hex()[:8]}"
