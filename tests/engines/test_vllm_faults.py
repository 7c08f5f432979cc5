"""A daemon that is killed, stopped or restarted under a serving engine: no request fails, none is wrong."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from daemons import Daemon, start_daemon
from prompts import check_same, prompt

ROUNDS = 4
PROMPTS = [prompt(seed, 330) for seed in range(100, 112)]
TOKENS = 24
HANG_S = 2.0


class Daemons:
    """The daemon at one socket, again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = self.start()

    def start(self) -> Daemon:
        self.now = start_daemon(self.folder, warm="64MiB")
        return self.now

    def kill(self) -> None:
        self.now.process.kill()
        self.now.process.wait()


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    daemons = Daemons(tmp_path_factory.mktemp("daemon"))
    yield daemons
    daemons.now.stop()


@pytest.fixture(scope="module")
def engine(daemons: Daemons, engine_of: Callable[..., Any]) -> Any:
    """Found by its name, through vLLM's plugins: what a user writes."""
    return engine_of("llama", daemons.now.socket, connector="KvtierConnector")


@pytest.fixture(scope="module")
def right(engine: Any) -> list[Any]:
    """What must come out, computed without a hit."""
    return list(engine.generate(PROMPTS, TOKENS))


def killed(daemons: Daemons) -> None:
    daemons.kill()


def hung(daemons: Daemons) -> None:
    daemons.now.process.send_signal(signal.SIGSTOP)
    time.sleep(HANG_S)
    daemons.now.process.send_signal(signal.SIGCONT)


def restarted(daemons: Daemons) -> None:
    assert daemons.now.stop() == 0
    daemons.start()


@pytest.mark.parametrize("fault", [killed, hung, restarted])
def test_no_request_fails(
    engine: Any, daemons: Daemons, right: list[Any], fault: Callable[[Daemons], None]
) -> None:
    moment = random.Random(fault.__name__)
    for _ in range(ROUNDS):
        engine.reset()
        engine.begin(PROMPTS, TOKENS)
        time.sleep(moment.uniform(0.0, 0.4))
        fault(daemons)
        for one, other in zip(engine.answer(), right, strict=True):
            check_same(one, other)
        if daemons.now.process.poll() is not None:
            daemons.start()


def test_after_all_of_it_there_are_hits_again(
    engine: Any, daemons: Daemons, right: list[Any]
) -> None:
    for _ in range(100):
        engine.reset()
        again = engine.generate(PROMPTS, TOKENS)
        for one, other in zip(again, right, strict=True):
            check_same(one, other)
        if all(one["cached"] for one in again):
            break
    assert all(one["cached"] for one in again)
    daemons.now.wait_for(lambda stats: not stats["tenants"]["default"]["leases"])
