"""The blocking client: connect to a daemon and open a space.

Threads may share a client: it sends one request at a time, and copies in parallel. After a fork the child
must connect again: the inherited client, its saves and its leases raise Unavailable.

If the daemon ends and comes back, the client connects again: calls wait for it, and go on. If it does not
come back in time, they raise Unavailable until it does.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvtier import wire
from kvtier.arguments import Checking, seconds
from kvtier.connection import Clock
from kvtier.errors import InvalidArgument, NotReady
from kvtier.layout import KvSpec
from kvtier.link import BothMappings, Caller, Link
from kvtier.loading import Blocks, Lease, Reader
from kvtier.saving import Saved, Saving
from kvtier.space import Change, Changes, Match, Pinned, Space
from kvtier.units import format_bytes

DEFAULT_SOCKET = "/run/kvtier/kvtier.sock"
LEAST_TIMEOUT_S = 0.001
RECONNECT_S = 2.0
TIERS_S, LOOK_S = 30.0, 0.02

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
    """A connection to the daemon, and a mapping of the tenant's arena.

    Use it as a context manager, or call `close`.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._end_daemon: Callable[[], object] | None = None

    def __repr__(self) -> str:
        state = "closed" if self.link.is_closed else f"tenant {self.tenant}"
        return f"<client of {self.socket}, {state}>"

    @property
    def socket(self) -> str:
        """The path of the daemon's socket."""
        return self.link.caller.path

    @property
    def device(self) -> bool:
        """Whether it has declared that a device copies into the slots of its saves."""
        return self.link.caller.device

    @property
    def tenant(self) -> str:
        """The name of the tenant."""
        return self.link.welcome.tenant

    @property
    def daemon_version(self) -> str:
        """The version of the daemon."""
        return self.link.welcome.version

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
        verify: bool = False,
        reconnect_s: float = RECONNECT_S,
        clock: Clock = time.monotonic,
        device: bool = False,
    ) -> Client:
        """Connect to the daemon at `socket`. None means $KVTIER_SOCKET, then the socket of a daemon of this
        user, then /run/kvtier/kvtier.sock.

        `timeout_s` is the time limit of every request. `read_only` maps the arena read-only; such a client
        cannot save. `populate` maps the pages of the arena in advance. `name` is what `kvtier status` shows.
        Processes of one engine pass the same `engine`, and the daemon counts them as one. With `verify`,
        loads compare each block with the checksum of its save: a block that another client of the tenant has
        overwritten is a miss, and the daemon forgets it. Blocks saved without a checksum are not compared.
        `device` declares that a device copies into the slots of saves. Copies that it has begun may outlive
        this process, so the daemon reuses those slots only 2 seconds after its end.

        If the daemon ends, a call waits up to `reconnect_s` for one that comes back, and goes on there; after
        that, calls try once and raise Unavailable. With 0 the client never connects again.
        Raises Unavailable if no daemon answers, and Refused if the daemon refuses this client.
        """
        if socket in ("", b""):
            raise InvalidArgument("socket: is empty; None is the default socket")
        with Checking("socket"):
            path = os.fsdecode(default_socket() if socket is None else socket)
            os.fsencode(path)
        caller = Caller(
            path, clock, seconds("timeout_s", timeout_s, least=LEAST_TIMEOUT_S),
            seconds("reconnect_s", reconnect_s), read_only, populate, name or f"pid {os.getpid()}", engine,
            verify, device,
        )  # fmt: skip
        return cls(Link(caller))

    @classmethod
    def embedded(
        cls,
        warm: str | int = "1GiB",
        cold: str | os.PathLike[str] | None = None,
        *,
        cold_size: str | int = "8GiB",
        timeout_s: float = 5.0,
        populate: bool = True,
        verify: bool = False,
    ) -> Client:
        """Start a daemon in a child process, with this much memory, and connect to it. It ends when this
        client is closed, and when this process ends. For notebooks, scripts and tests: it needs no service
        and no configuration.

        `cold` is a folder for blocks on disk, of at most `cold_size`. It is created if it does not exist. The
        daemon writes to it all blocks that are only in memory before it ends, and a later call with the same
        folder finds them. Only one daemon at a time can use a folder. Other processes of this user can
        connect to the client's `socket`. `timeout_s`, `populate` and `verify` are those of `connect`.

        Returns as soon as all memory is allocated and the folder is searched, or after 30 s.
        Raises ConfigError with the daemon's message if it does not start.
        """
        from kvtier.embedded import EmbeddedDaemon  # not needed with the daemon of the host

        time_limit = seconds("timeout_s", timeout_s, least=LEAST_TIMEOUT_S)
        daemon = EmbeddedDaemon(warm, cold, cold_size)
        caller = Caller(
            daemon.socket, time.monotonic, time_limit, 0.0, False, populate, f"pid {os.getpid()}", "",
            verify, True,
        )  # fmt: skip
        client = daemon.connected(lambda: cls(Link(caller)))
        client._end_daemon = weakref.finalize(client, daemon.end)
        _await_tiers(client, time.monotonic() + TIERS_S)
        return client

    def open(self, spec: KvSpec) -> Space:
        """Return the space of this description, which clients of a tenant share. Creates it if it is new."""
        if not isinstance(spec, KvSpec):
            raise InvalidArgument(f"spec: expected a KvSpec, got {type(spec).__name__}")
        link, spaces = self.link, []

        def take(opened: wire.Opened, _: BothMappings) -> None:
            spaces.append(Space(link, spec, opened))
            link.spaces.add(spaces[0])

        link.ask(wire.Open(link.new_id(), spec.checked()), wire.Opened, take)
        return spaces[0]

    def stats(self) -> dict[str, Any]:
        """Return what `kvtier status --json` prints."""
        return _report(self.link, wire.Stats(self.link.new_id()))

    def explain(self, lookup: int = 0, keys: bytes = b"") -> dict[str, Any]:
        """Return what `kvtier explain --json` prints: for the lookup with this number, for these keys
        (packed), or for the last lookups."""
        return _report(self.link, wire.Explain(self.link.new_id(), lookup, keys))

    def record(self, limit_bytes: int = 0, stop: bool = False) -> dict[str, Any]:
        """Start to record lookups into a file of at most `limit_bytes`, or `stop` the recording. With
        neither, change nothing. Returns the state of the recording, as `kvtier record --json` prints it.

        Only root and the daemon's user may call this.
        """
        return _report(self.link, wire.Record(self.link.new_id(), limit_bytes, stop))

    def settings(self, order: str = "show") -> dict[str, Any]:
        """Read or reload the configuration. "show" returns the values in force, "diff" the differences
        between them and the files, "reload" applies the files, "log" returns the last lines of the log.

        Only root and the daemon's user may call this.
        """
        return _report(self.link, wire.Settings(self.link.new_id(), order))

    def tier(self, tier: str, order: str = "status") -> dict[str, Any]:
        """Drain a tier ("warm", "cold" or "remote"), switch it "off" or "on", or return its "status". Or let
        the remote tier write all blocks in memory and on disk to the store ("hand-over"), or read what other
        hosts want ("warm-up").
        Returns the status at once; call again with "status" to follow the progress.

        Only root and the daemon's user may call this.
        """
        return _report(self.link, wire.Tier(self.link.new_id(), tier, order))

    def ping(self) -> None:
        """Send an empty request and wait for the answer."""
        self.link.ask(wire.Ping(self.link.new_id()), wire.Done)

    def wait_ready(self, timeout_s: float = 60.0) -> int:
        """Wait until the daemon has allocated all of its memory. Returns the bytes of this tenant, which are
        fewer than configured if the machine has less memory.

        Raises NotReady after `timeout_s`, after which the client can still be used. Raises Unavailable if
        the daemon ends.
        """
        clock = self.link.connection.clock
        until = clock() + seconds("timeout_s", timeout_s)
        while self.link.wait_for_growth(until):
            if clock() >= until:
                have = format_bytes(self.link.arena.nbytes)
                text = (
                    f"memory is not complete after {timeout_s:g} s: this tenant has {have} so far"
                )
                raise NotReady(f"{text}; wait longer, or see `kvtier status`")
        return self.link.arena.nbytes

    def adopt(self, token: bytes, shards: Sequence[int] = (0,)) -> Lease:
        """Join the lease with this token, which another process of the tenant holds, and return the slots of
        `shards`. The lease ends when all holders have released it, or at its deadline.

        Raises Refused if the lease has ended.
        """
        with Checking("shards"):
            request = wire.Adopt(self.link.new_id(), token, list(shards))
        return Lease.of(self.link, request)

    def reader(self) -> Reader:
        """Return a reader for slots that another client of this tenant received in a lease."""
        return Reader(self.link.mappings, self.link.welcome.daemon)

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when `poll` has an answer, or when the daemon has
        ended. For `select` and event loops. It is another one after the client has connected again."""
        return self.link.connection.fileno()

    @property
    def awaits(self) -> bool:
        """Whether a request of a `begin_` method is not answered yet. `poll` sends and receives."""
        return self.link.awaits

    def poll(self) -> dict[int, Answer]:
        """Return the answers that have arrived for requests of `begin_` methods, by ticket. Never waits,
        neither for the daemon nor for another thread of this client; returns {} instead."""
        replies, mappings = self.link.poll()
        return {
            ticket: _answer(self.link, ticket, mappings, asked, reply)
            for ticket, (asked, reply) in replies.items()
        }

    def close(self) -> None:
        """Release all leases and close the connection. Views of slots become invalid.

        A save that is running in another thread fails. Its slots are given back after it has ended. An
        embedded daemon ends.
        """
        self.link.close()
        if self._end_daemon is not None:
            self._end_daemon()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _await_tiers(client: Client, until: float) -> None:
    """Wait until all memory is allocated, and the blocks from before the daemon's start are found."""
    while client.link.wait_for_growth(until) and time.monotonic() < until:
        pass
    while client.stats()["tiers"].get("cold", {}).get("state") == "recovering":
        if time.monotonic() > until:
            return
        time.sleep(LOOK_S)


