"""A client of a daemon whose memory still grows: saves wait for free memory, `wait_ready` for all memory.

The daemon allocates a quarter of its memory, and the rest when the test creates a file."""

from __future__ import annotations

import re
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier import KvtierError, NotReady, Refused, Unavailable, wire
from kvtier.link import Link
from support.daemons import Daemon
from support.specs import spec_of

README = Path(__file__).parents[2] / "README.md"
EXTENT = 4 << 20
CONFIG = f'[warm]\nsize = "{16 * EXTENT}"\nextent = "{EXTENT}"'
SERVE_SLOWLY = """
import os, sys, threading, time
folders, gate = sys.argv.pop(1), sys.argv.pop(1)
sys.path[:0] = folders.split(":")
from kvtier_daemon.tiers import warm

class Gated:
    def __init__(self, *arguments):
        self.plain, self.files = Prefaulter(*arguments), []

    def __getattr__(self, name):
        return getattr(self.plain, name)

    def add(self, *file):
        self.files.append(file)
        if len(self.files) <= 8:  # a table and an extent, four times
            self.plain.add(*file)
        elif len(self.files) == 32:
            threading.Thread(target=self.add_rest, daemon=True).start()

    def add_rest(self):
        while not os.path.exists(gate):
            time.sleep(0.001)
        try:
            for file in self.files[8:]:
                self.plain.add(*file)
        except ValueError:  # the daemon stops
            pass

    def progress(self):
        known = list(self.plain.progress())
        return known + [(0, 0)] * (len(self.files) - len(known))

Prefaulter, warm.Prefaulter = warm.Prefaulter, Gated
from kvtier_daemon.cli import main
main()
"""


class GrowingDaemon:
    """A daemon with a quarter of its memory, until `grow`."""

    def __init__(self, daemon_of: Callable[..., Daemon], folder: Path) -> None:
        self._gate = folder / "gate"
        folders = ":".join(sys.path)
        command = (sys.executable, "-c", SERVE_SLOWLY, folders, str(self._gate), "serve")
        self.daemon = daemon_of(config=CONFIG, command=command, wait=False)
        self.daemon.wait_for(lambda stats: stats["tiers"]["warm"]["allocated_bytes"] == 4 * EXTENT)

    def grow(self) -> None:
        self._gate.touch()

    def grow_when(self, happened: Callable[[], bool]) -> threading.Thread:
        def wait() -> None:
            deadline = time.monotonic() + 60
            while not happened() and time.monotonic() < deadline:
                time.sleep(0.001)
            self.grow()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread


@pytest.fixture
def growing(daemon_of: Callable[..., Daemon], tmp_path: Path) -> GrowingDaemon:
    return GrowingDaemon(daemon_of, tmp_path)


def test_the_readmes_python_works_right_after_the_daemon_starts(
    growing: GrowingDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    daemon, waits = growing.daemon, threading.Event()
    plain = Link.wait_for_growth

    def wait_for_growth(*arguments: object) -> object:
        waits.set()
        return plain(*arguments)

    monkeypatch.setattr(Link, "wait_for_growth", wait_for_growth)
    monkeypatch.setenv("KVTIER_SOCKET", daemon.socket)
    names: dict[str, object] = {}
    with daemon.connect() as client:  # the program's blocks do not fit into the initial memory
        other = client.open(spec_of("other"))
        keys = other.keys(list(range(16 * (4 * EXTENT // other.block_bytes))))
        with other.reserve(keys, wait_s=0) as saving:
            assert len(saving) == len(keys)
            thread = growing.grow_when(waits.is_set)
            exec(compile(code, str(README), "exec"), names)  # noqa: S102
            thread.join()
    assert waits.is_set() and names["ready"] == 4 and names["first"] == bytes(16)


def test_wait_ready_returns_when_memory_is_complete_and_does_not_block_other_threads(
    growing: GrowingDaemon,
) -> None:
    with growing.daemon.connect() as client:
        with pytest.raises(NotReady, match="not complete after 0 s"):
            client.wait_ready(timeout_s=0)
        ready: list[int] = []
        waiting = threading.Thread(target=lambda: ready.append(client.wait_ready()))
        waiting.start()
        for _ in range(10):
            client.ping()
        assert waiting.is_alive()
        growing.grow()
        while waiting.is_alive():
            client.ping()
        warm = client.stats()["tiers"]["warm"]
        assert ready == [warm["capacity_bytes"]] == [warm["allocated_bytes"]]
        assert client.wait_ready(timeout_s=0) == ready[0]


def test_a_save_that_may_not_wait_is_refused_with_the_reason(growing: GrowingDaemon) -> None:
    with growing.daemon.connect() as client:
        space = client.open(spec_of("large"))
        blocks = 12 * EXTENT // space.block_bytes
        keys = space.keys(list(range(16 * blocks)))
        with space.reserve(keys, wait_s=0) as saving:
            refused = set(saving.refused.values())
            shown = repr(saving)
        assert refused == {"growing"} and re.search(rf"{blocks - len(saving)} growing", shown)
        growing.grow()
        with space.reserve(keys, wait_s=60) as saving:
            assert len(saving) == blocks


def test_a_session_has_one_wait_for_growth_at_a_time_and_it_ends_with_the_growth(
    growing: GrowingDaemon,
) -> None:
    with growing.daemon.connect() as client:
        link = client.link
        grown = link.ask(wire.Grow(link.new_id(), wire.LIMIT_KEYS, 1), wire.Grown)
        assert grown.growing, "the deadline of one millisecond ended it"
        first = link.tell(wire.Grow(link.new_id(), wire.LIMIT_KEYS, 60_000))
        with pytest.raises(Refused, match="already waits"):
            link.ask(wire.Grow(link.new_id(), wire.LIMIT_KEYS, 60_000), wire.Grown)
        growing.grow()
        (answer,) = answers_of(link)
        assert isinstance(answer, wire.Grown) and answer.id == first


def answers_of(link: Link) -> list[wire.Message]:
    while not (answers := link.replies()):
        select.select([link.connection], [], [], 30)
    return [reply for _, reply in answers.values()]


def test_wait_ready_ends_when_the_daemon_does(growing: GrowingDaemon) -> None:
    daemon = growing.daemon
    with daemon.connect() as client:
        ended: list[KvtierError] = []

        def wait() -> None:
            try:
                client.wait_ready()
            except Unavailable as error:
                ended.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        client.ping()
        daemon.process.kill()
        waiting.join(60)
        assert ended
