"""Divides the loop's time and the memory for requests among tenants, independent of their connections.

A turn is an iteration of the loop. In each turn a tenant is served for its `turn_s`, or for one request if
that takes longer; the excess is deducted from its next turns (deficit round robin). If no tenant exceeds its
turn, nothing is queued, and no iteration is added. The turns of the tenants with the largest weight last
TURN_S, and those of the others are shorter by their weight: no weight makes another tenant wait longer than
TURN_S.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from kvtier.wire import LIMIT_FRAME_BYTES

TURN_S: Final = 0.001
DEBT_S: Final = 0.1  # a larger excess is ignored
RECEIVING_BYTES: Final = 64 << 20  # of all tenants' incomplete requests
UNSENT_BYTES: Final = 64 << 20  # of all tenants' answers that clients have not received


class HasTurn(Protocol):
    """Waits for its tenant's turn."""

    def turn(self) -> None: ...


@dataclass(slots=True)
class Work:
    """Is done in the tenant's turn."""

    turn: Callable[[], None]


class TurnTaker(HasTurn, Protocol):
    """A session that waits for its turn, for memory, or for clients to receive answers."""

    def receive_rest(self) -> bool: ...
    def answer_again(self) -> None: ...


class Share:
    """One tenant's part of the loop's time, and of the memory for requests and answers."""

    __slots__ = (
        "is_unread", "receiving_bytes", "receiving_most", "room_for", "served_s", "settling", "turn_s",
        "unanswered", "unsent_bytes", "unsent_most", "used_s", "waiting", "weight",
    )  # fmt: skip

    def __init__(self) -> None:
        self.weight = 1
        self.turn_s = TURN_S
        self.receiving_most = self.unsent_most = LIMIT_FRAME_BYTES
        self.served_s = 0.0  # in all turns
        self.used_s = 0.0  # in this turn, and the excess of earlier ones
        self.waiting: deque[HasTurn] = deque()  # to be served
        self.settling: Settling | None = None
        self.receiving_bytes = 0  # reserved for incomplete requests
        self.room_for: deque[TurnTaker] = deque()  # sessions that wait for such memory
        self.unsent_bytes = 0
        self.is_unread = False  # above the limit: no further requests are answered
        # Sessions that wait until fewer bytes are unsent.
        self.unanswered: deque[TurnTaker] = deque()

    def report(self) -> dict[str, float]:
        return {
            "weight": self.weight,
            "served_s": round(self.served_s, 6),
            "message_bytes": self.receiving_bytes + self.unsent_bytes,
            "message_limit_bytes": self.receiving_most + self.unsent_most,
        }


class Turns:
    """The turns of one daemon, and the shares of the tenants with these names and weights. Clients without a
    tenant, which are root and the daemon's user, have the share "" of weight 1."""

    def __init__(self, loop: asyncio.AbstractEventLoop, weights: Mapping[str, int]) -> None:
        self._loop = loop
        self.shares = {name: Share() for name in ("", *weights)}
        self.weigh(weights)
        self._busy: dict[Share, None] = {}  # with waiting sessions, or an excess
        self._scheduled = False
        self.rounds = 0

    def weigh(self, weights: Mapping[str, int]) -> None:
        """Set the weights of tenants. What a tenant uses above its new share stays until it is freed."""
        for name, weight in weights.items():
            self.shares[name].weight = weight
        total = sum(share.weight for share in self.shares.values())
        most = max(share.weight for share in self.shares.values())
        for share in self.shares.values():
            share.turn_s = TURN_S * share.weight / most
            share.receiving_most = max(LIMIT_FRAME_BYTES, RECEIVING_BYTES * share.weight // total)
            share.unsent_most = max(LIMIT_FRAME_BYTES, UNSENT_BYTES * share.weight // total)

    def _used_up(self, share: Share) -> None:
        share.used_s = min(share.used_s, DEBT_S)
        self._schedule(share)

    def wait(self, share: Share, session: HasTurn) -> None:
        """Serve this session when it is its tenant's turn."""
        share.waiting.append(session)
        self._schedule(share)

    def in_turn(self, tenant: str, work: Callable[[], None]) -> None:
        """Do this work when it is the turn of this tenant."""
        self.wait(self.shares[tenant], Work(work))

    def wait_first(self, share: Share, before_others: HasTurn) -> None:
        """The same, before all that wait now."""
        share.waiting.appendleft(before_others)
        self._schedule(share)

    def spend(self, share: Share, seconds: float) -> None:
        """The tenant was served for this time: the others are next if that ends its turn."""
        share.used_s += seconds
        share.served_s += seconds
        if share.used_s >= share.turn_s:
            self._used_up(share)

    def _schedule(self, share: Share) -> None:
        self._busy[share] = None
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._round)

    def _round(self) -> None:
        """Give each busy tenant its turn."""
        self._scheduled = False
        self.rounds += 1
        try:
            for share in list(self._busy):
                share.used_s = max(0.0, share.used_s - share.turn_s)
                while share.waiting and share.used_s < share.turn_s:
                    share.waiting.popleft().turn()
                if share.used_s < share.turn_s:
                    del self._busy[share]
        finally:  # after an exception, the others have their turns
            if self._busy and not self._scheduled:
                self._scheduled = True
                self._loop.call_soon(self._round)

    # --- memory ------------------------------------------------------------------------------

    def unsent(self, share: Share, nbytes: int) -> None:
        """The number of unsent bytes has grown by `nbytes`, or shrunk."""
        share.unsent_bytes += nbytes
        share.is_unread = share.unsent_bytes > share.unsent_most
        if not share.is_unread:
            while share.unanswered:
                share.unanswered.popleft().answer_again()

    def may_receive(self, share: Share, nbytes: int) -> bool:
        """Reserve memory for the rest of a request until `received`. False if there is not enough."""
        if share.receiving_bytes + nbytes > share.receiving_most:
            return False
        share.receiving_bytes += nbytes
        return True

    def received(self, share: Share, nbytes: int) -> None:
        """Free the memory of a request, and let other sessions use it."""
        share.receiving_bytes -= nbytes
        while share.room_for and share.room_for[0].receive_rest():
            share.room_for.popleft()


class DelaysEvents(Protocol):
    def settle_short(self) -> bool: ...
    def settle_portion(self) -> bool: ...


class Settling:
    """Passes to the policy of a tenant what its requests used, after they were answered, and in the tenant's
    turns: the blocks of one request can take several. Its sessions wait until the policy has all of them."""

    def __init__(
        self, turns: Turns, share: Share, uses: DelaysEvents, clock: Callable[[], float]
    ) -> None:
        self._turns = turns
        self._share = share
        self._uses = uses
        self._clock = clock
        self._waits = False

    def settle(self) -> None:
        """At the end of a turn: several requests can arrive at once, and no answer waits for the policy."""
        if not self._uses.settle_short():
            self._wait()

    def turn(self) -> None:
        self._waits = False
        began = self._clock()
        if not self._uses.settle_portion():
            self._wait()
        self._turns.spend(self._share, self._clock() - began)

    def _wait(self) -> None:
        if not self._waits:
            self._waits = True
            self._turns.wait_first(self._share, self)
