"""Reads objects of a bucket from the socket straight to their places in the buffer. Runs in the store's
process.

The store's library copies what it has received two more times. Here it only signs the address of an object.
What is not an ordinary answer is left to it, and so are proxies.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Callable
from functools import cached_property
from typing import Final
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from kvtier_daemon.tiers.remote.messages import (
    BROKEN,
    CONNECT_S,
    FAILED,
    TIMED_OUT,
    TOO_LARGE,
    Answer,
    GetObject,
    StoreFailedError,
    short_reason,
)

LATE_SHARE: Final = 0.95  # of the deadline, after which a transfer that fails was too slow
# What fails later is not read by the library: the daemon waits little longer than the deadline.
AGAIN_S: Final = 1.0
IN_VAIN: Final = 4  # objects in a row that only the library could read, after which it reads all
SPARE_S: Final = 20.0  # after which an idle connection is not used again: it may be dead
OK, MISSING, TOO_MANY, SERVER_ERROR = 200, 404, 429, 500


def cut_off(request: GetObject, began: float, timeout_s: float, error: Exception) -> Answer:
    """The answer for an object that began to arrive, and whose end did not. A slow one is not damaged."""
    if time.monotonic() - began > LATE_SHARE * timeout_s:
        return Answer(request.id, FAILED, TIMED_OUT)
    return Answer(request.id, BROKEN, short_reason(error))


def has_proxy(scheme: str, host: str) -> bool:
    """Whether the environment names a proxy for this address."""
    proxies = getproxies()
    return not proxies.keys().isdisjoint((scheme, "all")) and not proxy_bypass(host)


class HttpReads:
    """`get` is for threads. `signed` returns the address of an object, with a signature."""

    def __init__(self, signed: Callable[[str], str], buffer: memoryview, timeout_s: float) -> None:
        self._signed = signed
        self._buffer = buffer
        self._timeout_s = timeout_s
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []  # since when
        self._in_vain = 0

    @property
    def can_read(self) -> bool:
        return self._in_vain < IN_VAIN

    def only_the_library_can(self) -> None:
        """It has read an object that `get` left to it."""
        self._in_vain += 1

    def try_to_connect(self) -> None:
        """Leave all objects to the library if no address can be signed, or no connection be made."""
        until = time.monotonic() + self._timeout_s
        try:
            connection = self._connected(urlsplit(self._signed("a")), until)
        except Exception:  # noqa: BLE001  # the library's errors have no common base
            self._in_vain = IN_VAIN
        else:
            self._idle.append((connection, time.monotonic()))

    def get(self, request: GetObject, until: float) -> Answer | None:
        """Read an object to its place. Return None, with nothing read, if that is left to the library. Raises
        FileNotFoundError."""
        began = time.monotonic()
        try:
            connection, end, answer = self._begin(urlsplit(self._signed(request.name)), until)
        except Exception as error:  # noqa: BLE001  # as above
            return self._not_read(request, began, until, short_reason(error))
        status, first_s = answer.status, time.monotonic() - began
        if status == OK and answer.length is not None and answer.length <= request.room:
            self._in_vain = 0
            return self._received(request, connection, end, answer, first_s, until)
        answer.close()
        connection.close()
        reason = f"{status} {answer.reason[:100]}"
        if status == MISSING:
            self._in_vain = 0
            raise FileNotFoundError(request.name)
        if status == OK and answer.length is not None:
            return Answer(request.id, TOO_LARGE, f"{request.name} has {answer.length} bytes")
        if status == TOO_MANY or status >= SERVER_ERROR:  # the daemon decides when to ask again
            return Answer(request.id, FAILED, reason)
        return self._not_read(request, began, until, reason)

    @staticmethod
    def _not_read(request: GetObject, began: float, until: float, reason: str) -> Answer | None:
        now = time.monotonic()
        if now < min(began + AGAIN_S, until):
            return None
        return Answer(request.id, FAILED, TIMED_OUT if now >= until else reason)

    def _received(
        self, request: GetObject, connection: http.client.HTTPConnection, end: socket.socket,
        answer: http.client.HTTPResponse, first_s: float, until: float,
    ) -> Answer:  # fmt: skip
        nbytes = answer.length or 0
        try:
            self._receive(end, answer, self._buffer[request.at : request.at + nbytes], until)
        except (OSError, EOFError) as error:
            answer.close()
            connection.close()
            return cut_off(request, until - self._timeout_s, self._timeout_s, error)
        answer.close()
        if answer.will_close:
            connection.close()
        else:
            self._idle.append((connection, time.monotonic()))
        return Answer(request.id, nbytes=nbytes, first_s=first_s)

    def _begin(
        self, url: SplitResult, until: float
    ) -> tuple[http.client.HTTPConnection, socket.socket, http.client.HTTPResponse]:
        """Return a connection, its socket, and the begin of the answer."""
        while True:
            connection, is_new = self._spare(), False
            if connection is None:
                connection, is_new = self._connected(url, until), True
            end: socket.socket = connection.sock
            try:
                end.settimeout(left(until))
                connection.request("GET", f"{url.path}?{url.query}")
                return connection, end, connection.getresponse()
            except (OSError, http.client.HTTPException):
                connection.close()
                if is_new or time.monotonic() >= until:
                    raise
                # The server has closed an idle connection.

    def _spare(self) -> http.client.HTTPConnection | None:
        """The connection that was used last."""
        while True:
            try:
                connection, since = self._idle.pop()
            except IndexError:
                return None
            if time.monotonic() - since < SPARE_S:
                return connection
            connection.close()

    def _connected(self, url: SplitResult, until: float) -> http.client.HTTPConnection:
        if has_proxy(url.scheme, url.netloc):
            raise StoreFailedError("the environment names a proxy")
        timeout_s = min(CONNECT_S, left(until))
        connection = (
            http.client.HTTPSConnection(url.netloc, timeout=timeout_s, context=self._tls)
            if url.scheme == "https"
            else http.client.HTTPConnection(url.netloc, timeout=timeout_s)
        )
        connection.connect()
        return connection

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    @staticmethod
    def _receive(
        end: socket.socket, answer: http.client.HTTPResponse, place: memoryview, until: float
    ) -> None:
        at = 0
        while at < len(place):
            end.settimeout(left(until))
            nbytes = answer.fp.readinto1(place[at:])
            if not nbytes:
                raise EOFError("the connection was closed")
            at += nbytes


def left(until: float) -> float:
    """Return the seconds until then. Raises TimeoutError."""
    if (seconds := until - time.monotonic()) <= 0:
        raise TimeoutError(TIMED_OUT)
    return seconds
