"""The evaluation of the benchmark that compares another daemon, without that daemon; and the
presentation of its results."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import bench_peers as bench
import figures
from peer_bytes import PAGE_WORDS, TOKENS, Blocks, tokens_of


def test_the_peers_requirements_do_not_install_another_torch() -> None:
    pins = [bench.TORCH, *bench.PINS.split()]
    names = [pin.partition("==")[0].lower() for pin in pins]
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", pin) and not pin.startswith("-") for pin in pins)
    assert len(set(names)) == len(names) and "lmcache" in names
    assert not [name for name in names if name.startswith(("nvidia", "cuda", "cupy", "triton"))]


def test_every_page_of_every_prompts_blocks_differs_and_is_compared() -> None:
    blocks = Blocks(3 * 8 * PAGE_WORDS, 2)
    pages = set()
    for prompt in (1, 2):
        blocks.fill(prompt)
        pages |= {page.tobytes() for page in blocks.sources.reshape(-1, PAGE_WORDS)}
        pages |= {blocks.begins(block) for block in (0, 1)}
    assert len(pages) == 2 * (6 + 2)
    blocks.targets[:] = blocks.sources
    assert blocks.wrong(2) == 0
    blocks.targets[1, -1] += 1
    assert (blocks.wrong(1), blocks.wrong(2)) == (0, 1)
    assert (
        len(tokens_of(7, 3)) == 3 * TOKENS and tokens_of(7, 3)[:TOKENS] != tokens_of(8, 3)[:TOKENS]
    )


def test_a_speed_is_divided_by_the_limit_of_its_own_round() -> None:
    times = bench.Times([1.0, 2.0, 4.0], {"a": [2.0, 4.0, 8.0], "b": [1.0, 1.0, 4.0]})
    a, b = bench.speed_rows("copy", times, 10**9)
    assert (a.name, a.value, a.low, a.high) == ("a: copy", 0.5, 0.5, 0.5)
    assert (b.value, b.more["GB/s"], b.more["limit GB/s"]) == (1.0, 1.0, 0.5)


@pytest.mark.parametrize(
    ("found", "wrong", "unit", "said"),
    [
        (5, 0, "yes", "yes: a miss from that block on: 5 delivered, none wrong"),
        (16, 0, "yes", "yes: all 16 delivered, none wrong"),
        (16, 1, "no", "no: 1 wrong of 16 blocks that were delivered as good"),
    ],
)
def test_wrong_bytes_from_a_damaged_disk_are_a_failure(
    found: int, wrong: int, unit: str, said: str
) -> None:
    row = bench.damage_row("zeroed", "it", {"found": found, "wrong": wrong}, 5)
    assert (row.unit, row.value, row.more["said"]) == (unit, float(not wrong), said)


def test_incomplete_prompts_are_stored_again_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench.time, "sleep", lambda _: None)
    answers = [{"stored": 0}, {"stored": 15}, {"stored": 16}, {"stored": 16}]
    asked = []

    class Full:
        def store(self, prompt: int, blocks: int) -> dict[str, int]:
            asked.append((prompt, blocks))
            return answers[len(asked) - 1]

    prompt, stored, short = bench.kept(Full(), 16)
    assert ((prompt, 16), stored, short) == (asked[2], {"stored": 16}, 2)
    assert len(set(asked)) == 3
    answers[3:] = [{"stored": 0}] * 100
    with pytest.raises(RuntimeError, match="nothing is stored whole"):
        bench.kept(Full(), 16)


def test_a_burst_must_keep_the_newest_prompts() -> None:
    some = bench.CHUNKS
    kept = bench.burst_row("it", 64, [0, 0, some, some], 2)
    lost = bench.burst_row("it", 64, [some, some, some, 3], 2)
    assert (kept.unit, lost.unit) == ("yes", "no")
    assert lost.more["said"] == "no: 64 blocks of 64 acknowledged; 51 there, of the newest 32 19"


def test_a_size_limit_holds_only_if_every_sample_is_below_it() -> None:
    mib = bench.MIB
    assert bench.cap_row(256 * mib, "it", [200 * mib, 256 * mib]).unit == "yes"
    over = bench.cap_row(256 * mib, "it", [256 * mib + 4096, 200 * mib])
    assert (over.unit, over.name) == ("no", "it: a disk cap of 256 MiB holds over 2 starts")


def test_a_call_that_did_not_end_is_reported_as_waiting() -> None:
    waits = bench.waited_row("a lookup", "it", None, 40.0, 300.0)
    assert (waits.value, waits.more["said"]) == (
        40.0,
        "still waiting after 40 s (timeout of a request: 300 s)",
    )
    ended = bench.waited_row("a lookup", "it", [5.02, "Unavailable"], 40.0, 5.0)
    assert (ended.value, ended.more["said"]) == (
        5.02,
        "5.0 s, Unavailable (timeout of a request: 5 s)",
    )


def test_damage_is_written_to_the_selected_block(tmp_path: Path) -> None:
    """With a header before each block in one file, as in kvtier; with one file per block, as in LMCache."""
    size = 8192
    blocks = Blocks(size, 3)
    blocks.fill(9)
    header = bench.disks.HEADER
    bodies = [each.tobytes() for each in blocks.sources]
    heads = [bytes([n + 1]) * header for n in range(3)]
    one, many = tmp_path / "one", tmp_path / "many"
    for folder in (one, many):
        (folder / "disk").mkdir(parents=True)
    (one / "disk" / "segment").write_bytes(
        b"".join(h + b for h, b in zip(heads, bodies, strict=True))
    )
    for n, body in enumerate(bodies):
        (many / "disk" / f"{n}.data").write_bytes(body)
    for folder in (one, many):
        bench.copy_over(
            bench.place_of(folder, blocks.begins(0)), bench.place_of(folder, blocks.begins(2)), size
        )
    now = (one / "disk" / "segment").read_bytes()
    assert now == heads[0] + bodies[0] + heads[1] + bodies[1] + heads[0] + bodies[0]
    assert (many / "disk" / "2.data").read_bytes() == bodies[0]
    path, at = bench.place_of(many, blocks.begins(1))
    bench.zero_bytes(path, at)
    changed = [n for n, byte in enumerate(path.read_bytes()) if byte != bodies[1][n]]
    assert 0 < len(changed) <= 64 and path.stat().st_size == size
    assert bench.disk_bytes(many) >= 3 * size
    with pytest.raises(AssertionError, match="no block that begins so"):
        bench.place_of(many, os.urandom(64))


def test_each_system_has_a_column() -> None:
    rows = [
        bench.row_of("lookup", "kvtier", 0.05, "ms"),
        bench.yes_row("cap", "kvtier", True, "fine"),
        bench.row_of("lookup", "peer 1.0", 1.25, "ms"),
        bench.row_of("its own: way", "peer 1.0", 3.0, "x"),
    ]
    where = {"commit": "0a1b2c3", "cores": 2, "cpu": "a CPU", "peer": "It ran so."}
    found = {"environment": where, "valid": True, "rows": [asdict(row) for row in rows]}
    page = figures.everything({"peers": found}).splitlines()
    assert page[page.index("## peers") + 1].endswith(
        "on 2 shared cores of a CPU, at commit 0a1b2c3. It ran so."
    )
    assert [line for line in page if line.startswith("|")] == [
        "| | kvtier | peer 1.0 | commit |",
        "| --- | --- | --- | --- |",
        "| lookup | 0.05 ms | 1.25 ms | 0a1b2c3 |",
        "| cap | yes: fine |  | 0a1b2c3 |",
        "| its own: way |  | 3 x | 0a1b2c3 |",
    ]
