"""A real S3-compatible server on loopback for tests: `nanio`, which keeps objects as files and checks
signatures. It is ended by its pid."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import time
from pathlib import Path
from typing import Any

from kvtier.key import Keys
from kvtier.space import Space
from kvtier_daemon.tiers.remote.objects import VERSION
from support import forked
from support.daemons import server
from support.ports import reserved_port

START_S = WAIT_S = 60.0
BUCKET = "blocks"
KEY, SECRET = "kvtier", secrets.token_hex(16)


class ObjectStore:
    """Keeps its objects below `folder`. Starts on a free port, and again on the same one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "data" / BUCKET).mkdir(parents=True)
        self.port = reserved_port()
        self.credentials = self.write_credentials("credentials", SECRET)
        self._process: forked.Process | None = None
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with (self.folder / "server.log").open("ab") as log:
            self._process = server().start(
                [
                    "serve", "--data-dir", str(self.folder / "data"), "--host", "127.0.0.1",
                    "--port", str(self.port), "--log-level", "error", "--no-access-log",
                ],
                log.fileno(), log.fileno(),
                {**os.environ, "NANIO_ACCESS_KEY": KEY, "NANIO_SECRET_KEY": SECRET},
                # Each write would wait for the disk twice, which other tests use: no test cuts its power.
                program="import os\nos.fsync = lambda _: None\nfrom nanio.cli import main\nmain()",
                imports=("nanio.cli", "nanio.app", "uvicorn.main"),
            )  # fmt: skip
        until = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None and time.monotonic() < until, "the server must run"
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except ConnectionRefusedError:
                time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Let it accept connections and answer none."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @property
    def secret(self) -> str:
        return SECRET

    def write_credentials(self, name: str, secret: str) -> Path:
        file = self.folder / name
        file.touch(0o600)
        file.write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {secret}\n")
        return file

    def objects(self) -> dict[str, Path]:
        """The files of all objects of blocks, by name."""
        root = self.folder / "data" / BUCKET
        named = re.compile(rf"/{VERSION}/[0-9a-f]{{64}}/[0-9a-f]{{64}}-\d+-\d+$")
        return {path.name: path for path in root.rglob("*") if named.search(str(path))}

    def config(
        self, credentials: Path | None = None, bucket: str = BUCKET, more: str = "", deadline_s: int = 30
    ) -> str:  # fmt: skip
        """The section of a daemon's configuration. The deadline is long: the machine may be busy."""
        return (
            f'[remote]\nbucket = "{bucket}"\nprefix = "fleet"\nendpoint = "{self.endpoint}"\n'
            f'credentials = "{credentials or self.credentials}"\ndeadline_s = {deadline_s}\n'
            f'buffer = "16MiB"\nknown = "1MiB"\n{more}'
        )


def wait_until_ready(space: Space, keys: Keys, blocks: int | None = None) -> int:
    """Ask until this many of the blocks are in memory, by default all, for at most WAIT_S; return how many
    are. A match with patience also reads from a store that was slow on a busy machine."""
    until, wanted = time.monotonic() + WAIT_S, len(keys) if blocks is None else blocks
    while True:
        ready = space.match(keys, within_ms=int(WAIT_S * 1000)).ready
        if ready >= wanted or time.monotonic() >= until:
            return ready
        time.sleep(0.01)


def remote_of(stats: dict[str, Any]) -> dict[str, Any]:
    remote: dict[str, Any] = stats["tiers"]["remote"]
    return remote
