"""An engine with a disk that stores its model with a loss: loaded pages are close to the saved ones,
and answers are close to the computed ones. One engine, with a daemon that restarts with another codec
each time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.calibrated import write_profile
from support.daemons import Daemon, start_daemon
from support.prompts import BLOCK, prompt

PROMPTS = 4
# Recompute of a small model may be faster than a read: then the planner would not read.
PATIENT: dict[str, Any] = {"connector": "PatientConnector", "extra": {"patience_ms": 10_000}}
AGAIN_S = 30.0  # until the plugin has connected to a restarted daemon
# The largest difference of a logprob: for bits that give half a percent per channel, for a mantissa
# of four bits or less, and for a calibrated divergence of 1e-2.
NEAR = {"q8": 0.3, "fp8": 0.9, "ecsq-hi": 0.9}


@pytest.fixture(scope="module")
def profile(model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_profile(model_of("uneven"), tmp_path_factory.mktemp("profile"))


class Disk:
    """A daemon's disk. The daemon is restarted with one codec at a time."""

    def __init__(self, folder: Path, profile: Path) -> None:
        self.folder = folder
        self.profile = profile
        self.daemon: Daemon | None = None
        (folder / "cold").mkdir()

    @property
    def socket(self) -> str:
        return str(self.folder / "kvtier.sock")

    def restart(self, codec: str) -> Daemon:
        self.stop()
        self.daemon = start_daemon(
            self.folder,
            config=f'[warm]\nsize = "64MiB"\n[cold]\ndirectories = ["{self.folder / "cold"}"]\n'
            f'size = "256MiB"\nwrite = "through"\ncodecs = ["*={codec}"]\nprofiles = ["{self.profile}"]\n',
        )
        return self.daemon

    def stop(self) -> None:
        if self.daemon is not None:
            self.daemon.stop()


@pytest.fixture(scope="module")
def disk(profile: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    made = Disk(tmp_path_factory.mktemp("daemon"), profile)
    made.restart("q8")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def engine(disk: Disk, engine_of: Callable[..., Any]) -> Any:
    return engine_of("uneven", disk.socket, **PATIENT)


@pytest.fixture(scope="module")
def in_bfloat16(disk: Disk, engine_of: Callable[..., Any]) -> Any:
    """Its pages are tiles if the processor supports them."""
    return engine_of("uneven", disk.socket, dtype="bfloat16", **PATIENT)


def over_the_disk(engine: Any, disk: Disk, codec: str, seed: int) -> tuple[list[Any], list[Any]]:
    """The answers as computed, and after a load from the disk. Every loaded page has a loss."""
    prompts = [prompt(seed + number) for number in range(PROMPTS)]
    blocks = 10 * PROMPTS
    computed = saved(engine, disk.restart(codec), prompts, blocks)
    daemon = disk.restart(codec)
    engine.forget_records()
    loaded = found(engine, prompts)
    assert [one["cached"] for one in loaded] == [10 * BLOCK] * PROMPTS
    (said,) = daemon.stats()["tiers"]["cold"]["coding"]["spaces"]
    assert (said["asked"], said["codec"], said["why"]) == (codec, codec, "")
    count, wrong = engine.compare()
    assert count == blocks * 4 == len(wrong), "what was loaded has lost nothing"
    return computed, loaded


def saved(engine: Any, daemon: Daemon, prompts: list[list[int]], blocks: int) -> list[Any]:
    """Compute the prompts after the engine is connected. At the end all blocks are on the disk."""

    def written(stats: dict[str, Any]) -> int:
        return int(stats["tiers"]["cold"]["states"]["written"])

    before = written(daemon.stats())
    one_block = prompts[0][::-1][: BLOCK + 1]
    deadline = time.monotonic() + AGAIN_S
    while not daemon.stats()["tiers"]["warm"]["blocks"] and time.monotonic() < deadline:
        engine.reset()
        engine.generate([one_block], 1)
    engine.reset()
    computed: list[Any] = engine.generate(prompts, 8)
    daemon.wait_for(lambda stats: written(stats) >= before + 1 + blocks, 30.0)
    return computed


def found(engine: Any, prompts: list[list[int]]) -> list[Any]:
    """Repeat each prompt until it is loaded: a daemon accepts clients before its recovery is complete."""
    answers = []
    for tokens in prompts:
        deadline = time.monotonic() + AGAIN_S
        while True:
            engine.reset()
            (answer,) = engine.generate([tokens], 8)
            if answer["cached"] or time.monotonic() > deadline:
                break
        answers.append(answer)
    return answers


def distance(computed: list[Any], loaded: list[Any]) -> float:
    """The largest difference of logprobs, up to the first different token. The logprobs of two tokens
    that were each the likeliest differ at most as much as the distributions."""
    found = 0.0
    for one, other in zip(computed, loaded, strict=True):
        pairs = zip(one["tokens"], other["tokens"], one["logprobs"], other["logprobs"], strict=True)
        for token, same, logprob, near in pairs:
            found = max(found, abs(logprob - near))
            if token != same:
                break
    return found


@pytest.mark.parametrize("codec", NEAR)
def test_a_lossy_codec_gives_close_answers(engine: Any, disk: Disk, codec: str) -> None:
    seed = 100 * (1 + list(NEAR).index(codec))
    far = distance(*over_the_disk(engine, disk, codec, seed))
    print(f"{codec}: logprobs {far:.3f} apart at most")
    assert 0.0 < far < NEAR[codec]


def test_a_wrong_page_order_is_detected(engine: Any, disk: Disk) -> None:
    """The control: with the order of K and V exchanged, the steps of a channel are derived from other
    elements."""
    far = by_another_order(engine, disk, 900)
    print(f"another order: logprobs {far:.3f} apart")
    assert far > NEAR["q8"]


def test_pages_in_bfloat16_are_stored_in_their_order(in_bfloat16: Any, disk: Disk) -> None:
    far = distance(*over_the_disk(in_bfloat16, disk, "q8", 1000))
    wrong = by_another_order(in_bfloat16, disk, 1100)
    print(f"bfloat16: logprobs {far:.3f} apart, {wrong:.3f} by another order")
    assert 0.0 < far < NEAR["q8"] < wrong


def by_another_order(engine: Any, disk: Disk, seed: int) -> float:
    (engine.records / "order").write_text("hptd|hpdt")
    try:
        return distance(*over_the_disk(engine, disk, "q8", seed))
    finally:
        (engine.records / "order").unlink()
