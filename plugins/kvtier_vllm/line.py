"""A connection that is made, and made again, in the background: nobody waits for the daemon."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from dataclasses import dataclass

from kvtier import Client, KvSpec, KvtierError
from kvtier.client import Reader
from kvtier.space import Space
from kvtier_vllm.cores import spread

log = logging.getLogger("vllm.kvtier")

CONNECT_S = 1.0
PAUSE_S = 0.1
PAUSE_MAX_S = 5.0


@dataclass(slots=True, eq=False)
class Session:
    """A client with the engine's space open."""

    client: Client
    space: Space
    reader: Reader


class Line:
    """Keeps one session; a thread of its own connects. `session` is None while there is none, and `tried`
    tells whether that is known. Says once in the log that the daemon is away, and once that it is back: for
    all of an engine only the scheduler's does so as a warning."""

    def __init__(
        self, socket: str | None, spec: KvSpec, name: str, populate: bool, level: int = logging.INFO
    ) -> None:
        self.session: Session | None = None
        self._first = threading.Event()
        self.why = ""
        self._socket = socket
        self._spec = spec
        self._name = name
        self._populate = populate
        self._level = level
        self._wanted = threading.Event()
        self._old: Session | None = None
        self._closing = threading.Event()
        self._hurry = threading.Event()
        self._wanted.set()
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
            self._wanted.set()

    def hurry(self) -> None:
        """Somebody else has reached the daemon: try now."""
        self._hurry.set()

    def close(self) -> None:
        """Connect no more, and hang up."""
        self._closing.set()
        self._hurry.set()
        self._wanted.set()
        session, self.session = self.session, None
        if session is not None:
            session.client.close()

    def _run(self) -> None:
        spread()  # mapping a large arena takes seconds of a core
        # No session is kept here: its arena would stay mapped when it is of no more use.
        pause_s = PAUSE_S
        while self._wanted.wait() and not self._closing.is_set():
            self._hang_up()
            if self._begin():
                pause_s = PAUSE_S
                continue
            # Jitter, so that the ranks of many engines do not come all at once.
            self._hurry.clear()
            if not self._closing.is_set():
                self._hurry.wait(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
        self._hang_up()

    def _hang_up(self) -> None:
        # Before the next: that one then tells the daemon that nothing writes the old one's slots.
        old, self._old = self._old, None
        if old is not None:
            old.client.close()

    def _begin(self) -> bool:
        """Make a session; whether there is one."""
        try:
            session = self._connected()
        except (KvtierError, OSError) as error:
            self._say(str(error))
            self._first.set()
            return False
        self._wanted.clear()
        if self.why:
            log.log(self._level, "kvtier: %s: the daemon is back", self._name)
            self.why = ""
        self.session = session
        self._first.set()
        if self._closing.is_set():
            session.client.close()
        return True

    def _connected(self) -> Session:
        client = Client.connect(
            self._socket, timeout_s=CONNECT_S, populate=self._populate, name=self._name
        )
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
