"""Objects of a bucket are read from the socket to their places: what is read, what is left to the library,
and what a failure says."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from obstore.exceptions import BaseError

from kvtier_daemon.tiers.remote import http_reads, s3
from kvtier_daemon.tiers.remote.http_reads import IN_VAIN, HttpReads
from kvtier_daemon.tiers.remote.messages import (
    BROKEN,
    FAILED,
    TIMED_OUT,
    TOO_LARGE,
    Answer,
    GetObject,
    OpenBucket,
    PutObject,
)
from kvtier_daemon.tiers.remote.s3 import S3Objects

ROOM = 64 << 10
CONTENT = os.urandom(ROOM - 100)
PLACES = 4
Reads = Callable[..., HttpReads]


class Server:
    """Answers with CONTENT, or as `answers` says: with the bytes of a whole answer, and a pause within."""

    def __init__(self) -> None:
        self.connections = 0
        self.paths: list[str] = []
        self.signed: list[str] = []  # what the signatures of puts say about their contents
        self.answer: Callable[[Any], None] = self.content
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def setup(self) -> None:
                server.connections += 1
                super().setup()

            def do_GET(self) -> None:
                server.paths.append(self.path)
                server.answer(self)

            def do_PUT(self) -> None:
                server.signed.append(self.headers["x-amz-content-sha256"])
                self.rfile.read(int(self.headers["Content-Length"]))
                status(200, b"")(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        # Clients give up, and close connections.
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def use_tls(self, certificate: Path, key: Path) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    @staticmethod
    def content(handler: Any, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        handler.send_response(200)
        handler.send_header("ETag", '"0"')
        handler.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        handler.send_header("Content-Length", str(len(CONTENT)))
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(CONTENT)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def buffer() -> memoryview:
    return memoryview(bytearray(ROOM * PLACES))


@pytest.fixture
def reads(server: Server, buffer: memoryview) -> Iterator[Reads]:
    made = list[HttpReads]()

    def make(timeout_s: float = 30.0, scheme: str = "http") -> HttpReads:
        def signed(name: str) -> str:
            return f"{scheme}://localhost:{server.port}/{name}?signed"

        made.append(HttpReads(signed, buffer, timeout_s))
        return made[-1]

    yield make
    for one in made:
        for connection, _ in one._idle:
            connection.close()


def get(
    reads: HttpReads, place: int = 1, room: int = ROOM, timeout_s: float = 30.0
) -> Answer | None:
    return reads.get(GetObject(7, "a", place * ROOM, room), time.monotonic() + timeout_s)


def status(number: int, body: bytes = b"<Error/>") -> Callable[[Any], None]:
    def answer(handler: Any) -> None:
        handler.send_response(number)
        handler.send_header("ETag", '"0"')
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def test_an_object_is_at_its_place_and_nothing_else_changes(
    server: Server, buffer: memoryview, reads: Reads
) -> None:
    answer = get(reads())
    assert answer is not None
    assert (answer.id, answer.outcome, answer.nbytes) == (7, "", len(CONTENT))
    assert 0 < answer.first_s < 30
    assert buffer[ROOM : ROOM + len(CONTENT)] == CONTENT
    assert buffer[:ROOM] == bytes(ROOM)
    assert buffer[ROOM + len(CONTENT) :] == bytes(len(buffer) - ROOM - len(CONTENT))


def test_objects_are_read_at_once_over_connections_that_are_kept(
    server: Server, buffer: memoryview, reads: Reads
) -> None:
    of = reads()
    with ThreadPoolExecutor(PLACES) as threads:
        for _ in range(5):
            buffer[:] = bytes(len(buffer))
            answers = list(threads.map(lambda place: get(of, place), range(PLACES)))
            assert all(one is not None and one.nbytes == len(CONTENT) for one in answers)
            for place in range(PLACES):
                assert buffer[place * ROOM : place * ROOM + len(CONTENT)] == CONTENT
    assert len(server.paths) == 5 * PLACES
    assert server.connections <= PLACES


@pytest.mark.parametrize("says_so", [False, True])
def test_a_connection_that_the_server_closes_is_replaced(
    server: Server, buffer: memoryview, reads: Reads, says_so: bool
) -> None:
    def content(handler: Any) -> None:
        handler.close_connection = True
        server.content(handler, {"Connection": "close"} if says_so else {})

    of = reads()
    server.answer = content
    for number in range(1, 4):
        answer = get(of)
        assert answer is not None and answer.nbytes == len(CONTENT)
        assert buffer[ROOM : ROOM + len(CONTENT)] == CONTENT
        assert server.connections == number
        assert len(of._idle) == (0 if says_so else 1)
        buffer[:] = bytes(len(buffer))


def test_an_object_that_does_not_exist_and_one_that_does_not_fit_are_told_apart(
    server: Server, buffer: memoryview, reads: Reads
) -> None:
    of = reads()
    server.answer = status(404)
    with pytest.raises(FileNotFoundError):
        get(of)
    server.answer = Server.content
    answer = get(of, room=len(CONTENT) - 1)
    assert answer is not None and answer.outcome == TOO_LARGE
    assert buffer == bytes(len(buffer))
    server.answer = status(200, b"")
    answer = get(of)
    assert answer is not None and (answer.outcome, answer.nbytes) == ("", 0)


def test_an_idle_connection_is_not_used_for_long(
    server: Server, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network may have dropped it without a word, and the answer would be awaited in vain."""
    of = reads()
    for _ in range(2):
        assert get(of) is not None
    assert server.connections == 1
    monkeypatch.setattr(http_reads, "SPARE_S", 0.0)
    assert get(of) is not None
    assert server.connections == 2 and len(of._idle) == 1


