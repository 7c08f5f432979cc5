"""The daemon over HTTP, for those who only look: metrics, health, status and a page.

It is on the daemon's own loop, so all of it is bounded: connections, a request's bytes and its time. One
connection is one request, GET or HEAD; a body is not read. What it says is what root's `kvtier status` says.
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
from kvtier_daemon.observing.series import families

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
class Answer:
    status: int
    kind: str
    body: bytes
    policy: str = NOTHING
    more: Sequence[tuple[str, str]] = ()


def _told(status: int, text: str, more: Sequence[tuple[str, str]] = ()) -> Answer:
    return Answer(status, TEXT, f"{text}\n".encode(), more=more)


# --- what is answered -----------------------------------------------------------------------------


class Pages:
    """What there is to see. `figures` is asked for what `kvtier status --json` prints."""

    def __init__(
        self,
        figures: Callable[[], dict[str, Any]],
        history: Callable[[float], dict[str, Any]],
        hosts: Sequence[str] = (),
    ) -> None:
        self._figures = figures
        self._history = history
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        self._pages: dict[str, Callable[[str, str], Answer]] = {
            "/": self._page,
            "/metrics": self._metrics,
            "/healthz": self._health,
            "/status": self._status,
            "/history": self._since,
        }

    def answer(self, method: str, target: str, headers: Sequence[tuple[str, str]]) -> Answer:
        """The answer to a request. Header names are in lower case."""
        said = dict(headers)
        if "host" in said and not self._is_ours(said["host"]):
            text = f"{said['host']!r} is no name of this daemon: ask by address, or list it in http.hosts"
            return _told(HTTPStatus.MISDIRECTED_REQUEST, text)
        if method not in ("GET", "HEAD"):
            return _told(
                HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD", (("Allow", "GET, HEAD"),)
            )
        path, _, query = target.partition("?")
        page = self._pages.get(path)
        if page is None:
            return _told(HTTPStatus.NOT_FOUND, f"there is only {' '.join(self._pages)}")
        return page(said.get("accept", ""), query)

    def _is_ours(self, host: str) -> bool:
        """Whether a browser that was led here by a name of somebody else's would not say this. An address is
        nobody's to rebind."""
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

    def _metrics(self, accept: str, query: str) -> Answer:
        openmetrics = accepts_openmetrics(accept)
        body = render(families(self._figures()), openmetrics)
        return Answer(HTTPStatus.OK, OPENMETRICS if openmetrics else PROMETHEUS, body)

    def _health(self, accept: str, query: str) -> Answer:
        found = health(self._figures())
        return _told(HTTPStatus.OK if found.ok else HTTPStatus.SERVICE_UNAVAILABLE, found.text)

    def _status(self, accept: str, query: str) -> Answer:
        body = self._figures()
        body["health"] = health(body).text
        return Answer(HTTPStatus.OK, JSON, msgspec.json.encode(body))

    def _since(self, accept: str, query: str) -> Answer:
        after = re.fullmatch(r"after=(\d{1,12}(?:\.\d{1,6})?)", query)
        body = self._history(float(after[1]) if after else -1.0)
        return Answer(HTTPStatus.OK, JSON, msgspec.json.encode(body))

    def _page(self, accept: str, query: str) -> Answer:
        text, policy = _file()
        return Answer(HTTPStatus.OK, HTML, text, policy)


@cache
def _file() -> tuple[bytes, str]:
    """The page, and what of it may run: nothing but what is in it."""
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
    """Listens. `failed` is told of what could not be answered."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, pages: Pages, failed: Callable[[], None]
    ) -> None:
        self.loop = loop
        self.pages = pages
        self.failed = failed
        self.connections: dict[Connection, None] = {}  # the oldest first
        self._server: asyncio.Server | None = None

    async def listen(self, listener: socket.socket) -> None:
        self._server = await self.loop.create_server(
            lambda: Connection(self), sock=listener, backlog=BACKLOG
        )

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.abort()


class Connection(asyncio.Protocol):
    """One request and its answer."""

    def __init__(self, web: Web) -> None:
        self._web = web
        self._http = h11.Connection(h11.SERVER)
        self._received = 0
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # no such instance in uvloop
        self._transport = transport
        connections = self._web.connections
        if len(connections) >= LIMIT_CONNECTIONS:
            # The oldest has had the most time to ask: slow clients must not keep others out.
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
        """Hang up now, whatever was not sent."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._answered:  # what comes after the request is nobody's
            return
        self._received += len(data)
        if self._received > LIMIT_REQUEST_BYTES:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._send("GET", _told(status, f"a request has at most {LIMIT_REQUEST_BYTES} bytes"))
            return
        try:
            self._http.receive_data(data)
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self._send("GET", _told(error.error_status_hint, f"this is no request: {error}"))
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
            log.exception("http: %s could not be answered", target)
            self._web.failed()
            answer = _told(HTTPStatus.INTERNAL_SERVER_ERROR, "the daemon failed; its log says how")
        self._send(method, answer)

    def _send(self, method: str, answer: Answer) -> None:
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
    """A socket that listens there; ConfigError says why it can't be, and what to do."""
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
        return f"{what}; `ss -ltnp 'sport = :{port}'` says by whom; end that, or write another port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{what}; no interface of this machine has that address"
    if error.errno == errno.EACCES:
        return f"{what}; ports below 1024 are root's; write another port"
    if error.errno in (errno.EAFNOSUPPORT, errno.EPERM):
        return f"{what}; if systemd runs the daemon, its unit has to allow it: docs/metrics.md says how"
    return what
