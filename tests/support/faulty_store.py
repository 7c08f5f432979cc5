"""A store for faults that a real server does not show on demand. It keeps objects in memory, and checks no
signatures."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

ERROR = b"<?xml version='1.0'?><Error><Code>%s</Code></Error>"


class FaultyStore:
    """Its attributes are the faults: it refuses puts as a full store does, refuses lists, cuts the contents
    of objects, waits before each answer, and before those to puts and to deletes. A pause in the middle of an
    object ends with the fault."""

    def __init__(self, folder: Path) -> None:
        self.credentials = folder / "any-credentials"
        self.credentials.touch(0o600)
        self.credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
        self.objects: dict[str, bytes] = {}
        self.refuses_puts = False
        self.refuses_named = ""  # puts of objects whose names contain it
        self.refused: list[str] = []  # objects
        self.refuses_lists = False
        self.cuts_answers = False
        self.waits_s = 0.0
        self.put_s = 0.0
        self.puts = 0  # that have begun
        self.pauses_s = 0.0  # in the middle of an object
        self.delete_s = 0.0
        faulty = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def answer(self, code: int, body: bytes = b"", sent: int | None = None) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", '"0"')
                self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
                with contextlib.suppress(ConnectionError):  # the client may have ended
                    self.end_headers()
                    if self.command != "HEAD":
                        half = len(body) // 2 if faulty.pauses_s and len(body) > 4096 else 0
                        self.wfile.write(body[:half])
                        if half:
                            faulty.pause()
                        self.wfile.write(body[half:sent])
                if sent is not None:
                    self.close_connection = True

            def do_PUT(self) -> None:
                waits_s = faulty.waits_s + faulty.put_s
                faulty.puts += 1
                time.sleep(waits_s)
                body = self.rfile.read(int(self.headers["Content-Length"]))
                named = faulty.refuses_named
                if faulty.refuses_puts or (named and named in unquote(self.path)):
                    faulty.refused.append(unquote(self.path))
                    self.answer(403, ERROR % b"QuotaExceeded")
                    return
                faulty.objects[unquote(self.path)] = body
                self.answer(200)

            def do_GET(self) -> None:
                time.sleep(faulty.waits_s)
                path = urlsplit(self.path)
                if "list-type" in path.query and faulty.refuses_lists:
                    self.answer(503, ERROR % b"SlowDown")
                elif "list-type" in path.query:
                    prefix = parse_qs(path.query).get("prefix", [""])[0]
                    self.answer(200, faulty.listed(prefix))
                elif (body := faulty.objects.get(unquote(path.path))) is None:
                    self.answer(404, ERROR % b"NoSuchKey")
                else:
                    self.answer(200, body, len(body) // 2 if faulty.cuts_answers else None)

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                names = re.findall("<Key>(.*?)</Key>", body)
                time.sleep(faulty.delete_s)
                for name in names:
                    faulty.objects.pop(f"/blocks/{name}", None)
                rows = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
                text = f"<?xml version='1.0'?><DeleteResult>{rows}</DeleteResult>"
                self.answer(200, text.encode())

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def pause(self) -> None:
        until = time.monotonic() + self.pauses_s
        while self.pauses_s and time.monotonic() < until:
            time.sleep(0.02)

    def listed(self, prefix: str) -> bytes:
        rows = "".join(
            f"<Contents><Key>{name}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
            f"<Size>{len(body)}</Size></Contents>"
            for path, body in list(self.objects.items())
            if (name := path.removeprefix("/blocks/")).startswith(prefix)
        )
        return f"<?xml version='1.0'?><ListBucketResult>{rows}</ListBucketResult>".encode()

    @property
    def config(self) -> str:
        port = self._server.server_address[1]
        return (
            f'[remote]\nbucket = "blocks"\nendpoint = "http://127.0.0.1:{port}"\ndeadline_s = 30\n'
            f'credentials = "{self.credentials}"\n'
            'buffer = "16MiB"\nknown = "1MiB"\n'
        )

    def __enter__(self) -> FaultyStore:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
