"""The blocking client: connect to a daemon, open a space. What plugins and scripts use.

Threads may share a client: requests take turns, copies do not. After a fork the child must connect again: its
inherited client, and every save or lease of it, raises Unavailable. A client whose daemon hung, died or
restarted raises Unavailable from then on: make a new one.
"""

from __future__ import annotations

import os
import socket as sockets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from kvtier import wire
from kvtier.arena import Arena
from kvtier.arguments import Checking, seconds
from kvtier.connection import Clock, Connection
from kvtier.errors import InvalidArgument, NotReady, Unavailable
from kvtier.layout import KvSpec
from kvtier.link import Link, Mappings
from kvtier.loading import Blocks, Lease, Reader
from kvtier.saving import Saved, Saving
from kvtier.space import Change, Changes, Match, Pinned, Space
from kvtier.units import format_bytes

DEFAULT_SOCKET = "/run/kvtier/kvtier.sock"
CONNECT_PAUSE_S = 0.005
LEAST_TIMEOUT_S = 0.001

Answer = Match | Lease | Pinned | Changes

__all__ = [
    "Answer",
    "Blocks",
    "Change",
    "Changes",
    "Client",
    "Lease",
    "Match",
    "Pinned",
    "Reader",
    "Saved",
    "Saving",
    "Space",
    "default_socket",
]


