"""A serving engine with a daemon that dies, hangs, restarts, sends invalid replies, has a full disk, or
reads damaged blocks, in an order drawn from a seed. No request fails, all answers are
correct, and hits return."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engines.served import ANSWER_S, Records, Served
from support.disks import mounted
from support.effort import effort
from support.faulted import AGAIN_S, KINDS, NEEDS_DISK, Daemons
from support.prompts import BLOCK, check_same, prompt

SEED = 5
FAULTS = effort(13, 50, 500)  # each kind once, or more often
CLIENTS = 3
TOKENS = 12
PROMPTS = [
    prompt(seed % 4, 5 * BLOCK) + prompt(seed, 5 * BLOCK + 10 + seed % 20)
    for seed in range(100, 124)
]
PAGES = 64  # in the engine's own cache: a sixth of what the prompts need
PATIENCE_S = 1.0  # the option's default
MIB = 1 << 20


class Traffic:
    """Threads that send requests without a pause, and compare every answer."""

    def __init__(self, engine: Served, right: list[dict[str, Any]]) -> None:
        self._engine, self._right = engine, right
        self._ending = threading.Event()
        self.failures: list[BaseException] = []
        self.answered: Counter[str] = Counter()
        self._threads = [
            threading.Thread(target=self._ask, args=(random.Random(SEED + number),), daemon=True)
            for number in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, chance: random.Random) -> None:
        while not self._ending.is_set():
            which = chance.randrange(len(PROMPTS))
            abort = chance.choice(["queued", "loading", "running", "saving"])
            more = {"abort": abort} if chance.random() < 0.1 else {}
            try:
                answer = self._engine.begin(PROMPTS[which], TOKENS, **more).result(ANSWER_S)
                self.answered["aborted" if "aborted" in answer else "whole"] += 1
                if "aborted" not in answer:
                    check_same(answer, self._right[which])
            except BaseException as error:  # noqa: BLE001  # the test reports it
                self.failures.append(error)
                return

    def end(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(ANSWER_S)


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    folder = tmp_path_factory.mktemp("daemon")
    with contextlib.ExitStack() as stack:
        disk = None
        try:
            disk = stack.enter_context(mounted(folder, 192 * MIB))
        except pytest.skip.Exception as why:
            print(f"there is no disk to fill: {why}")
        daemons = Daemons(folder, disk)
        yield daemons
        daemons.close()
        _, raised, what = daemons.now.log.read_text().partition("Traceback")
        assert not raised, what[:4000]


@pytest.fixture(scope="module")
def engine(daemons: Daemons, engine_of: Callable[..., Any]) -> Served:
    started = engine_of(
        "llama", daemons.now.socket, script="serving.py", num_gpu_blocks_override=PAGES,
        max_model_len=512, disable_log_stats=False, extra={"patience_ms": int(PATIENCE_S * 1000)},
    )  # fmt: skip
    return Served(started)


def hits(engine: Served) -> int:
    counts = engine.state()["counts"]
    return sum(n for name, n in counts.items() if name.startswith("hit_tokens:")) // BLOCK


def test_no_request_fails_whatever_happens_to_the_daemon(
    engine: Served, daemons: Daemons, request: pytest.FixtureRequest
) -> None:
    right = engine.compute(PROMPTS, TOKENS)
    records, chance = Records(engine.engine.records), random.Random(SEED)
    traffic = Traffic(engine, right)
    request.addfinalizer(traffic.end)
    kinds = [kind for kind in KINDS if kind not in NEEDS_DISK or daemons.disk is not None]
    happened: Counter[str] = Counter()
    away_s = []
    for number in range(FAULTS):
        # Every kind once before any is repeated.
        kind = kinds[number] if number < len(kinds) else chance.choice(kinds)
        time.sleep(chance.uniform(0.0, 0.3))
        kind(daemons, chance)
        happened[kind.__name__] += 1
        what = f"fault {number}, {kind.__name__}, seed {SEED}"
        before, since = hits(engine), time.monotonic()
        while hits(engine) < before + BLOCK:
            ended = daemons.now.process.poll()
            assert ended is None, f"{what}: the daemon ended, {ended}: {daemons.said()}"
            assert time.monotonic() < since + AGAIN_S, (
                f"{what}: no hits any more: {engine.state()}: {daemons.said()}"
            )
            time.sleep(0.05)
        away_s.append(time.monotonic() - since)
        assert not traffic.failures, f"{what}: {traffic.failures}"
        assert records.wrong() == [], what
    traffic.end()
    assert not traffic.failures, traffic.failures
    daemons.look()
    state = engine.check_nothing_is_held(daemons.now)
    assert records.wrong() + records.wrong() == []
    print(dict(happened), dict(traffic.answered), state["counts"], f"{daemons.spoilt} spoilt")
    print(
        f"{records.compared} pages compared, longest wait {records.longest_wait_s:.3f} s,"
        f" hits again after {sorted(away_s)[len(away_s) // 2]:.2f} s, {max(away_s):.2f} s at most"
    )
    print({name: f"{s * 1000:.1f} ms" for name, s in records.longest_calls.items()})
    assert records.longest_wait_s <= PATIENCE_S
    # All promised blocks were available, also those of daemons that had ended.
    assert not any(name.startswith("load_failed") for name in state["counts"]), state["counts"]
    assert not records.waits, "a step waited for the daemon"
    assert records.compared > FAULTS * BLOCK
    assert daemons.spoilt, "nothing that was damaged was read"