def _answer(
    link: Link, ticket: int, mappings: BothMappings, asked: type[wire.Message], reply: wire.Reply
) -> Answer:
    refused = reply.text if isinstance(reply, wire.Failed) else ""
    if asked is wire.Load:
        nothing = wire.Loaded(ticket, 0, 0, 0.0, 0, b"", [])
        loaded = reply if isinstance(reply, wire.Loaded) else nothing
        return Lease(link, mappings, loaded, refused)
    if asked is wire.Pin:
        return Pinned(reply.blocks if isinstance(reply, wire.Counted) else 0, refused)
    if asked in (wire.Watch, wire.Ping):
        if not isinstance(reply, wire.Changed):
            return Changes([], int(isinstance(reply, wire.Done)), refused)
        changes = [Change(*one) for one in wire.CHANGE.iter_unpack(reply.changes)]
        return Changes(changes, reply.missed)
    if isinstance(reply, wire.Matched):
        return Match(reply.ready, reply.coming, reply.eta_ms, why=reply.why)
    return Match(0, 0, 0.0, refused)


def _report(link: Link, request: wire.Message) -> dict[str, Any]:
    stats = link.ask(request, wire.Report).stats
    return {name: msgspec.msgpack.decode(value) for name, value in stats.items()}


def default_socket() -> str:
    """Return the path that `Client.connect` uses without a `socket`."""
    if named := os.environ.get("KVTIER_SOCKET"):
        return named
    from tempfile import gettempdir  # imported here because it imports a lot

    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    temporary = f"{gettempdir()}/kvtier-{os.geteuid()}"
    folder = f"{runtime}/kvtier" if runtime.startswith("/") else temporary
    own = f"{folder}/kvtier.sock"
    try:
        # Any user can create a folder of that name in the directory of temporary files.
        ours = os.lstat(folder).st_uid == os.geteuid() and os.access(own, os.F_OK)
    except OSError:
        ours = False
    return own if ours else DEFAULT_SOCKET