@pytest.mark.parametrize("number", [429, 500, 503])
def test_a_store_that_asks_for_less_is_not_asked_again_at_once(
    server: Server, buffer: memoryview, reads: Reads, number: int
) -> None:
    of = reads()
    server.answer = status(number, CONTENT)
    answer = get(of)
    assert answer is not None and answer.outcome == FAILED and answer.text.startswith(f"{number} ")
    assert buffer == bytes(len(buffer)) and of.can_read and not of._idle


@pytest.mark.parametrize("number", [206, 301, 403])
def test_other_answers_are_left_to_the_library(
    server: Server, buffer: memoryview, reads: Reads, number: int
) -> None:
    of = reads()
    server.answer = status(number, CONTENT)
    assert get(of) is None
    assert buffer == bytes(len(buffer))


def test_an_answer_without_a_length_and_one_that_is_no_answer_are_left_to_the_library(
    server: Server, buffer: memoryview, reads: Reads
) -> None:
    def chunked(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"1\r\na\r\n0\r\n\r\n")

    def garbage(handler: Any) -> None:
        handler.wfile.write(b"garbage\r\n\r\n")
        handler.close_connection = True

    of = reads()
    for answer in (chunked, garbage):
        server.answer = answer
        assert get(of) is None
    assert buffer == bytes(len(buffer))


