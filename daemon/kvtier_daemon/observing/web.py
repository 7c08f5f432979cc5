"""The read-only HTTP server: metrics, health, status and a page.

It runs on the daemon's event loop, so everything is limited: connections, the bytes and the time of a
request. A connection serves one request, GET or HEAD; a body is not read. It shows the same as root's
`kvtier status`.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import ipaddress
import logging
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from typing import Any, Final, cast

import h11
import msgspec

from kvtier.errors import ConfigError
from kvtier_daemon.observing.exposition import OPENMETRICS, PROMETHEUS, accepts_openmetrics, render
from kvtier_daemon.observing.health import health
from kvtier_daemon.observing.metrics import families

log = logging.getLogger(__name__)

LIMIT_CONNECTIONS: Final = 32
LIMIT_REQUEST_BYTES: Final = 8192
REQUEST_S: Final = 5.0  # from the first byte to the last
BACKLOG: Final = 64
TEXT: Final = "text/plain; charset=utf-8"
JSON: Final = "application/json"
HTML: Final = "text/html; charset=utf-8"
SECURITY: Final = (
    ("Cache-Control", "no-store"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
)
NOTHING: Final = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    kind: str
    body: bytes
    policy: str = NOTHING
    more: Sequence[tuple[str, str]] = ()


def _told(status: int, text: str, more: Sequence[tuple[str, str]] = ()) -> HttpAnswer:
    return HttpAnswer(status, TEXT, f"{text}\n".encode(), more=more)


# --- what is answered -----------------------------------------------------------------------------


class HttpPages:
    """The pages. `figures` returns what `kvtier status --json` prints."""

    def __init__(
        self,
        figures: Callable[[], dict[str, Any]],
        history: Callable[[float], dict[str, Any]],
        hosts: Sequence[str] = (),
    ) -> None:
        self._figures = figures
        self._history = history
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        self._pages: dict[str, Callable[[str, str], HttpAnswer]] = {
            "/": self._page,
            "/metrics": self._metrics,
            "/healthz": self._health,
            "/status": self._status,
            "/history": self._since,
        }

    def answer(self, method: str, target: str, headers: Sequence[tuple[str, str]]) -> HttpAnswer:
        """Return the answer to a request. Header names are in lower case."""
        said = dict(headers)
        if "host" in said and not self._is_ours(said["host"]):
            text = (
                f"{said['host']!r} is not a name of this daemon: use its address, or list "
                "the name in http.hosts"
            )
            return _told(HTTPStatus.MISDIRECTED_REQUEST, text)
        if method not in ("GET", "HEAD"):
            return _told(
                HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD", (("Allow", "GET, HEAD"),)
            )
        path, _, query = target.partition("?")
        page = self._pages.get(path)
        if page is None:
            return _told(HTTPStatus.NOT_FOUND, f"not found; available: {' '.join(self._pages)}")
        return page(said.get("accept", ""), query)

    def _is_ours(self, host: str) -> bool:
        """Return whether the Host header names this server. Protects against DNS rebinding, in which a
        browser uses another site's name; an IP address cannot be rebound."""
        name = re.sub(r":\d*$", "", host.strip().lower())
        if name.startswith("[") and name.endswith("]"):
            name = name[1:-1]
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _metrics(self, accept: str, query: str) -> HttpAnswer:
        openmetrics = accepts_openmetrics(accept)
        body = render(families(self._figures()), openmetrics)
        return HttpAnswer(HTTPStatus.OK, OPENMETRICS if openmetrics else PROMETHEUS, body)

    def _health(self, accept: str, query: str) -> HttpAnswer:
        found = health(self._figures())
        return _told(HTTPStatus.OK if found.ok else HTTPStatus.SERVICE_UNAVAILABLE, found.text)

    def _status(self, accept: str, query: str) -> HttpAnswer:
        body = self._figures()
        body["health"] = health(body).text
        return HttpAnswer(HTTPStatus.OK, JSON, msgspec.json.encode(body))

    def _since(self, accept: str, query: str) -> HttpAnswer:
        after = re.fullmatch(r"after=(\d{1,12}(?:\.\d{1,6})?)", query)
        body = self._history(float(after[1]) if after else -1.0)
        return HttpAnswer(HTTPStatus.OK, JSON, msgspec.json.encode(body))

    def _page(self, accept: str, query: str) -> HttpAnswer:
        text, policy = _file()
        return HttpAnswer(HTTPStatus.OK, HTML, text, policy)


