"""What the daemon may answer, from what clients asked and got. Knows nothing of the daemon's inside."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
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
        # Who uses a page of an extent, by run of the daemon and tenant.
        self._users: dict[tuple[int, int, int, int], dict[int, float]] = {}
        self._last_user = 0
        self.expiring: set[int] = set()  # tenants with blocks that expire
        self.pins: defaultdict[int, list[Pin]] = defaultdict(list)
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
        self, run: int, tenant: int, extent: int, pages: range, until: float, writes: bool
    ) -> int:
        """Somebody uses these pages of an extent from now on; nobody else may write to them. Return a number
        for `end_use`."""
        self._last_user += 1
        for page in pages:
            users = self._users.setdefault((run, tenant, extent, page), {})
            for user, deadline in users.items():
                writer = deadline < 0
                if (writes or writer) and (writer or deadline > CLOCK.now):
                    what = "written" if writer else "read under a lease"
                    self._machine.violate(
                        f"page {page} of extent {extent} of tenant {tenant} is {what} by user {user} and was "
                        f"given to another {'writer' if writes else 'reader'}"
                    )
            users[self._last_user] = -1.0 if writes else until
        return self._last_user

    def end_use(self, run: int, tenant: int, extent: int, pages: range, user: int) -> None:
        for page in pages:
            self._users.get((run, tenant, extent, page), {}).pop(user, None)

    def forget_slots(self) -> None:
        """The memory is gone."""
        self._users.clear()

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

    def unpinned(self, tenant: int) -> None:
        self.pins[tenant].clear()


def _named(place: Place) -> str:
    tenant, space, group, shard, key = place
    return f"tenant {tenant} space {space} group {group} shard {shard} key {key.hex()[:8]}"
