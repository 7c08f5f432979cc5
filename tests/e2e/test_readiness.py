"""A client of a daemon whose memory is still growing: saves wait for room, and `wait_ready` for all of it."""

from __future__ import annotations

import re
import select
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from daemons import Daemon
from kvtier import KvtierError, NotReady, Refused, Unavailable, wire
from kvtier.link import Link
from specs import spec_of

WARM = "2GiB"  # takes longer to allocate than a client to connect
README = Path(__file__).parents[2] / "README.md"


def still_grows(daemon: Daemon) -> bool:
    warm = daemon.stats()["tiers"]["warm"]
    return bool(warm["allocated_bytes"] < warm["capacity_bytes"])


def test_the_readmes_python_works_right_after_the_daemon_starts(
    daemon_of: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    daemon = daemon_of(warm=WARM, wait=False)
    assert still_grows(daemon), "the test needs a daemon whose memory still grows"
    monkeypatch.setenv("KVTIER_SOCKET", daemon.socket)
    names: dict[str, object] = {}
    exec(compile(code, str(README), "exec"), names)  # noqa: S102
    assert names["ready"] == 4 and names["first"] == bytes(16)


def test_wait_ready_returns_when_memory_is_complete_and_lets_other_threads_ask(
    daemon_of: Callable[..., Daemon],
) -> None:
    daemon = daemon_of(warm=WARM, wait=False)
    with daemon.connect() as client:
        with pytest.raises(NotReady, match="not complete after 0 s"):
            client.wait_ready(timeout_s=0)
        ready: list[int] = []
        waiting = threading.Thread(target=lambda: ready.append(client.wait_ready()))
        waiting.start()
        while waiting.is_alive():
            client.ping()
        warm = client.stats()["tiers"]["warm"]
        assert ready == [warm["capacity_bytes"]] == [warm["allocated_bytes"]]
        assert client.wait_ready(timeout_s=0) == ready[0]


def test_a_save_that_may_not_wait_is_refused_and_shows_why(
    daemon_of: Callable[..., Daemon],
) -> None:
    daemon = daemon_of(warm=WARM, wait=False)
    with daemon.connect() as client:
        space = client.open(spec_of("large", layers=256))
        blocks = (3 << 29) // space.block_bytes
        keys = space.keys(list(range(16 * blocks)))
        with space.reserve(keys, wait_s=0) as saving:
            refused = set(saving.refused.values())
            shown = repr(saving)
        assert refused == {"growing"} and re.search(rf"{blocks - len(saving)} growing", shown)
        with space.reserve(keys) as saving:
            assert len(saving) == blocks


def test_a_session_has_one_wait_for_growth_at_a_time_and_it_ends_by_its_deadline(
    daemon_of: Callable[..., Daemon],
) -> None:
    daemon = daemon_of(warm=WARM, wait=False)
    with daemon.connect() as client:
        link = client.link
        grown = link.ask(wire.Grow(link.new_id(), wire.LIMIT_KEYS, 1), wire.Grown)
        assert grown.growing, "the test needs a daemon whose memory still grows"
        first = link.tell(wire.Grow(link.new_id(), wire.LIMIT_KEYS, 60_000))
        with pytest.raises(Refused, match="already waits"):
            link.ask(wire.Grow(link.new_id(), wire.LIMIT_KEYS, 60_000), wire.Grown)
        (answer,) = answers_of(link)
        assert isinstance(answer, wire.Grown) and answer.id == first


def answers_of(link: Link) -> list[wire.Message]:
    while not (answers := link.replies()):
        select.select([link.connection], [], [], 30)
    return [reply for _, reply in answers.values()]


def test_wait_ready_ends_when_the_daemon_does(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(warm=WARM, wait=False)
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
        waiting.join(30)
        assert ended
