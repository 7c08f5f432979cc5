"""The roles of session and server for the modules below them, and refusals that several requests use.

The roles keep the modules of this package in one order: context, turns, requests, session, server.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import msgspec

from kvtier import wire
from kvtier.errors import bad_request
from kvtier.key import KEY_BYTES
from kvtier.wire import LIMIT_OTHERS
from kvtier_daemon.catalog import SessionId
from kvtier_daemon.config.members import Role
from kvtier_daemon.observing.events import EventFeed
from kvtier_daemon.observing.histogram import Latencies
from kvtier_daemon.serving.peer import Peer
from kvtier_daemon.serving.recorder import Recorder
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.base import Descriptors
from kvtier_daemon.tiers.hot import HotTier

LONGEST_WAIT_S = 60.0  # for which a request may wait
Report = dict[str, msgspec.Raw]
# Gets the tenant and the request. None: the answer is sent later.
Handler = Callable[[Any, Any], wire.Reply | None]
Handlers = dict[type[wire.Message], Handler]


class Operated(Protocol):
    """Orders of an operator. Raises KvtierError if an order cannot be carried out."""

    tiers: Collection[str]  # their names

    async def settings(self, order: str) -> dict[str, Any]: ...
    async def tier(self, tier: str, order: str) -> dict[str, Any]: ...


class DescriptorInbox(Protocol):
    """Receives descriptors from a client."""

    def accept_descriptors(self) -> None: ...
    def take_descriptor(self) -> int | None: ...


class Requester(Protocol):
    """The session of a request, which sends its answer."""

    id: SessionId
    name: str
    engine: str
    peer: Peer
    verifies: bool  # its answers with slots contain checksums
    device: bool  # a device writes to its slots

    @property
    def inbox(self) -> DescriptorInbox: ...

    def send(self, message: wire.Message) -> None: ...
    def send_with(self, message: wire.Message, of: Descriptors) -> None:
        """Send this with descriptors, after all earlier messages."""

    def fail(self, request_id: int, code: str, text: str, fatal: bool = False) -> None: ...
    def serve_later(self, request: wire.Request) -> None: ...


class InTurns(Protocol):
    """Divides the loop's time among tenants."""

    def in_turn(self, tenant: str, work: Callable[[], None]) -> None: ...


class Host(Protocol):
    """The parts of the server that requests use."""

    loop: asyncio.AbstractEventLoop
    clock: Callable[[], float]
    stats: Callable[[Tenant | None], Report]
    recorder: Recorder
    operated: Operated | None
    answering: set[asyncio.Task[None]]  # tasks of deferred answers
    tenants: Mapping[str, Tenant]
    events: EventFeed
    latencies: Latencies
    failures: Counter[str]
    hot: HotTier

    @property
    def turns(self) -> InTurns: ...
    def clients(self, tenant: Tenant | None) -> list[dict[str, Any]]: ...


def not_durable(failure: str) -> str:
    """The text of a forget that did not reach the disk."""
    return f"forgotten in memory, but it may return from disk after a restart: {failure}"


def others_of(
    tenant: Tenant, request: wire.MatchPrefix | wire.Load | wire.Prefetch | wire.Forget,
    session: Requester,
) -> list[bytes]:  # fmt: skip
    """Return the keys of the leading blocks of this request under each other secret that its tenant accepts.
    None for users that may not write: a block that is read under another key is saved under the first one.
    Raises Refused if they are not such keys."""
    others, each = request.others, request.other_blocks * KEY_BYTES
    if not others or session.peer.role < Role.WRITE:
        return []
    if (
        len(others) > LIMIT_OTHERS * KEY_BYTES
        or not 0 < each <= len(request.keys)
        or len(others) % each
    ):
        text = (
            f"other keys: {len(others)} bytes for {request.other_blocks} blocks under each secret"
        )
        raise bad_request(text)
    chains = [others[at : at + each] for at in range(0, len(others), each)]
    return chains if len(chains) == len(tenant.accepted) else []  # not those of an earlier start