def test_an_object_that_ends_early_is_broken_and_one_that_is_slow_is_late(
    server: Server, buffer: memoryview, reads: Reads
) -> None:
    def half(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(CONTENT)))
        handler.end_headers()
        handler.wfile.write(CONTENT[: len(CONTENT) // 2])
        handler.close_connection = True

    def drips(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(CONTENT)))
        handler.end_headers()
        until = time.monotonic() + 2.0
        with contextlib.suppress(OSError):  # the client gives up
            while time.monotonic() < until:
                handler.wfile.write(CONTENT[:1])
                time.sleep(0.05)
        handler.close_connection = True

    server.answer = half
    answer = get(reads())
    assert answer is not None and answer.outcome == BROKEN
    server.answer = drips
    began = time.monotonic()
    answer = get(reads(timeout_s=0.5), timeout_s=0.5)
    assert answer is not None and (answer.outcome, answer.text) == (FAILED, TIMED_OUT)
    assert time.monotonic() < began + 1.5


def test_a_server_that_does_not_answer_is_not_asked_again_by_the_library(
    server: Server, buffer: memoryview, reads: Reads
) -> None:
    server.answer = lambda handler: time.sleep(0.6)
    answer = get(reads(timeout_s=0.3), timeout_s=0.3)
    assert answer is not None and (answer.outcome, answer.text) == (FAILED, TIMED_OUT)
    answer = get(reads(), timeout_s=-1.0)
    assert answer is not None and (answer.outcome, answer.text) == (FAILED, TIMED_OUT)


def test_a_server_that_is_not_there_is_left_to_the_library(buffer: memoryview) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        of = HttpReads(lambda name: f"http://127.0.0.1:{free.getsockname()[1]}/a?", buffer, 30.0)
        assert get(of) is None


def test_a_proxy_is_left_to_the_library(
    server: Server, buffer: memoryview, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        assert get(reads()) is None
        monkeypatch.setenv("no_proxy", "localhost")
        assert get(reads()) is not None
        monkeypatch.delenv("no_proxy")
        monkeypatch.delenv(name)
    assert len(server.paths) == 2


def test_the_library_reads_all_after_several_objects_that_only_it_could(
    server: Server, buffer: memoryview, reads: Reads
) -> None:
    of = reads()
    server.answer = status(403)
    for _ in range(IN_VAIN - 1):
        assert get(of) is None
        of.only_the_library_can()
    server.answer = Server.content
    assert get(of) is not None and of.can_read
    server.answer = status(403)
    for _ in range(IN_VAIN):
        assert of.can_read
        assert get(of) is None
        of.only_the_library_can()
    assert not of.can_read


def test_the_library_reads_all_if_no_address_can_be_signed_or_no_connection_be_made(
    server: Server, buffer: memoryview, reads: Reads
) -> None:
    of = reads()
    of.try_to_connect()
    assert of.can_read and get(of) is not None and server.connections == 1

    def fails(name: str) -> str:
        raise ValueError(name)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        for signed in (fails, lambda name: f"http://127.0.0.1:{free.getsockname()[1]}/{name}?"):
            of = HttpReads(signed, buffer, 30.0)
            of.try_to_connect()
            assert not of.can_read


def certificate_of_localhost(folder: Path) -> tuple[Path, Path]:
    """Files with a certificate that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "certificate").write_bytes(certificate.public_bytes(pem))
    (folder / "key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "certificate", folder / "key"


def bucket_at(endpoint: str, buffer: memoryview) -> S3Objects:
    secrets = {"access_key_id": "a", "secret_access_key": "b"}
    return S3Objects(OpenBucket("blocks", "fleet", endpoint, "us-east-1", secrets, 30.0), buffer)


def close(objects: S3Objects) -> None:
    for connection, _ in objects._reads._idle:
        connection.close()


def test_tls_is_verified(
    server: Server, buffer: memoryview, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = certificate_of_localhost(tmp_path)
    server.use_tls(certificate, key)
    request = GetObject(7, "a", ROOM, ROOM)

    async def read() -> None:
        objects = bucket_at(f"https://localhost:{server.port}", buffer)
        assert objects._reads.get(request, time.monotonic() + 30) is None
        with pytest.raises(BaseError):
            await objects.get(request)
        assert not server.paths
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        objects = bucket_at(f"https://localhost:{server.port}", buffer)
        answer = await objects.get(request)
        assert answer.nbytes == len(CONTENT)
        assert len(server.paths) == 1 and "X-Amz-Signature" in server.paths[0]
        assert buffer[ROOM : ROOM + len(CONTENT)] == CONTENT
        close(objects)

    asyncio.run(read())


def test_contents_are_signed_where_tls_does_not_protect_them(
    server: Server, buffer: memoryview, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put(scheme: str) -> None:
        objects = bucket_at(f"{scheme}://localhost:{server.port}", buffer)
        await objects.put(PutObject(7, "a", 0, 10))

    asyncio.run(put("http"))
    certificate, key = certificate_of_localhost(tmp_path)
    server.use_tls(certificate, key)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    asyncio.run(put("https"))
    assert server.signed == [hashlib.sha256(bytes(10)).hexdigest(), "UNSIGNED-PAYLOAD"]


def test_what_is_refused_with_a_signed_address_is_read_by_the_library(
    server: Server, buffer: memoryview
) -> None:
    def answer(handler: Any) -> None:
        status(403)(handler) if "X-Amz-Signature" in handler.path else Server.content(handler)

    server.answer = answer

    async def read() -> None:
        objects = bucket_at(f"http://localhost:{server.port}", buffer)
        for number in range(IN_VAIN + 3):
            place = number % PLACES * ROOM
            buffer[:] = bytes(len(buffer))
            found = await objects.get(GetObject(number, "a", place, ROOM))
            assert (found.id, found.outcome, found.nbytes) == (number, "", len(CONTENT))
            assert buffer[place : place + len(CONTENT)] == CONTENT
        assert sum("X-Amz-Signature" in path for path in server.paths) == IN_VAIN
        server.answer = status(404)
        with pytest.raises(FileNotFoundError):
            await objects.get(GetObject(7, "a", 0, ROOM))

    asyncio.run(read())


def test_no_read_waits_for_a_thread(
    server: Server, buffer: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline of a read that waits would pass; the library reads any number at once."""
    monkeypatch.setattr(s3, "READS_AT_ONCE", 2)
    begun = threading.Barrier(PLACES)

    def answer(handler: Any) -> None:
        begun.wait(60)  # all of them are read at once
        Server.content(handler)

    server.answer = answer

    async def read() -> None:
        objects = bucket_at(f"http://localhost:{server.port}", buffer)
        found = await asyncio.gather(
            *(objects.get(GetObject(at, "a", at * ROOM, ROOM)) for at in range(PLACES))
        )
        assert [(one.id, one.nbytes) for one in found] == [
            (at, len(CONTENT)) for at in range(PLACES)
        ]
        assert sum("X-Amz-Signature" in path for path in server.paths) == 2
        close(objects)

    asyncio.run(read())
