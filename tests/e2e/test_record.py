"""A daemon's recording, and `kvtier sim` with it as input."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier import Refused, Space
from kvtier_daemon.cli import main
from kvtier_daemon.serving.recorder import LIMIT_TRACES
from kvtier_daemon.sim.trace import read
from support.daemons import Daemon
from support.specs import pattern, spec_of

Kvtier = Callable[..., Any]
PROMPTS = [list(range(160)), [*range(160), *range(900, 964)], [5] * 96]


@pytest.fixture
def daemon(daemon_of: Callable[..., Daemon]) -> Daemon:
    return daemon_of()


@pytest.fixture
def record(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> Iterator[Kvtier]:
    def run(*arguments: str, code: int = 0) -> Any:
        with pytest.raises(SystemExit) as left:
            main(["record", *arguments, "--json", "--socket", daemon.socket])
        result = capsys.readouterr()
        assert (left.value.code or 0) == code, result.err
        return json.loads(result.out) if not code else result.err

    yield run


def serve(space: Space, prompts: list[list[int]]) -> None:
    """Behave like an engine: look a prompt up, compute it, save it."""
    for prompt in prompts:
        keys = space.keys(prompt)
        space.match(keys)
        with space.load(keys):
            pass
        space.save(keys, [pattern(key, space.spec.block_bytes) for key in keys])


def test_hints_are_recorded_and_no_lookups(
    daemon: Daemon, record: Kvtier, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon.connect() as client:
        space = client.open(spec_of("hints"))
        result = record("start")
        serve(space, PROMPTS[:1])
        keys = space.keys(PROMPTS[0])
        assert space.hint(keys[:4], 0.75) == 4
        space.begin_hint(keys[4:], 0)
        serve(space, PROMPTS[:1])
        result = record("stop")
    told = [line.get("importance") for line in lines(result["path"])]
    assert told == [None, 0.75, 0.0, None]
    requests = read(Path(result["path"]))
    assert list(requests.hints) == [-1, 0.75, 0, -1] and requests.looked_up_blocks == 20
    with pytest.raises(SystemExit):
        main(["sim", result["path"], "--blocks", "10", "--policy", "attention", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["looked_up_blocks"], found["hit_blocks"]) == (20, 10)


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_recorded_lookups_are_a_trace_that_the_simulator_reads(
    daemon: Daemon, record: Kvtier, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon.connect() as client:
        space = client.open(spec_of("record"))
        serve(space, PROMPTS[:1])
        result = record("start")
        assert result["recording"] and record("status")["path"] == result["path"]
        serve(space, [*PROMPTS, PROMPTS[0]])
        result = record("stop")
        serve(space, PROMPTS)
    assert not result["recording"] and not result["writing"] and result["requests"] == 4
    requests = read(Path(result["path"]))
    assert list(requests.lengths) == [10, 14, 6, 10] and requests.block_tokens == 16
    assert list(requests.inputs) == [160, 224, 96, 160] and not any(requests.saved)
    with pytest.raises(SystemExit):
        main(["sim", result["path"], "--policy", "lru", "--blocks", "100", "--json"])
    hits = json.loads(capsys.readouterr().out)
    assert (hits["hit_blocks"], hits["unique_blocks"]) == (20, 20)


def test_saves_without_a_lookup_are_marked(daemon: Daemon, record: Kvtier) -> None:
    record("start")
    with daemon.connect() as client:
        space = client.open(spec_of("record"))
        serve(space, PROMPTS[:1])
        keys = space.keys([*PROMPTS[0], *range(500, 532)])
        space.save(keys[10:], [pattern(key, space.spec.block_bytes) for key in keys[10:]])
    found = lines(record("stop")["path"])
    assert [(line["saved"], len(line["hash_ids"])) for line in found] == [(False, 10), (True, 3)]
    assert found[1]["hash_ids"][0] == found[0]["hash_ids"][-1], "below what it follows"


def test_names_in_a_trace_are_anonymous_and_differ_between_traces(
    daemon: Daemon, record: Kvtier
) -> None:
    paths = []
    with daemon.connect() as client:
        space, other = client.open(spec_of("record")), client.open(spec_of("other"))
        for _ in range(2):
            record("start")
            serve(space, PROMPTS[:1])
            serve(other, PROMPTS[:1])
            paths.append(record("stop")["path"])
        keys = space.keys(PROMPTS[0])
    first, second = ({name for line in lines(path) for name in line["hash_ids"]} for path in paths)
    assert len(first) == len(second) == 20 and not first & second
    known = {
        int.from_bytes(key[at : at + 8], order)
        for key in keys
        for at in range(25)
        for order in ("big", "little")
    }
    assert not known & first
    assert all(
        set(line)
        == {"timestamp", "input_length", "output_length", "hash_ids", "block_tokens", "saved"}
        for line in lines(paths[0])
    )
    assert all(stat.S_IMODE(Path(path).stat().st_mode) == 0o600 for path in paths)


def test_a_trace_ends_when_it_is_full(daemon: Daemon, record: Kvtier) -> None:
    record("start", "--size", "1KiB")
    with daemon.connect() as client:
        space = client.open(spec_of("record"))
        serve(space, [[n] * 160 for n in range(20)])
        daemon.wait_for(lambda stats: record("status")["full"])
    result = record("status")
    size = Path(result["path"]).stat().st_size
    assert size == result["bytes"] <= 1024 and result["requests"] == len(lines(result["path"])) > 0
    assert result["left_out"] > 0 and not result["recording"]
    assert "no trace is being recorded" in record("stop", code=2)


def test_a_daemon_writes_its_recording_at_its_end(daemon: Daemon, record: Kvtier) -> None:
    path = record("start")["path"]
    with daemon.connect() as client:
        serve(client.open(spec_of("record")), PROMPTS)
    assert daemon.stop() == 0
    assert len(lines(path)) == 3


def test_one_trace_at_a_time_and_not_too_many(daemon: Daemon, record: Kvtier) -> None:
    for _ in range(LIMIT_TRACES):
        path = record("start")["path"]
        assert "stop it first" in record("start", code=2)
        record("stop")
    assert "remove some" in record("start", code=2)
    Path(path).unlink()
    assert record("start")["recording"]


def test_an_empty_trace_is_refused(daemon: Daemon, record: Kvtier) -> None:
    assert "must be above 0" in record("start", "--size", "0", code=2)
    with daemon.connect() as client, pytest.raises(Refused, match="limit_bytes is -5"):
        client.record(limit_bytes=-5)
