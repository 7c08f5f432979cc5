"""The simulation of fleets keeps what must hold for any trace."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import scale
import traces

PROGRAM = Path(scale.__file__)
REQUESTS = traces.chat(400, seed=3)


def best(requests: list[traces.Timed]) -> int:
    """The hits if everything that was computed once stays."""
    seen: set[int] = set()
    hits = 0
    for _, blocks in requests:
        hits += scale.leading([one in seen for one in blocks])
        seen.update(blocks)
    return hits


@pytest.mark.parametrize("router", [scale.ANY, scale.STICKY])
@pytest.mark.parametrize("hosts", [2, 64])
def test_a_store_that_gets_all_blocks_finds_what_can_be_found(router: str, hosts: int) -> None:
    sums = scale.with_store(REQUESTS, hosts, router, 60.0, 1)
    assert sums["every"] == best(REQUESTS)
    assert sums["local"] <= sums["used"] <= sums["every"] <= sums["all"]
    assert sums["every"] == sums["local"] + sums["read"]
    assert sums["fresh_used"] <= sums["fresh"] == len({b for _, one in REQUESTS for b in one})


def test_one_host_that_keeps_everything_needs_no_store() -> None:
    sums = scale.with_store(REQUESTS, 1, scale.ANY, 1e9, 1)
    assert sums["local"] == best(REQUESTS)
    assert sums["read"] == 0
    hits, total = scale.local_hits(REQUESTS, 1, scale.ANY, 10**6)
    assert (hits, total) == (best(REQUESTS), sums["all"])


def test_a_router_that_knows_caches_keeps_conversations_together() -> None:
    hosts = scale.routed(REQUESTS, 8, scale.STICKY, random.Random(1))
    assert len(set(hosts)) == 8
    owner: dict[int, int] = {}
    for host, (_, blocks) in zip(hosts, REQUESTS, strict=True):
        seen = scale.leading([one in owner for one in blocks])
        if 2 * seen >= len(blocks):
            assert host == owner[blocks[seen - 1]]
        owner |= {one: owner.get(one, host) for one in blocks}
    near = scale.with_store(REQUESTS, 8, scale.STICKY, 1e6, 1)["local"]
    assert near > scale.with_store(REQUESTS, 8, scale.ANY, 1e6, 1)["local"]


def test_the_page_has_the_rows_of_the_program() -> None:
    page = (Path(__file__).parents[1] / "docs" / "scale.md").read_text()
    outcome = scale.simulated(REQUESTS, 2, scale.ANY)
    heads = [line for line in scale.tables([outcome]).splitlines() if line.startswith("| hosts")]
    assert len(heads) == 2
    for head in heads:
        assert page.count(head) == 2, "one table for each trace"
    for hosts in scale.HOSTS:
        assert page.count(f"| {hosts:,} | {scale.ANY} | ") == 2 * (1 + len(scale.SIZES))


def test_the_program_reads_a_trace_and_draws(tmp_path: Path) -> None:
    trace, chart = Path(__file__).parent / "traces" / "small.jsonl", tmp_path / "scale.svg"
    done = subprocess.run(
        [sys.executable, PROGRAM, "--trace", trace, "--svg", chart],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "| 1,024 | same host | 256 |" in done.stdout
    assert chart.read_text().count("store, all") == 2
