"""The connection to the daemon, made and made again in the background: no engine thread waits for it."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import select
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvtier import Client, KvSpec, KvtierError, Refused
from kvtier.client import Reader, default_socket
from kvtier.space import Space
from kvtier.units import format_bytes

log = logging.getLogger("vllm.kvtier")

CONNECT_S = 1.0
PAUSE_S = 0.1
PAUSE_MAX_S = 1.0  # between attempts: one costs about 20 us where no daemon listens
REFUSED_MAX_S = 5.0  # where a daemon refuses this client: another version, or too many clients
NO_DAEMON = (ConnectionRefusedError, FileNotFoundError)  # nobody listens
PING_S, PING_MAX_S = 0.1, 5.0  # between pings that map the memory that the daemon adds
# A match in memory is answered in 0.1 to 0.3 ms. Without its answer a request waits for the next step, which
# takes 2.6 ms in an idle engine and longer in a busy one.
WAIT_IN_STEP_S = 0.001
NODES = Path("/sys/devices/system/node")


@dataclass(slots=True, eq=False)
class DaemonSession:
    """A client with the engine's space open. `counted`: the engine has counted its end."""

    client: Client
    space: Space
    reader: Reader
    counted: bool = False


class Reconnect:
    """Keeps one session. Its thread connects, and waits on the socket for the end of the session, so that
    an idle engine is connected again before its next request.

    `session` is None while disconnected. `tried`: there was one, or no daemon listens, or none has answered
    for `patience_s`. The loss of the daemon and its return are logged once each, as warnings by the
    scheduler's connection only. `populate`: map the arena's pages in advance, as a rank does, which reads
    them. The thread calls `on_idle` from time to time with the session, or None if the daemon has ended, for
    work that the steps of an idle engine do not do. `device`: a device copies into the slots.
    """

    def __init__(
        self, socket: str | None, spec: KvSpec, name: str, populate: bool, level: int = logging.INFO,
        engine: str = "", on_idle: Callable[[DaemonSession | None], None] = lambda _: None,
        verify: bool = False, device: bool = False, patience_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.session: DaemonSession | None = None
        self.tried = False
        self._patient_until = time.monotonic() + patience_s
        self._first_attempt = threading.Event()
        self._lost_reason = ""  # of a loss that was logged
        self._socket = socket
        self._spec = spec
        self._name = name
        self._engine = engine
        self._verify = verify
        self._device = device
        self._populate = populate
        self._level = level
        self._on_idle = on_idle
        self._lost: DaemonSession | None = None
        self._gone = False  # the last session's daemon has ended: it does not only hang
        self._closing = threading.Event()
        self._wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wakeup_fd)
        self._thread = threading.Thread(target=self._run, name="kvtier-connect", daemon=True)
        self._thread.start()

    def wait_first(self) -> DaemonSession | None:
        """Wait for the end of the first attempt, for threads that may wait; return the session."""
        self._first_attempt.wait(2 * CONNECT_S)
        return self.session

    def lost(self, session: DaemonSession, why: str) -> None:
        """Give this session up: the thread closes it and connects again. Its reader remains usable."""
        if self.session is session and not self._closing.is_set():
            self.session, self._lost = None, session
            self._log_lost(why)
            self.retry_now()

    def retry_now(self) -> None:
        """Wake the thread: it connects at once if there is no session."""
        os.eventfd_write(self._wakeup_fd, 1)

    def close(self) -> None:
        """Close the session and stop connecting."""
        self._closing.set()
        self.retry_now()
        session, self.session = self.session, None
        if session is not None:
            session.client.close()

    def _run(self) -> None:
        use_nearby_cores()  # mapping a large arena takes seconds of CPU time
        # No local variable holds the session here: a lost session's arena would stay mapped.
        pause_s = PAUSE_S
        while not self._closing.is_set():
            self._close_lost()
            refused = self._try_connect()
            if refused is None:
                pause_s = PAUSE_S
                self._watch_session()
                continue
            if self._gone:
                self._on_idle(None)
            # Jitter, so that the ranks of many engines do not connect at the same moment.
            self._wait(-1, pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, REFUSED_MAX_S if refused else PAUSE_MAX_S)
        self._close_lost()

    def _watch_session(self) -> None:
        """Wait for the end of the session: the daemon closes it, or `lost` or `close` is called. Meanwhile a
        rank pings, because the daemon announces new extents with an answer."""
        session = self.session
        ping_s = PING_S if self._populate else None
        while session is not None and self.session is session and not self._closing.is_set():
            # If `close` has closed the socket meanwhile, poll reports an invalid descriptor.
            if self._wait(session.client.fileno(), ping_s):
                self.lost(session, "the daemon closed the connection")
            elif ping_s is not None:
                ping_s = self._map_new_extents(session, ping_s)
                self._on_idle(session)

    def _wait(self, fd: int, seconds: float | None) -> bool:
        """Wait until woken, or this long; return whether this connection ended. Answers do not wake."""
        poll = select.poll()
        poll.register(self._wakeup_fd, select.POLLIN)
        if fd >= 0:
            poll.register(fd, select.POLLRDHUP)
        events = dict(poll.poll(None if seconds is None else seconds * 1000))
        if self._wakeup_fd in events:
            os.eventfd_read(self._wakeup_fd)
        return fd in events

    def _map_new_extents(self, session: DaemonSession, ping_s: float) -> float | None:
        """Ping, which maps added extents; return when to ping again, None once none was added for seconds."""
        extents = session.reader.extents
        try:
            session.client.ping()
        except KvtierError as error:
            if session.client.link.connection.broken:
                self.lost(session, str(error))
        if session.reader.extents > extents:
            return PING_S
        return 2 * ping_s if ping_s < PING_MAX_S else None

    def _close_lost(self) -> None:
        # Before the next connection, which tells the daemon that no thread writes the lost session's slots.
        session, self._lost = self._lost, None
        if session is not None:
            session.client.close()
            if not self._populate:
                # The scheduler of an idle engine keeps the session until its next step.
                session.reader.let_go()

    def _try_connect(self) -> bool | None:
        """Make a session. None: there is one; otherwise whether a daemon answered and refused."""
        try:
            session = self._connect()
        except (KvtierError, OSError) as error:
            self._log_lost(str(error))
            self._gone = isinstance(error, Refused) or isinstance(error.__cause__, NO_DAEMON)
            self.tried |= self._gone or time.monotonic() >= self._patient_until
            self._first_attempt.set()
            return isinstance(error, Refused)
        if self._lost_reason:
            log.log(self._level, "kvtier: %s: connected to the daemon", self._name)
            self._lost_reason = ""
        self._log_connected(session)
        self.session, self.tried = session, True
        self._first_attempt.set()
        if self._closing.is_set():
            session.client.close()
        return None

    def _connect(self) -> DaemonSession:
        client = Client.connect(
            self._socket, timeout_s=CONNECT_S, populate=self._populate, name=self._name,
            engine=self._engine, verify=self._verify, reconnect_s=0, device=self._device,
        )  # fmt: skip
        try:
            return DaemonSession(client, client.open(self._spec), client.reader())
        except BaseException:
            with contextlib.suppress(KvtierError):
                client.close()
            raise

    def _log_connected(self, session: DaemonSession) -> None:
        """Log the daemon and its contents. Only the scheduler's connection does this, for all ranks."""
        if self._populate:
            return
        client, path = session.client, self._socket or default_socket()
        try:
            tiers = client.stats()["tiers"]
            memory, disk = session.space.kept()
        except KvtierError as error:
            log.info("kvtier: connected to %s; its contents are unknown: %s", path, str(error))
            return
        sizes = [
            f"{name} {format_bytes(one['capacity_bytes'])}" if "capacity_bytes" in one else name
            for name, one in tiers.items()
        ]
        log.info(
            "kvtier: connected to kvtier %s at %s, tenant %s, %s; this model (space %s) has "
            "%s blocks in memory and %s on disk",
            client.daemon_version, path, client.tenant, ", ".join(sizes),
            session.space.identity.hex()[:12], f"{memory:,}", f"{disk:,}",
        )  # fmt: skip

    def _log_lost(self, why: str) -> None:
        if not self._lost_reason:
            log.log(
                self._level,
                "kvtier: %s: continuing without the daemon, reconnecting in the background: %s",
                self._name,
                why,
            )
        self._lost_reason = why or "gone"