@cache
def _file() -> tuple[bytes, str]:
    """Return the page, and the policy that allows only the scripts in it."""
    text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    allowed = [
        f"{kind}-src '{_digest(found)}'"
        for kind in ("script", "style")
        for found in re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
    ]
    return text.encode(), "; ".join([NOTHING, "connect-src 'self'", "img-src data:", *allowed])


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


# --- connections ----------------------------------------------------------------------------------


class Web:
    """Listens for connections. `failed` is called for internal errors."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, pages: HttpPages, failed: Callable[[], None]
    ) -> None:
        self.loop = loop
        self.pages = pages
        self.failed = failed
        self.connections: dict[HttpConnection, None] = {}  # the oldest first
        self._server: asyncio.Server | None = None

    async def listen(self, listener: socket.socket) -> None:
        self._server = await self.loop.create_server(
            lambda: HttpConnection(self), sock=listener, backlog=BACKLOG
        )

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.abort()


class HttpConnection(asyncio.Protocol):
    """One request and its answer."""

    def __init__(self, web: Web) -> None:
        self._web = web
        self._http = h11.Connection(h11.SERVER)
        self._received = 0
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is not an instance of it
        transport = cast(asyncio.Transport, transport)
        self._transport = transport
        connections = self._web.connections
        if len(connections) >= LIMIT_CONNECTIONS:
            # Close the oldest connection: slow clients must not block others.
            oldest = next(iter(connections))
            del connections[oldest]
            oldest.abort()
        connections[self] = None
        self._timer = self._web.loop.call_later(REQUEST_S, self.abort)

    def connection_lost(self, error: Exception | None) -> None:
        self._web.connections.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def abort(self) -> None:
        """Close the connection at once, without sending the rest."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._answered:  # ignore data after the request
            return
        self._received += len(data)
        if self._received > LIMIT_REQUEST_BYTES:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._send(
                "GET", _told(status, f"the request is larger than {LIMIT_REQUEST_BYTES} bytes")
            )
            return
        try:
            self._http.receive_data(data)
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self._send("GET", _told(error.error_status_hint, f"invalid request: {error}"))
            return
        if isinstance(event, h11.Request):
            self._answer(event)
        elif event is not h11.NEED_DATA:
            self.abort()

    def _answer(self, request: h11.Request) -> None:
        method, target = request.method.decode("ascii"), request.target.decode("ascii")
        headers = [
            (name.decode("ascii"), value.decode("latin-1")) for name, value in request.headers
        ]
        try:
            answer = self._web.pages.answer(method, target, headers)
        except Exception:
            log.exception("http: internal error while answering %s", target)
            self._web.failed()
            answer = _told(
                HTTPStatus.INTERNAL_SERVER_ERROR, "internal error in the daemon, see its log"
            )
        self._send(method, answer)

    def _send(self, method: str, answer: HttpAnswer) -> None:
        assert self._transport is not None
        self._answered = True
        headers = [
            ("Content-Type", answer.kind),
            ("Content-Length", str(len(answer.body))),
            ("Content-Security-Policy", answer.policy),
            *SECURITY,
            *answer.more,
            ("Connection", "close"),
        ]
        reason = HTTPStatus(answer.status).phrase
        response = h11.Response(status_code=answer.status, headers=headers, reason=reason)
        self._transport.write(self._http.send(response) or b"")
        if method != "HEAD":
            self._transport.write(answer.body)
        self._transport.close()


# --- the address ----------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. The ConfigError explains the failure and the remedy."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    listener = None
    try:
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(f"http.listen: {where}: {_why(error, port)}") from error
    return listener


def _why(error: OSError, port: int) -> str:
    what = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        return (
            f"{what}; `ss -ltnp 'sport = :{port}'` shows which process uses it; end that "
            "process, or use another port"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{what}; no network interface of this machine has that address"
    if error.errno == errno.EACCES:
        return f"{what}; only root may use ports below 1024; use another port"
    if error.errno in (errno.EAFNOSUPPORT, errno.EPERM):
        return f"{what}; if systemd runs the daemon, its unit must allow it: see docs/metrics.md"
    return what