class Client:
    """A connection to the daemon and a mapping of this tenant's arena."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.tenant = link.welcome.tenant
        self.daemon_version = link.welcome.version

    @classmethod
    def connect(
        cls,
        socket: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = 5.0,
        read_only: bool = False,
        populate: bool = True,
        name: str = "",
        engine: str = "",
        clock: Clock = time.monotonic,
    ) -> Client:
        """Connect to the daemon at `socket`: if None $KVTIER_SOCKET, then that of a daemon of this
        user, then /run/kvtier/kvtier.sock.

        `engine` is a name that several processes of one engine share: the daemon counts them as one.
        `timeout_s` bounds every request. `read_only` maps the arena for reading only and can't save.
        Raises Unavailable if there is no daemon, Refused if it won't have this client.
        """
        with Checking("socket"):
            path = os.fsdecode(socket or default_socket())
            os.fsencode(path)
        sock = _connected(path, seconds("timeout_s", timeout_s, least=LEAST_TIMEOUT_S), clock)
        connection = Connection(sock, clock, timeout_s)
        arena = Arena(read_only, populate)
        try:
            name = name or f"pid {os.getpid()}"
            return cls(Link(connection, arena, path, name, read_only, engine))
        except BaseException:
            connection.close(farewell=False)
            arena.close()
            raise

    def open(self, spec: KvSpec) -> Space:
        """The space of this description: made on first sight, shared by all who describe it alike."""
        if not isinstance(spec, KvSpec):
            raise InvalidArgument(f"spec: a KvSpec is wanted, not {type(spec).__name__}")
        opened = self.link.ask(wire.Open(self.link.new_id(), spec.checked()), wire.Opened)
        return Space(self.link, spec, opened)

    def stats(self) -> dict[str, Any]:
        """What `kvtier status --json` prints."""
        report = self.link.ask(wire.Stats(self.link.new_id()), wire.Report)
        return {name: msgspec.msgpack.decode(value) for name, value in report.stats.items()}

    def explain(self, lookup: int = 0, keys: bytes = b"") -> dict[str, Any]:
        """What `kvtier explain --json` prints: of a lookup, of keys, or the last lookups."""
        asked = wire.Explain(self.link.new_id(), lookup, keys)
        report = self.link.ask(asked, wire.Report)
        return {name: msgspec.msgpack.decode(value) for name, value in report.stats.items()}

    def record(self, limit_bytes: int = 0, stop: bool = False) -> dict[str, Any]:
        """Have the daemon record what is looked up, up to so many bytes, or stop; neither: how is it? What
        `kvtier record --json` prints."""
        report = self.link.ask(wire.Record(self.link.new_id(), limit_bytes, stop), wire.Report)
        return {name: msgspec.msgpack.decode(value) for name, value in report.stats.items()}

    def settings(self, order: str = "show") -> dict[str, Any]:
        """For who runs the daemon. "show": what it runs with; "diff": what its configuration says otherwise;
        "reload": put that into force; "log": the last lines of its log. What `kvtier config` and
        `kvtier reload` print."""
        report = self.link.ask(wire.Settings(self.link.new_id(), order), wire.Report)
        return {name: msgspec.msgpack.decode(value) for name, value in report.stats.items()}

    def tier(self, tier: str, order: str = "status") -> dict[str, Any]:
        """For who runs the daemon: "drain" a tier ("warm", "cold"), switch it "off" or "on". Answered at
        once with its "status", which says how far that is."""
        report = self.link.ask(wire.Tier(self.link.new_id(), tier, order), wire.Report)
        return {name: msgspec.msgpack.decode(value) for name, value in report.stats.items()}

    def ping(self) -> None:
        """Ask for nothing and wait for the answer."""
        self.link.ask(wire.Ping(self.link.new_id()), wire.Done)

    def wait_ready(self, timeout_s: float = 60.0) -> int:
        """Wait until the daemon has all the memory that it makes at its start; how many bytes of it this
        tenant has. That is less than configured where the machine has less.

        Waits for the daemon's answers. Raises NotReady after `timeout_s`, and Unavailable if the daemon
        goes; after NotReady the client stays usable.
        """
        clock = self.link.connection.clock
        until = clock() + seconds("timeout_s", timeout_s)
        while self.link.wait_for_growth(until):
            if clock() >= until:
                have = format_bytes(self.link.arena.nbytes)
                text = f"memory is not complete after {timeout_s:g} s: {have} of this tenant so far"
                raise NotReady(f"{text}; wait longer, or see `kvtier status`")
        return self.link.arena.nbytes

    def adopt(self, token: bytes, shards: Sequence[int] = (0,)) -> Lease:
        """Join a lease that another process of this tenant holds, by its token. Refused once the lease has
        ended. It ends when all who joined it have released it, and never later than its deadline."""
        mappings = self.link.mappings
        with Checking("shards"):
            request = wire.Adopt(self.link.new_id(), token, list(shards))
        return Lease(self.link, mappings, self.link.ask(request, wire.Loaded))

    def reader(self) -> Reader:
        """What reads slots that another client of this tenant was told of."""
        return Reader(self.link.mappings, self.link.welcome.daemon)

    def fileno(self) -> int:
        """Readable when `poll` may have something to say: an answer, or that the daemon has gone."""
        return self.link.connection.fileno()

    @property
    def awaits(self) -> bool:
        """Something that was begun is still to be answered, or to be sent: `poll` sees to it."""
        return self.link.awaits

    def poll(self) -> dict[int, Answer]:
        """Answers that have come to what was begun (`begin_lease` and its like), by ticket. Never waits, not
        for the daemon and not for another thread of this client: then there is nothing yet."""
        mappings = self.link.mappings
        return {
            ticket: self._answer(ticket, mappings, asked, reply)
            for ticket, (asked, reply) in self.link.replies().items()
        }

    def _answer(
        self,
        ticket: int,
        mappings: tuple[Mappings, Mappings],
        asked: type[wire.Message],
        reply: wire.Reply,
    ) -> Answer:
        refused = reply.text if isinstance(reply, wire.Failed) else ""
        if asked is wire.Load:
            nothing = wire.Loaded(ticket, 0, 0, 0.0, 0, b"", [])
            loaded = reply if isinstance(reply, wire.Loaded) else nothing
            return Lease(self.link, mappings, loaded, refused)
        if asked is wire.Pin:
            return Pinned(reply.blocks if isinstance(reply, wire.Counted) else 0, refused)
        if asked is wire.Watch:
            if not isinstance(reply, wire.Changed):
                return Changes([], 0, refused)
            changes = [Change(*one) for one in wire.CHANGE.iter_unpack(reply.changes)]
            return Changes(changes, reply.missed)
        if isinstance(reply, wire.Matched):
            return Match(reply.ready, reply.coming, reply.eta_ms, why=reply.why)
        return Match(0, 0, 0.0, refused)

    def close(self) -> None:
        """Let everything go. Views of slots are invalid from now on.

        A save that another thread is in the middle of fails; only when it has ended is the daemon told that
        its slots are free.
        """
        self.link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _connected(path: str, timeout_s: float, clock: Clock) -> sockets.socket:
    if "\0" in path:
        raise InvalidArgument(f"socket: {path!r} has a zero byte")
    if (nbytes := len(os.fsencode(path))) > wire.LIMIT_SOCKET_PATH:
        most = wire.LIMIT_SOCKET_PATH
        text = f"{path} has {nbytes} bytes, and a socket's path at most {most}: name a shorter one"
        raise Unavailable(text)
    sock = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    deadline = clock() + timeout_s
    try:
        sock.settimeout(timeout_s)
        while True:
            try:
                sock.connect(path)
                return sock
            except BlockingIOError:
                # The daemon lives, but more are waiting to be let in than its backlog holds.
                if clock() >= deadline:
                    raise
                time.sleep(CONNECT_PAUSE_S)
    except OSError as error:
        sock.close()
        if isinstance(error, PermissionError):
            text = (
                f"uid {os.geteuid()} may not connect to {path}: `kvtier status` says what to change"
            )
        else:
            reason = error.strerror or str(error)
            text = f"no daemon at {path}: {reason}; is `kvtier serve` running?"
        raise Unavailable(text) from error


def default_socket() -> str:
    """Where a daemon is looked for when nobody says where."""
    if named := os.environ.get("KVTIER_SOCKET"):
        return named
    from tempfile import gettempdir  # and what it brings: for those who ask for the usual place

    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    temporary = f"{gettempdir()}/kvtier-{os.geteuid()}"
    folder = f"{runtime}/kvtier" if runtime.startswith("/") else temporary
    own = f"{folder}/kvtier.sock"
    try:
        # Anybody may make a folder of that name among the temporary ones.
        ours = os.lstat(folder).st_uid == os.geteuid() and os.access(own, os.F_OK)
    except OSError:
        ours = False
    return own if ours else DEFAULT_SOCKET