class Daemon:
    """The scheduler's connection, without a session before `open`. `counts`: lost sessions. `patience_s`: how
    long requests may wait for the first one."""

    def __init__(
        self,
        socket: str | None,
        counts: Counter[str],
        verify: bool = False,
        patience_s: float = 0.0,
    ) -> None:
        self.connection: Reconnect | None = None
        self._patience_s = patience_s
        self._verify = verify
        self._socket = socket
        self._counts = counts

    def open(self, spec: KvSpec, engine: str) -> None:
        """Connect in the background, and open this space."""
        name = f"vllm scheduler {os.getpid()}"
        self.connection = Reconnect(
            self._socket, spec, name, populate=False, level=logging.WARNING, engine=engine,
            verify=self._verify, patience_s=self._patience_s,
        )  # fmt: skip

    @property
    def session(self) -> DaemonSession | None:
        return None if self.connection is None else self.connection.session

    @property
    def tried(self) -> bool:
        """Whether a missing session means that the daemon is away, not that it was not tried yet."""
        return self.connection is None or self.connection.tried

    def ended(self, session: DaemonSession) -> None:
        """Count the end of this session, once."""
        if not session.counted:
            session.counted = True
            self._counts["lost"] += 1

    def lost(self, session: DaemonSession, why: object) -> None:
        self.ended(session)
        assert self.connection is not None
        self.connection.lost(session, str(why))

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()


