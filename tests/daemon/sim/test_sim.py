"""`kvtier sim`: its output for a small trace, and errors for invalid files."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier_daemon.cli import main
from kvtier_daemon.sim.compressed import CompressedReplay
from kvtier_daemon.sim.replay import replay
from kvtier_daemon.sim.report import percentiles, report, without_tiers
from kvtier_daemon.sim.tiers import RESIDENCY, SEGMENTS, Machine, Simulation
from kvtier_daemon.sim.trace import TraceRequests, read
from kvtier_daemon.tiers.cold import write_budget
from kvtier_daemon.tools.sizing import PrefillCost
from support.effort import effort
from support.pages import blocks

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
traces = importlib.import_module("traces")

SMALL = Path(__file__).parents[2] / "traces" / "small.jsonl"
GIB = 1 << 30
GOOD = {"timestamp": 5, "input_length": 1000, "output_length": 1, "hash_ids": [1, 2]}
Sim = Callable[..., Any]
PINNED_HITS = {"memory": 0.0755, "nvme": 0.1781}
PINNED_TTFT = {"p50": 1700.429, "p90": 5021.47, "p99": 6269.483}


@pytest.fixture
def sim(capsys: pytest.CaptureFixture[str]) -> Sim:
    def run(*arguments: str) -> Any:
        with pytest.raises(SystemExit) as left:
            main(["sim", *arguments, "--json"])
        result = capsys.readouterr()
        assert not left.value.code, result.err
        return json.loads(result.out)

    return run


PAGE = Path(__file__).parents[3] / "docs/sizing.md"
PRINTED = [one.text for one in blocks(PAGE) if one.text.startswith("$ kvtier sim")]


@pytest.mark.parametrize("printed", PRINTED, ids=["sizes", "costs"])
def test_the_commands_of_the_page_simulate_a_trace(
    printed: str, sim: Sim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
              "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16"}  # fmt: skip
    (tmp_path / "Meta-Llama-3-8B").mkdir()
    (tmp_path / "Meta-Llama-3-8B/config.json").write_text(json.dumps(config))
    (tmp_path / "trace.jsonl").write_bytes(SMALL.read_bytes())
    monkeypatch.chdir(tmp_path)
    words = shlex.split(printed)
    assert words[:4] == ["$", "kvtier", "sim", "trace.jsonl"]
    runs = sim(*words[3:])["runs"]
    assert len(runs) == (9 if "--budget" in words else 2 * 3)
    assert all(run["hit_rate"] > 0 for run in runs)
    assert ("--plot" in words) == (tmp_path / "rates.svg").exists()


@pytest.fixture(scope="module")
def small() -> TraceRequests:
    return read(SMALL)


def machine(**more: Any) -> Machine:
    fields: dict[str, Any] = {
        "memory_bytes": 4 * GIB, "nvme_bytes": 32 * GIB, "token_bytes": 131_072, "policy": "lru",
        "prefill": PrefillCost(1e-4), "engines": 2, "nvme_read_bytes_s": 3e9,
    }  # fmt: skip
    return Machine(**fields | more)


def hinted(path: Path, hints: bool, blocks: int = 8, gap: int = 24) -> TraceRequests:
    """Chains, of which every fourth returns once when `gap` others came, and hints that tell which ones."""
    lines, seconds = [], 0
    for number in range(400):
        for first in (number, number - gap):
            if first < number and (first < 0 or first % 4):
                continue
            seconds += 1
            line = {"timestamp": seconds * 1000, "input_length": blocks * 512, "output_length": 1}
            line["hash_ids"] = list(range(first * blocks, (first + 1) * blocks))
            lines.append(line)
            if hints:
                importance = 0.1 if first % 4 or first < number else 0.9
                lines.append(line | {"input_length": 0, "importance": importance})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read(path)


@pytest.mark.parametrize("policy", ["attention", "auto"])
@pytest.mark.parametrize("nvme", [0, 64])
def test_hints_of_a_trace_add_hits(policy: str, nvme: int, tmp_path: Path) -> None:
    """Memory has room for 10 chains, the disk for 8; 24 others come between two uses of one."""
    block = 131_072 * 512
    hits = []
    for hints in (False, True):
        requests = hinted(tmp_path / "trace.jsonl", hints)
        one = machine(policy=policy, memory_bytes=80 * block, nvme_bytes=nvme * block)
        simulation = Simulation(requests, one)
        simulation.run()
        assert simulation.totals.looked_up_blocks == requests.looked_up_blocks == 494 * 8
        hits.append(sum(simulation.totals.hit_blocks.values()))
        alone = replay(requests, policy, 80, one.prefill)
        best = replay(requests, "optimum", 80, one.prefill)
        assert alone.hit_blocks <= best.hit_blocks <= requests.looked_up_blocks
        hits.append(alone.hit_blocks)
    print(policy, nvme, hits)
    assert hits[2] > 1.15 * hits[0] and hits[3] > 1.15 * hits[1] and hits[3] > 600


def test_the_disk_of_the_simulation_keeps_what_hints_call_important(tmp_path: Path) -> None:
    """A policy that ignores hints, so only the reuse of segments differs."""
    block = 131_072 * 512
    hits = []
    for hints in (False, True):
        requests = hinted(tmp_path / "trace.jsonl", hints, 8, 140)
        one = machine(policy="lru", memory_bytes=80 * block, nvme_bytes=1024 * block)
        simulation = Simulation(requests, one)
        simulation.run()
        hits.append(simulation.totals.hit_blocks["nvme"])
    print(hits)
    assert hits[1] > 10 * hits[0] and hits[1] > 100


def test_an_announcement_brings_blocks_from_the_disk_before_their_request(tmp_path: Path) -> None:
    """The first chain leaves memory for the disk, and returns when 30 others came."""
    block, path, found = 131_072 * 512, tmp_path / "trace.jsonl", []
    for announced in (False, True):
        lines: list[dict[str, Any]] = []
        for number, first in enumerate([*range(31), 0]):
            names = list(range(8 * first, 8 * first + 8))
            line = {"timestamp": 10_000 * number, "output_length": 1, "hash_ids": names}
            if announced and number == 31:
                early = {"timestamp": 10_000 * number - 5000, "input_length": 0, "announced": True}
                lines.append(line | early)
            lines.append(line | {"input_length": 8 * 512})
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        requests = read(path)
        one = machine(memory_bytes=80 * block, nvme_bytes=1024 * block)
        simulation = Simulation(requests, one)
        simulation.run()
        assert simulation.totals.looked_up_blocks == requests.looked_up_blocks == 32 * 8
        found.append(simulation.totals.hit_blocks)
        for policy in ("lru", "optimum"):  # memory alone reads nothing
            alone = replay(requests, policy, 80, one.prefill)
            assert alone.hit_blocks == (0 if policy == "lru" else 8)
    assert found == [Counter(hbm=0, memory=0, nvme=8), Counter(hbm=0, memory=8, nvme=0)]
    compressed = CompressedReplay(requests, "lru", 80, 0.25, 0.5)
    assert not any(compressed.run(100))


# --- one tier --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "blocks", "hits"),
    [("lru", 50, 163), ("lru", 200, 403), ("optimum", 50, 639), ("optimum", 200, 1007)],
)
def test_one_tier_has_the_known_hits_for_the_small_trace(
    sim: Sim, policy: str, blocks: int, hits: int
) -> None:
    result = sim(str(SMALL), "--policy", policy, "--blocks", str(blocks))
    assert result["hit_blocks"] == hits
    assert result["hit_rate"] == pytest.approx(hits / result["looked_up_blocks"])
    assert result["optimum_hit_rate"] >= result["hit_rate"]


def test_sizes_and_policies_are_swept(sim: Sim, tmp_path: Path) -> None:
    picture = tmp_path / "rates.svg"
    result = sim(
        str(SMALL), "--policy", "lru,optimum", "--blocks", "5%,20%", "--plot", str(picture)
    )
    assert [(run["policy"], run["blocks"]) for run in result["runs"]] == [
        ("lru", 84), ("optimum", 84), ("lru", 338), ("optimum", 338),
    ]  # fmt: skip
    drawn = ET.fromstring(picture.read_text())
    assert len(drawn.findall("{http://www.w3.org/2000/svg}circle")) == 4


def test_saved_and_remaining_recompute_time_add_up(sim: Sim, small: TraceRequests) -> None:
    result = sim(str(SMALL), "--policy", "lru", "--blocks", "200", "--prefill-growth", "10000")
    whole = sum(PrefillCost(1e-4, 1e-8).seconds(tokens) for tokens in small.inputs)
    assert result["recompute_s"] + result["recompute_s_saved"] == pytest.approx(whole)


# --- two tiers -------------------------------------------------------------------------------------


def played(small: TraceRequests, one: Machine) -> dict[str, Any]:
    simulation = Simulation(small, one)
    simulation.run()
    return report(small, one, simulation)


def test_two_tiers_have_the_known_hits_for_the_small_trace(small: TraceRequests) -> None:
    result = played(small, machine())
    assert {
        tier: round(rate, 4) for tier, rate in result["hit_rate_by_tier"].items()
    } == PINNED_HITS
    assert result["ttft_ms"] == PINNED_TTFT


def test_a_disk_adds_hits_and_reduces_the_wait(small: TraceRequests) -> None:
    without, with_ = played(small, machine(nvme_bytes=0)), played(small, machine())
    assert with_["hit_rate"] > without["hit_rate"] > 0
    assert without["hit_rate_by_tier"]["nvme"] == 0 == without["nvme_bytes_written_a_day"]
    assert (
        with_["ttft_ms"]["p50"] < without["ttft_ms"]["p50"] < without_tiers(small, machine())["p50"]
    )


def test_blocks_are_written_as_they_are_saved_while_the_budget_has_plenty(
    small: TraceRequests,
) -> None:
    """Memory has room for all blocks, so none is close to eviction."""
    block = 131_072 * 512
    for daily_bytes, least, most in ((0, 1500, 1693), (24 * 40 * block, 8, 40)):
        one = machine(memory_bytes=200 * GIB, nvme_bytes=200 * GIB, daily_bytes=daily_bytes)
        run = Simulation(small, one)
        run.run()
        assert least <= run.totals.moved["nvme_written"] // block <= most


def test_a_save_evicts_no_block_of_its_own_chain(tmp_path: Path) -> None:
    """Memory has room for 64 of the 80 blocks of each of two chains; those that it has reach the disk."""
    block, path = 131_072 * 512, tmp_path / "trace.jsonl"
    lines = []
    for number in range(2):
        one = {"timestamp": number * 60_000, "input_length": 80 * 512, "output_length": 1}
        lines.append(one | {"hash_ids": list(range(number * 80, number * 80 + 80))})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = Simulation(read(path), machine())
    run.run()
    assert not run.totals.lost.total()
    assert run.totals.moved["saved"] == run.totals.moved["nvme_written"] == 2 * 64 * block
    assert run.memory_blocks == run._in_memory == 64


def test_blocks_that_are_read_have_their_memory_from_the_start(small: TraceRequests) -> None:
    run, most = Simulation(small, machine(nvme_read_bytes_s=5e8)), []
    run.run(lambda _: most.append(run._in_memory + len(run._reading)))
    assert max(most) == run.memory_blocks


@pytest.mark.parametrize("nvme", [8, 32])
def test_second_copies_are_at_most_a_quarter_of_the_writes(nvme: int, small: TraceRequests) -> None:
    block = 131_072 * 512
    moved = []
    for second in (0.25, 0.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(write_budget, "SECOND_CHANCE", second)
            run = Simulation(small, machine(memory_bytes=GIB, nvme_bytes=nvme * GIB, engines=0))
            run.run()
            moved.append(run.totals.moved)
    assert 0 < moved[0]["nvme_written_again"] <= moved[0]["nvme_written"] / 4 + block
    assert not moved[1]["nvme_written_again"]


def test_a_disk_slower_than_recompute_is_not_used(small: TraceRequests) -> None:
    """Prefetches of blocks that were computed hold memory while they are read."""
    result = played(small, machine(nvme_read_bytes_s=1e8))
    computed = played(small, machine(nvme_bytes=0))
    assert result["verdicts"].keys() & {"slower", "crowded", "late"}
    assert result["ttft_ms"]["p99"] <= 1.1 * computed["ttft_ms"]["p99"] + 5


@pytest.mark.parametrize("rate", [3e8, 1e9])
def test_declined_blocks_are_promoted(small: TraceRequests, rate: float) -> None:
    """A declined block is promoted from the disk later; its copy there keeps it from being saved again."""
    result = played(small, machine(nvme_read_bytes_s=rate))
    computed = played(small, machine(nvme_bytes=0))
    assert result["verdicts"]["slower"] > 10
    assert result["hit_rate_by_tier"]["memory"] > computed["hit_rate_by_tier"]["memory"]


def test_a_memory_for_all_blocks_has_the_hits_of_the_optimum(small: TraceRequests) -> None:
    one = machine(memory_bytes=200 * GIB, nvme_bytes=0, engines=0, prefill=PrefillCost(1e-9))
    seen: set[int] = set()
    hits = start = 0
    nodes = memoryview(small.native.nodes()).cast("I")
    for length in small.lengths:
        request = nodes[start : start + length]
        start += length
        hits += next((i for i, node in enumerate(request) if node not in seen), length)
        seen.update(request)
    assert played(small, one)["hit_rate"] == pytest.approx(hits / small.looked_up_blocks)


def conversations(path: Path) -> TraceRequests:
    """The chats of the benchmarks, as a trace."""
    lines = [
        {
            "timestamp": when * 1000,
            "input_length": 512 * len(prompt),
            "output_length": 1,
            "hash_ids": prompt,
        }
        for when, prompt in traces.chat(300)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return read(path)


def test_knowledge_of_the_engines_cache_adds_hits_in_memory(tmp_path: Path) -> None:
    """With a memory of up to four times the engine's cache, and a disk that has every block: at least a tenth
    fewer of the blocks that were saved before come from the disk."""
    requests, block, fewer = conversations(tmp_path / "trace"), 1000 * 512, []
    hbm = requests.native.unique // 20
    for memory in (hbm, 2 * hbm, 4 * hbm):
        fast, stored = {}, {}
        for known in RESIDENCY:
            one = machine(
                policy="lru", hbm_bytes=hbm * block, memory_bytes=memory * block, token_bytes=1000,
                nvme_bytes=20_000 * block, residency=known,
            )  # fmt: skip
            run = Simulation(requests, one)
            run.run()
            check(run)
            hits = run.totals.hit_blocks
            fast[known], stored[known] = hits["hbm"] + hits["memory"], hits.total()
        assert fast["on"] > fast["off"] < fast["lazy"]
        fewer.append((fast["on"] - fast["off"]) / (stored["off"] - fast["off"]))
    assert sorted(fewer)[1] >= 0.1, fewer


def test_the_engines_cache_is_a_level_of_the_simulation(sim: Sim) -> None:
    arguments = ("--policy", "lru", "--memory", "4GiB", "--nvme", "32GiB", "--hbm", "2GiB")
    known = sim(str(SMALL), *arguments)
    blind = sim(str(SMALL), *arguments, "--residency", "off")
    assert known["runs"][0]["hit_rate_by_tier"]["hbm"] > 0
    assert known["runs"][0]["hbm_bytes"] == 2 << 30 and known["runs"][0]["residency"] == "on"
    assert blind["runs"][0]["residency"] == "off"
    with pytest.raises(SystemExit):
        main(["sim", str(SMALL), "--hbm", "2GiB", "--residency", "perhaps"])


def test_a_residency_without_the_engines_cache_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sim", str(SMALL), "--memory", "4GiB", "--residency", "off"])
    assert ended.value.code == 2
    assert "--residency off: needs --hbm" in " ".join(capsys.readouterr().err.split())


def test_a_codec_increases_the_capacity_of_the_disk(small: TraceRequests) -> None:
    plain, packed = machine(nvme_bytes=8 * GIB), machine(nvme_bytes=8 * GIB, codec_ratio=0.5)
    assert Simulation(small, packed).nvme_blocks == 2 * Simulation(small, plain).nvme_blocks
    assert played(small, packed)["hit_rate"] > played(small, plain)["hit_rate"]


def test_writes_stay_within_the_budget_and_prefer_repeated_blocks(small: TraceRequests) -> None:
    block = 131_072 * 512
    daily = 24 * 200 * block
    free, spare, all_ = (
        played(small, machine(daily_bytes=limit, admission=admission))
        for limit, admission in ((0, "auto"), (daily, "auto"), (daily, "all"))
    )
    for result in (spare, all_):  # an hour's budget at once, and the rest during the trace
        most = daily / 24 * (1 + small.span_s / 3600) + block
        written = result["bytes"]["nvme_written"] + result["bytes"]["nvme_written_again"]
        assert written <= most < free["bytes"]["nvme_written"]
    assert spare["lost"]["once"] and all_["lost"]["budget"] and "once" not in all_["lost"]


@example(1, 10, 1e7, 1e7, 1, 0, "auto", 34, "on")  # a read for the engine whose number was declined
@example(
    289, 768, 1e7, 1e11, 1, 0, "auto", 91, "off"
)  # a block that was saved twice before its write
@settings(deadline=None, max_examples=effort(25, 60, 60))
@given(
    st.integers(1, 400), st.integers(0, 2000), st.sampled_from([1e7, 1e9, 1e11]),
    st.sampled_from([1e7, 1e9, 1e11]), st.integers(0, 3),
    st.sampled_from([0, 10**11]), st.sampled_from(["auto", "all", "second-touch"]),
    st.integers(0, 200), st.sampled_from(RESIDENCY),
)  # fmt: skip
def test_every_request_gets_its_first_token_and_no_block_has_too_many_copies(
    memory: int,
    nvme: int,
    read_rate: float,
    write_rate: float,
    engines: int,
    daily: int,
    admission: str,
    hbm: int,
    residency: str,
) -> None:
    requests = read(SMALL)
    block = 131_072 * 512
    one = machine(
        memory_bytes=memory * block, nvme_bytes=nvme * block, nvme_read_bytes_s=read_rate,
        nvme_write_bytes_s=write_rate, engines=engines, daily_bytes=daily, admission=admission,
        hbm_bytes=hbm * block, residency=residency,
    )  # fmt: skip
    simulation = Simulation(requests, one)
    totals = simulation.run()
    assert len(totals.waits_s) == len(requests) and min(totals.waits_s) >= 0
    check(simulation)
    hits = sum(totals.hit_blocks.values())
    assert hits <= totals.looked_up_blocks == requests.looked_up_blocks


def check(run: Simulation) -> None:
    """Memory and disk agree after a run."""
    assert not run._engine.returning and not any(run._memory[node] for node in run._engine.away)
    assert all(run._memory[node] and node in run._frames for node in run._engine.leave_first)
    assert not (run._held or run._loading or run._waiters or run._reading or run._writing)
    assert sum(run._memory) == run._in_memory == len(run._policy) <= run.memory_blocks
    kept = Counter(run._frames.values())
    assert sum(kept.values()) <= run.nvme_blocks + SEGMENTS
    first = run._segment_number - len(run._segments) + 1
    for number, nodes in enumerate(run._segments, first):
        assert kept[number] == sum(run._frames.get(node) == number for node in set(nodes))


def test_the_table_contains_the_needed_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["sim", str(SMALL), "--policy", "lru", "--memory", "4GiB,64GiB", "--nvme", "0,32GiB"])
    result = capsys.readouterr().out
    assert not left.value.code
    assert sum(line.endswith(" <") for line in result.splitlines()) == 1
    assert "64 GiB of memory and 32 GiB of NVMe: the smallest" in result


def test_percentiles_are_measured_values() -> None:
    assert percentiles([0.001 * n for n in range(1, 101)]) == {"p50": 50, "p90": 90, "p99": 99}
    assert percentiles([0.002]) == {"p50": 2, "p90": 2, "p99": 2}
    assert percentiles([]) == {"p50": 0, "p90": 0, "p99": 0}


# --- bad input -------------------------------------------------------------------------------------


def without(name: str) -> str:
    return json.dumps({key: value for key, value in GOOD.items() if key != name})


BAD = {
    "{": "truncated",
    "[1, 2]": "object",
    **{without(name): name for name in GOOD},
    json.dumps(GOOD | {"hash_ids": "12"}): "hash_ids",
    json.dumps(GOOD | {"hash_ids": [1, -1]}): "out of range",
    json.dumps(GOOD | {"hash_ids": [1 << 64]}): "out of range",
    json.dumps(GOOD | {"hash_ids": [1, 2.5]}): "hash_ids",
    json.dumps(GOOD | {"hash_ids": [1, 2, 1]}): "twice",
    json.dumps(GOOD | {"timestamp": 4}): "before",
    json.dumps(GOOD | {"timestamp": -1}): "out of range",
    json.dumps(GOOD | {"input_length": -1}): "out of range",
    json.dumps(GOOD | {"timestamp": "5"}): "timestamp",
    json.dumps(GOOD | {"block_tokens": 16}): "block_tokens",
    "\xff": "3",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_reported_with_its_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [json.dumps(GOOD), "", line, json.dumps(GOOD)]
    path.write_bytes("\n".join(lines).encode("latin-1"))
    with pytest.raises(ConfigError, match=BAD[line]) as result:
        read(path)
    assert str(result.value).startswith(f"{path}:3: ")


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_file_without_requests_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="contains no requests"):
        read(tmp_path / "trace.jsonl")


@pytest.mark.parametrize(
    "flags",
    [["--blocks", "0"], ["--blocks", "x"], ["--blocks", "nan%"], ["--blocks", "5,,6"],
     ["--policy", "best", "--blocks", "5"], ["--memory", "64G"], ["--policy", "optimum"],
     ["--admission", "some"], ["--engines", "-1"], ["--codec-ratio", "0"],
     ["--compressed", "0.5"], ["--blocks", "9", "--compressed", "1.5"]],
)  # fmt: skip
def test_a_wrong_flag_is_refused_in_words(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["sim", str(SMALL), *flags])
    assert left.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "size", "why"),
    [
        *((flag, "64KiB", "smaller than one block") for flag in ("--memory", "--nvme")),
        *(
            (flag, "4", "no unit")
            for flag in ("--memory", "--nvme", "--hbm", "--memory-rate", "--nvme-read", "--nvme-write",
                         "--write-limit")
        ),
    ],
)  # fmt: skip
def test_a_size_without_a_unit_or_below_a_block_is_refused(
    capsys: pytest.CaptureFixture[str], flag: str, size: str, why: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sim", str(SMALL), flag, size])
    assert ended.value.code == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_no_daily_rate_is_derived_from_a_trace_of_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sim: Sim
) -> None:
    trace = tmp_path / "short.jsonl"
    lines = [
        {"timestamp": at * 100, "input_length": 512 * 4, "output_length": 1,
         "hash_ids": [at * 4 + block for block in range(4)]}
        for at in range(70)
    ]  # fmt: skip
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = (str(trace), "--memory", "1GiB", "--nvme", "10GiB")
    (run,) = sim(*flags)["runs"]
    assert run["bytes"]["nvme_written"] and run["nvme_bytes_written_a_day"] is None
    with pytest.raises(SystemExit):
        main(["sim", *flags])
    result = " ".join(capsys.readouterr().out.split())
    assert "the trace has 7 s and at least 600 s are needed" in result
    assert "TiB" not in result


@pytest.mark.parametrize("policy", ["lru", "auto", "s3fifo"])
def test_a_tier_with_compressed_memory_hits_as_one_that_is_as_much_larger(
    small: TraceRequests, sim: Sim, policy: str
) -> None:
    """Four fifths of the tier in frames of half a block: 1.8 times as many blocks, without those of which
    there are both."""
    blocks, prefill = small.native.unique // 5, PrefillCost(1e-4)
    raw, larger = (
        replay(small, policy, count, prefill).hit_blocks for count in (blocks, int(1.8 * blocks))
    )
    given = (
        "--policy",
        policy,
        "--blocks",
        str(blocks),
        "--compressed",
        "0.8",
        "--codec-ratio",
        "0.5",
    )
    found = sim(str(SMALL), *given)["hit_blocks"]
    assert raw < larger
    assert abs(found - larger) < 0.2 * (larger - raw)


@pytest.mark.parametrize("seed", range(3))
def test_a_replay_never_holds_more_than_the_tier(small: TraceRequests, seed: int) -> None:
    share, ratio = (0.3, 0.9, 0.5)[seed], (0.5, 0.7, 1.0)[seed]
    blocks = 20 + 40 * seed
    played = CompressedReplay(small, "value", blocks, share, ratio)
    while played.run(1):
        slots, frames = len(played._in_slots), len(played._framed)
        assert slots <= played._slots
        assert slots + frames * ratio <= blocks + 1e-6
