"""A connection that is made, and made again, in the background: nobody waits for the daemon."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import select
import threading
import weakref
from dataclasses import dataclass

from kvtier import Client, KvSpec, KvtierError, Refused
from kvtier.client import Reader, default_socket
from kvtier.space import Space
from kvtier.units import format_bytes
from kvtier_vllm.cores import spread

log = logging.getLogger("vllm.kvtier")

CONNECT_S = 1.0
PAUSE_S = 0.1
PAUSE_MAX_S = 1.0  # between attempts: one costs some 20 us where no daemon listens
REFUSED_MAX_S = 5.0  # where a daemon refuses this client: another version, or too many clients
LOOK_S, LOOK_MAX_S = 0.1, 5.0  # between looks for memory that the daemon adds


@dataclass(slots=True, eq=False)
class Session:
    """A client with the engine's space open. `counted`: its end is among the engine's counts."""

    client: Client
    space: Space
    reader: Reader
    counted: bool = False


class Line:
    """Keeps one session; a thread of its own connects, and waits on the socket for the session's end, so that
    an idle engine is connected again before its next request. `session` is None while there is none, and
    `tried` tells whether that is known. Logs once that the daemon is away, and once that it is back: for all
    of an engine only the scheduler's does so as a warning."""

    def __init__(
        self, socket: str | None, spec: KvSpec, name: str, populate: bool, level: int = logging.INFO,
        engine: str = "",
    ) -> None:  # fmt: skip
        self.session: Session | None = None
        self._first = threading.Event()
        self.why = ""
        self._socket = socket
        self._spec = spec
        self._name = name
        self._engine = engine
        self._populate = populate
        self._level = level
        self._old: Session | None = None
        self._closing = threading.Event()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._bell)
        self._thread = threading.Thread(target=self._run, name="kvtier-line", daemon=True)
        self._thread.start()

    @property
    def tried(self) -> bool:
        return self._first.is_set()

    def first(self) -> Session | None:
        """The session, once the first attempt has ended: for threads that may wait a moment."""
        self._first.wait(2 * CONNECT_S)
        return self.session

    def lost(self, session: Session, why: str) -> None:
        """This session is of no more use: the thread closes it and makes another. Its reader goes on."""
        if self.session is session and not self._closing.is_set():
            self.session, self._old = None, session
            self._say(why)
            self._ring()

    def hurry(self) -> None:
        """Somebody else has reached the daemon: try now."""
        self._ring()

    def close(self) -> None:
        """Connect no more, and hang up."""
        self._closing.set()
        self._ring()
        session, self.session = self.session, None
        if session is not None:
            session.client.close()

    def _ring(self) -> None:
        """Wake the thread."""
        os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        spread()  # mapping a large arena takes seconds of a core
        # No session is kept here: its arena would stay mapped when it is of no more use.
        pause_s = PAUSE_S
        while not self._closing.is_set():
            self._hang_up()
            refused = self._begin()
            if refused is None:
                pause_s = PAUSE_S
                self._stay()
                continue
            # Jitter, so that the ranks of many engines do not come all at once.
            self._wait(-1, pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, REFUSED_MAX_S if refused else PAUSE_MAX_S)
        self._hang_up()

    def _stay(self) -> None:
        """Wait until the session is over: the daemon hangs up, or `lost` or `close` says so. A rank maps what
        the daemon adds to its memory meanwhile, which it tells with an answer."""
        session = self.session
        look_s = LOOK_S if self._populate else None
        while session is not None and self.session is session and not self._closing.is_set():
            # Where `close` has closed it meanwhile, poll tells that there is no such file.
            if self._wait(session.client.fileno(), look_s):
                self.lost(session, "the daemon hung up")
            elif look_s is not None:
                look_s = self._look(session, look_s)

    def _wait(self, fd: int, seconds: float | None) -> bool:
        """Wait for the bell, for so long at most; whether this connection ended. Answers do not wake it."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        if fd >= 0:
            poll.register(fd, select.POLLRDHUP)
        events = dict(poll.poll(None if seconds is None else seconds * 1000))
        if self._bell in events:
            os.eventfd_read(self._bell)
        return fd in events

    def _look(self, session: Session, look_s: float) -> float | None:
        """Ping, and so map the extents that were added; return when to look again, None once no extent was
        added for some seconds."""
        extents = session.reader.extents
        try:
            session.client.ping()
        except KvtierError as error:
            if session.client.link.connection.broken:
                self.lost(session, str(error))
        if session.reader.extents > extents:
            return LOOK_S
        return 2 * look_s if look_s < LOOK_MAX_S else None

    def _hang_up(self) -> None:
        # Before the next: that one then tells the daemon that nothing writes the old one's slots.
        old, self._old = self._old, None
        if old is not None:
            old.client.close()

    def _begin(self) -> bool | None:
        """Make a session. None if there is one; else whether a daemon is there, and refuses."""
        try:
            session = self._connected()
        except (KvtierError, OSError) as error:
            self._say(str(error))
            self._first.set()
            return isinstance(error, Refused)
        if self.why:
            log.log(self._level, "kvtier: %s: the daemon is back", self._name)
            self.why = ""
        self._greet(session)
        self.session = session
        self._first.set()
        if self._closing.is_set():
            session.client.close()
        return None

    def _greet(self, session: Session) -> None:
        """Log what this engine is connected to: the scheduler's does, for all ranks."""
        if self._populate:
            return
        client, path = session.client, self._socket or default_socket()
        try:
            tiers = client.stats()["tiers"]
            memory, disk = session.space.kept()
        except KvtierError as error:
            log.info("kvtier: connected to %s; it does not say what it has: %s", path, error)
            return
        sizes = [f"{name} {format_bytes(one['capacity_bytes'])}" for name, one in tiers.items()]
        log.info(
            "kvtier: connected to kvtier %s at %s, tenant %s, %s; of this model (space %s) it has %s blocks"
            " in memory and %s on disk",
            client.daemon_version, path, client.tenant, ", ".join(sizes),
            session.space.identity.hex()[:12], f"{memory:,}", f"{disk:,}",
        )  # fmt: skip

    def _connected(self) -> Session:
        client = Client.connect(
            self._socket, timeout_s=CONNECT_S, populate=self._populate, name=self._name,
            engine=self._engine,
        )  # fmt: skip
        try:
            return Session(client, client.open(self._spec), client.reader())
        except BaseException:
            with contextlib.suppress(KvtierError):
                client.close()
            raise

    def _say(self, why: str) -> None:
        if not self.why:
            log.log(self._level, "kvtier: %s: goes on without: %s", self._name, why)
        self.why = why or "gone"
