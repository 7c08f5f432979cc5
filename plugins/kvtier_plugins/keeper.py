"""The connection to the daemon. No thread of the engine waits for a daemon that is away."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from kvtier import Client, KvSpec, KvtierError, Unavailable
from kvtier.space import Space

TIMEOUT_S = 1.0  # of one request
PAUSE_S, PAUSE_MAX_S = 0.1, 1.0  # between attempts


class SpaceKeeper:
    """Keeps a client with this space open. `space` is None while the daemon is away; a thread connects, and
    connects again. The loss of the daemon and its return are logged once each. `device`: as for clients."""

    def __init__(
        self, socket: str | None, spec: KvSpec, name: str, verify: bool, log: logging.Logger,
        device: bool = False,
    ) -> None:  # fmt: skip
        self._log = log
        self.space: Space | None = None
        self.client: Client | None = None
        self._connect: Callable[[], Client] = lambda: Client.connect(
            socket, timeout_s=TIMEOUT_S, name=name, verify=verify, device=device
        )
        self._spec = spec
        self._known: Space | None = None  # of the present client
        self._reason = ""
        self._tried = threading.Event()
        self._wanted = threading.Event()
        self._closing = threading.Event()
        self._wanted.set()
        self._thread = threading.Thread(target=self._run, name="kvtier-connect", daemon=True)
        self._thread.start()
        self._tried.wait(2 * TIMEOUT_S)

    def lost(self, error: BaseException) -> None:
        """The daemon did not answer: use it again when it answers the thread."""
        if not self._closing.is_set():
            self.space = None
            self._log_lost(str(error))
            self._wanted.set()

    def close(self) -> None:
        self._closing.set()
        self._wanted.set()
        self.space, client = None, self.client
        if client is not None:
            client.close()

    def _run(self) -> None:
        pause_s = PAUSE_S
        while not self._closing.is_set():
            self._wanted.wait()
            self._wanted.clear()
            while not self._closing.is_set() and not self._attempt():
                self._tried.set()
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
            pause_s = PAUSE_S
            self._tried.set()

    def _attempt(self) -> bool:
        """Whether the daemon answers. A client whose daemon has ended connects again itself."""
        try:
            if self.client is None or self._known is None:
                self.client = self._connect()
                self._known = self.client.open(self._spec)
            else:
                self.client.ping()
        except (KvtierError, OSError) as error:
            self._log_lost(str(error))
            if self.client is not None and (
                self._known is None or not isinstance(error, Unavailable)
            ):
                # It is of no use any longer: its tenant has changed, or it has no space.
                with contextlib.suppress(KvtierError):
                    self.client.close()
                self.client = self._known = None
            return False
        if self._reason:
            self._log.warning("kvtier: connected to the daemon")
        elif self.space is None:
            self._log.info(
                "kvtier: connected to kvtier %s, tenant %s; the pages of this model are in space %s",
                self.client.daemon_version, self.client.tenant, self._known.identity.hex()[:12],
            )  # fmt: skip
        self._reason = ""
        self.space = self._known
        return True

    def _log_lost(self, why: str) -> None:
        if not self._reason:
            self._log.warning(
                "kvtier: continuing without the daemon, reconnecting in the background: %s", why
            )
        self._reason = why or "gone"
