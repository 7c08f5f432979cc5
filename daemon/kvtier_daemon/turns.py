"""Whose requests are served next, and whose are received: tenants take turns, however many connections each
has, and divide the memory that requests are received into.

A turn is an iteration of the loop. In each a tenant is served for TURN_S, or for one request if that takes
longer; what it takes beyond is taken off its next turns (deficit round robin). While no tenant exceeds that,
nothing is queued, and no iteration is added.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from kvtier.wire import LIMIT_FRAME_BYTES

if TYPE_CHECKING:
    from kvtier_daemon.session import Session

TURN_S: Final = 0.001
DEBT_S: Final = 0.1  # more than this is forgiven
RECEIVING_BYTES: Final = 64 << 20  # of all tenants' requests that have come in part
UNSENT_BYTES: Final = 64 << 20  # of all tenants' answers that clients have not taken


class Share:
    """One tenant's part of the loop's time, and of the memory for requests and answers."""

    __slots__ = (
        "is_unread", "receiving_bytes", "room_for", "unanswered", "unsent_bytes", "used_s", "waiting",
    )  # fmt: skip

    def __init__(self) -> None:
        self.used_s = 0.0  # in this turn, and what is owed of earlier ones
        self.waiting: deque[Session] = deque()  # to be served
        self.receiving_bytes = 0  # promised to requests that have come in part
        self.room_for: deque[Session] = deque()  # whose requests wait for such a promise
        self.unsent_bytes = 0
        self.is_unread = False  # so many bytes that no further answers are made
        self.unanswered: deque[Session] = deque()  # to be served once fewer bytes wait


class Turns:
    """Of one daemon. `shares` is how many tenants divide the memory."""

    def __init__(self, loop: asyncio.AbstractEventLoop, shares: int) -> None:
        self._loop = loop
        self._receiving_most = max(LIMIT_FRAME_BYTES, RECEIVING_BYTES // shares)
        self._unsent_most = max(LIMIT_FRAME_BYTES, UNSENT_BYTES // shares)
        self._busy: dict[Share, None] = {}  # those that wait, or have used up their turn
        self._scheduled = False
        self.rounds = 0

    def used_up(self, share: Share) -> None:
        """Its turn may be over: others are served before it goes on."""
        if share.used_s >= TURN_S:
            share.used_s = min(share.used_s, DEBT_S)
            self._see_to(share)

    def wait(self, share: Share, session: Session) -> None:
        """Serve this session when it is its tenant's turn."""
        share.waiting.append(session)
        self._see_to(share)

    def _see_to(self, share: Share) -> None:
        self._busy[share] = None
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._round)

    def _round(self) -> None:
        """Give each that is busy its turn."""
        self._scheduled = False
        self.rounds += 1
        for share in list(self._busy):
            share.used_s = max(0.0, share.used_s - TURN_S)
            while share.waiting and share.used_s < TURN_S:
                share.waiting.popleft().turn()
            if share.used_s < TURN_S:
                del self._busy[share]
        if self._busy and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._round)

    # --- memory ------------------------------------------------------------------------------

    def unsent(self, share: Share, nbytes: int) -> None:
        """So many bytes more wait for clients to take them; or fewer."""
        share.unsent_bytes += nbytes
        share.is_unread = share.unsent_bytes > self._unsent_most
        if not share.is_unread:
            while share.unanswered:
                share.unanswered.popleft().answer_again()

    def may_receive(self, share: Share, nbytes: int) -> bool:
        """Whether the rest of a request may come; then it has that memory until `received`."""
        if share.receiving_bytes + nbytes > self._receiving_most:
            return False
        share.receiving_bytes += nbytes
        return True

    def received(self, share: Share, nbytes: int) -> None:
        """It has come, or never will: others may."""
        share.receiving_bytes -= nbytes
        while share.room_for and share.room_for[0].receive_rest():
            share.room_for.popleft()