class WakeupListener:
    """Waits on the engine's thread for an answer, for `WAIT_IN_STEP_S` per step in all. After a wait without
    an answer it does not wait again until an answer has arrived."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left_s = WAIT_IN_STEP_S
        self._timed_out = False

    def next_step(self) -> None:
        self._left_s = WAIT_IN_STEP_S

    def answered(self) -> None:
        """An answer has arrived: `wait` may wait for the daemon again."""
        self._timed_out = False

    def wait(self, fd: int, most_s: float = 0.0) -> bool:
        """Whether there is something to read: now, or within the rest of this step's time, or `most_s`."""
        left_s = max(self._left_s, most_s)
        if self._timed_out or left_s <= 0:
            return False
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        began = self._clock()
        ready = bool(poll.poll(left_s * 1000))
        self._left_s -= self._clock() - began
        self._timed_out = not ready
        return ready


def use_nearby_cores() -> None:
    """Let this thread, and threads that it starts, run on the parent process's cores near the same memory. An
    engine on a CPU binds each computing thread to one core, and other threads inherit the first one's."""
    bound = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, nearby(bound, os.sched_getaffinity(os.getppid()), _numa_nodes()))


def nearby(bound: set[int], allowed: set[int], nodes: Iterable[set[int]]) -> set[int]:
    """These cores, and the allowed ones that share a NUMA node with them."""
    near = {core for node in nodes if node & bound for core in node}
    return bound | (allowed & near if near else allowed)


def _numa_nodes() -> list[set[int]]:
    with contextlib.suppress(OSError):
        return [_parse_cores(path.read_text()) for path in NODES.glob("node[0-9]*/cpulist")]
    return []


def _parse_cores(text: str) -> set[int]:
    """Cores from the kernel's notation, such as 0-3,8."""
    ranges = [part.partition("-") for part in text.split(",") if part.strip()]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
