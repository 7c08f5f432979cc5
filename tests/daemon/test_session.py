"""One session in this process: what a bug of ours costs, and what it does not."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier import wire
from kvtier.catalog import Catalog
from kvtier.policy.base import make
from kvtier_daemon.recorder import Recorder
from kvtier_daemon.server import Server
from kvtier_daemon.tenant import Tenant
from kvtier_kernels import Store
from specs import spec_of


def test_a_bug_of_ours_ends_one_session_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(*_: Any) -> None:
        raise RuntimeError("planted")

    async def run() -> None:
        loop = asyncio.get_running_loop()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.setblocking(False)
        tenant = Tenant("t", bytes(32), 0, Catalog(Store(), make("lru")))
        recorder = Recorder(tmp_path, loop.time)
        server = Server(
            loop, listener, lambda uid: tenant, {"t": tenant}, lambda tenant: {}, 8, recorder
        )
        monkeypatch.setattr(Catalog, "match", bug)
        answers = [
            await loop.run_in_executor(None, talk, str(tmp_path / "s"), ask) for ask in (1, 0)
        ]
        assert isinstance(answers[0], wire.Failed)
        assert (answers[0].code, answers[0].fatal) == ("internal", True)
        assert answers[1] == wire.Done(3)
        assert server.failures["internal"] == 1
        server.close("done")
        listener.close()

    asyncio.run(run())
    assert "planted" in caplog.text, "with where it happened"


def test_what_a_session_held_ends_with_it_though_its_reads_cannot_be_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(*_: Any) -> None:
        raise RuntimeError("planted")

    async def run() -> None:
        loop = asyncio.get_running_loop()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.setblocking(False)
        mover: Any = SimpleNamespace(session_over=bug)
        tenant = Tenant("t", bytes(32), 0, Catalog(Store(), make("lru")), mover)
        recorder = Recorder(tmp_path, loop.time)
        server = Server(
            loop, listener, lambda uid: tenant, {"t": tenant}, lambda tenant: {}, 8, recorder
        )
        await loop.run_in_executor(None, talk, str(tmp_path / "s"), 0)
        async with asyncio.timeout(10):
            while server.sessions:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (tenant.catalog.spaces, server.ghosts) == (0, set())
        assert server.failures["internal"] == 1
        server.close("done")
        listener.close()

    asyncio.run(run())
    assert "planted" in caplog.text


def talk(path: str, matches: int) -> wire.Reply:
    """Say hello, open, perhaps match, ping; the answer after the Opened."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(path)
        requests: list[wire.Message] = [
            wire.Hello(1, wire.SCHEMA, "bug\nforged line"),
            wire.Open(2, spec_of("bug")),
        ]
        requests += [wire.Match(9, 0, bytes(32))] * matches
        requests += [wire.Ping(3)]
        sock.sendall(b"".join(map(wire.encode, requests)))
        framer, replies = wire.Framer(), []
        while len(replies) < 3:
            replies += [wire.decode_reply(body) for body in framer.feed(sock.recv(1 << 16))]
    return replies[2]
