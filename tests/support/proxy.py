"""Forwards TCP connections on loopback, and delays, holds or resets them."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from types import TracebackType

PIECE_BYTES = 1 << 16
LOOK_S = 0.01
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class Proxy:
    """`waits_s` delays each piece of data. All connections share `bytes_s`, if it is not 0. While `is_cut`,
    nothing passes, and nothing is closed."""

    def __init__(self, to_port: int) -> None:
        self.waits_s = 0.0
        self.bytes_s = 0.0
        self._free_at = 0.0  # when all data so far has passed
        self.is_cut = False
        self._to = to_port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._ends = False
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Proxy:
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._ends = True
        self._server.shutdown(socket.SHUT_RDWR)
        self.reset()
        self._server.close()
        for thread in self._threads:
            thread.join()

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments)  # type: ignore[arg-type]
        self._threads = [one for one in self._threads if one.is_alive() or not one.ident]
        self._threads.append(thread)
        thread.start()

    def reset(self) -> None:
        """Reset all connections."""
        with self._lock:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._ends:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                client.close()
                continue
            with self._lock:
                self._open |= {client, server}
            left = [2]
            self._start(self._pass, client, server, left)
            self._start(self._pass, server, client, left)

    def _shared_s(self, nbytes: int) -> float:
        """How long this many bytes wait for their share of `bytes_s`."""
        if not self.bytes_s:
            return 0.0
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + nbytes / self.bytes_s
            return self._free_at - now

    def _pass(self, source: socket.socket, sink: socket.socket, left: list[int]) -> None:
        """Forward what comes in this direction until either end closes."""
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                time.sleep(self.waits_s + self._shared_s(len(piece)))
                while self.is_cut and not self._ends:
                    time.sleep(LOOK_S)
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)
        with self._lock:
            left[0] -= 1
            if not left[0]:
                self._open -= {source, sink}
                source.close()
                sink.close()
