"""A daemon and a folder of a demo or a measurement, which end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGHUP, SIGTERM
from typing import Final

from kvtier import Client, KvtierError
from kvtier.embedded import first_answer

START_S: Final = 20.0
STOP_S: Final = 15.0
LOOK_S: Final = 0.02


@contextmanager
def temporary_folder(prefix: str, place: Path | None = None) -> Iterator[Path]:
    """Return a folder that is removed at the end, also if this process is told to end, or if its terminal is
    closed."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    usual = [one for one in (SIGHUP, SIGTERM) if signal.getsignal(one) is signal.SIG_DFL]
    for number in usual:
        signal.signal(number, end)
    try:
        with tempfile.TemporaryDirectory(prefix=prefix, dir=place) as folder:
            yield Path(folder)
    finally:
        for number in usual:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def temporary_daemon(
    folder: Path, warm_bytes: int, name: str, settings: str = "", populate: bool = False
) -> Iterator[tuple[Client, subprocess.Popen[bytes]]]:
    """Return a client with this name, and the process of its daemon, once it has allocated its memory.
    `settings` are more sections of its configuration. Raises KvtierError if the daemon does not start."""
    config, path = folder / "kvtier.toml", folder / "kvtier.sock"
    config.write_text(
        f'socket = "{path}"\nstate = "{folder / "state"}"\nlog_level = "warning"\n'
        f'[warm]\nsize = "{warm_bytes}"\nkeep_s = 0\n{settings}'
    )
    command = [sys.executable, "-P", "-m", "kvtier_daemon.cli", "serve", "--config", str(config)]
    command += ["--with-process", str(os.getpid())]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KVTIER_")}
    daemon = subprocess.Popen(command, env=clean)
    try:
        client = first_answer(
            lambda: Client.connect(str(path), populate=populate, name=name), daemon, START_S
        )
        if client is None:
            raise KvtierError("the daemon did not start: see its message above")
        with client:
            until = time.monotonic() + START_S
            while client.link.wait_for_growth(until) and time.monotonic() < until:
                pass
            yield client, daemon
    finally:
        daemon.terminate()
        daemon.wait(STOP_S)
