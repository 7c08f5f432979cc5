"""Write what was measured into the documents, so that no number there was typed by hand: every row into
docs/figures.md, the rows that tell most into the README, hit rates over sizes and one hit from disk into
pictures.

Refuses results that are out of date: from a commit that is not among the last 50, from before a change of
the measured code, or from a tree with uncommitted changes. `--stale` writes them anyway. Every figure has
its commit in its row.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from draw_timeline import drawn
from kvtier_daemon.sim.plot import draw

HERE = Path(__file__).parent
ROOT = HERE.parent
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
RECENT = 50
MEASURED = ("kvtier", "daemon", "kernels", "plugins")  # a change in here makes a result out of date
SOURCES = {
    "warm": "python benchmarks/bench_warm.py",
    "control": "python benchmarks/bench_control.py",
    "cold-reads": "python benchmarks/bench_cold.py --only reads",
    "cold": "python benchmarks/bench_cold.py",
    "codec": "python benchmarks/bench_codec.py",
    "codec-floats": "python benchmarks/bench_codec.py --model PATH --codecs q4 e5m2 nvfp4 mxfp4",
    "frames": "python benchmarks/bench_frames.py",
    "quality": "python benchmarks/bench_quality.py",
    "mixed": "python benchmarks/bench_mixed.py",
    "policy": "python benchmarks/bench_policy.py",
    "planner": "python benchmarks/bench_planner.py",
    "sim": "python benchmarks/bench_sim.py",
    "ttft": "python benchmarks/bench_ttft.py",
    "gpu": "tools/gpu_run.sh",
    "gpu-first": "tools/gpu_run.sh",
    "operator": "python benchmarks/bench_operator.py",
    "sglang": "python benchmarks/bench_sglang.py",
    "peers": "python benchmarks/bench_peers.py",
    "writes": "python benchmarks/bench_writes.py",
    "partial": "python benchmarks/bench_partial.py",
    "attack": "python benchmarks/bench_attack.py",
    "chats": "make bench-chats",
    "restart": "make bench-restart",
    "takeover": "python benchmarks/bench_takeover.py",
    "remote": "python benchmarks/bench_remote.py",
    "fleet": "make bench-fleet",
    "encryption": "python benchmarks/bench_cold.py --only encryption",
    "attention": "python benchmarks/bench_attention.py",
    "hints": "python benchmarks/bench_hints.py",
    "offload": "make bench-offload",
    "transformers": "make bench-transformers",
    "sim-engine": "make bench-sim-engine",
    "compressed": "python benchmarks/bench_compressed.py --model PATH --trace FILE",
}
# What the README shows: a row's name, and how it is said there.
HEADLINES = {
    "warm": {
        "save with checksum, 2 MiB blocks, to the best copy loop": "save to memory, with checksums, relative"
        " to the best copy loop",
        "load, 2 MiB blocks, to the best copy loop": "load from memory, relative to the best copy"
        " loop",
        "save with checksum, 2 MiB blocks, to memcpy": "save to memory, with checksums, relative to"
        " memcpy by one thread",
        "load, 2 MiB blocks, to NT loop": "load from memory, relative to streaming stores by one thread",
        "load as views, 256 blocks, release included": "load 256 blocks without a copy, with the"
        " release",
        "four clients, half saving with checksums, to two best copy loops": "four clients at once, relative"
        " to the best copy loop on each of two cores",
        "four clients, half saving with checksums, to two-thread NT": "four clients at once, relative to"
        " streaming stores on both cores",
    },
    "control": {
        "match of 1024 keys, p50": "match a prefix of 1,024 blocks",
        "catalog of 1,000,000 blocks: memory a block": "daemon memory per known block",
        "daemon with 12GiB: takes clients after": "start with 12 GiB, until the daemon accepts clients",
        "daemon with 12GiB: memory complete after": "start with 12 GiB, until all memory is allocated",
        "daemon with 12GiB: ready after": "start with 12 GiB, until the daemon accepts clients",
    },
    "cold-reads": {
        "daemon, cold to warm, io_uring, registered, saved with checksums: throughput relative to fio": "load"
        " from disk, verified, relative to fio's best setting",
    },
    "cold": {
        "restart with 1,000,448 blocks on disk, killed: all found after, beyond fio's scan": "find a"
        " million blocks again after kill -9",
    },
    "ttft": {
        "189M, tail of 128: warm hit, sync, ratio": "vLLM: time to the first token after a hit in memory,"
        " relative to a hit in the engine's own cache",
        "asking with 64 requests waiting, p99": "vLLM: scheduler time to ask for a hit, p99",
        "32 requests at once on one cold prefix of 2048 tokens: TTFT p99 relative to recompute's": "vLLM: 32"
        " requests at once for one prefix on disk, p99 time to the first token, relative to recomputing",
    },
    "chats": {
        "disk as is: throughput, with kvtier / without": "28 chats on a vLLM engine with a small cache:"
        " throughput relative to the engine alone",
        "disk as is: p99 of first tokens, with / without": "the same chats: p99 time to the first token,"
        " relative to the engine alone",
    },
}
PICTURES = {"quality": "../benchmarks/results/quality.svg", "policy": "hit-rates.svg"}
NONE: dict[str, Any] = {"rows": []}
COLD_HIT = "189M, tail of 128: one cold hit, sync, in all"
HIT_PAGES = {
    "decisions/0035-cold-hit-latency.md": "../cold-hit.svg",
    "vllm.md": "cold-hit.svg",
}
POLICIES = ("lru", "lfu", "arc", "s3fifo", "value")
SIZES = {1.0: "1%", 2.0: "2%", 5.0: "5%", 10.0: "10%", 20.0: "20%"}


def results() -> dict[str, dict[str, Any]]:
    found = {}
    for name in SOURCES:
        path = HERE / "results" / f"{name}.json"
        if path.exists():
            found[name] = json.loads(path.read_text())
    if "cold" in found and "cold-reads" in found:  # a later run of some of its rows
        newer = {row["name"] for row in found["cold-reads"]["rows"]}
        older = found["cold"]
        older["rows"] = [row for row in older["rows"] if row["name"] not in newer]
    return found


def head(name: str, result: dict[str, Any]) -> str:
    """How it was measured, and where."""
    where = result["environment"]
    state = "" if result["valid"] else " **The machine was disturbed during this run.**"
    peer = f" {where['peer']}" if "peer" in where else ""
    return (
        f"`{SOURCES[name]}` on {where['cores']} shared cores of {where['cpu']},"
        f" at commit {commit_of(result)}.{peer}{state}"
    )


def measured(row: dict[str, Any]) -> str:
    value = f"{row['value']:.3g} {row['unit']}".strip()
    if row["low"] is not None:
        value += f" ({row['low']:.2f} to {row['high']:.2f})"
    if "GB/s" in row["more"]:
        value += f", {row['more']['GB/s']:.1f} GB/s"
    return value


def table(rows: list[dict[str, Any]], commit: str) -> list[str]:
    return [
        "| | measured | bar | commit |",
        "| --- | --- | --- | --- |",
        *(f"| {row['name']} | {measured(row)} | {row['bar']} | {commit} |" for row in rows),
    ]


def side_by_side(rows: list[dict[str, Any]], commit: str) -> list[str]:
    """A column for each system, whose name begins its rows'; empty where a system has no such row."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        system, _, what = row["name"].partition(": ")
        cells.setdefault(what, {})[system] = row["more"].get("said") or measured(row)
    systems = list(dict.fromkeys(system for line in cells.values() for system in line))
    return [
        f"| | {' | '.join(systems)} | commit |",
        f"| --- |{' --- |' * len(systems)} --- |",
        *(
            f"| {what} | {' | '.join(line.get(system, '') for system in systems)} | {commit} |"
            for what, line in cells.items()
        ),
    ]


def everything(found: dict[str, dict[str, Any]]) -> str:
    """All rows of all results that there are."""
    lines = [
        "# Measured figures",
        "",
        "`make figures` writes this page from `benchmarks/results/`. A ratio is the median of pairs of runs."
        " The two runs of a",
        "pair follow each other. The numbers in parentheses are the 95% interval of resampled medians. A bar"
        " is the target.",
        "Each figure was measured at the commit in its row and says nothing about later commits:"
        " `make figures` refuses",
        "results of code that has changed.",
        "",
    ]
    for name, result in found.items():
        lines += [
            f"## {name}",
            head(name, result),
            "",
            *(side_by_side if name == "peers" else table)(result["rows"], commit_of(result)),
            "",
        ]
        if name in PICTURES:
            lines += [f"![{name}]({PICTURES[name]})", ""]
    return "\n".join(lines)


def highlights(found: dict[str, dict[str, Any]]) -> str:
    lines = ["| | measured | benchmark | commit |", "| --- | --- | --- | --- |"]
    for name, wanted in HEADLINES.items():
        rows = {row["name"]: row for row in found.get(name, NONE)["rows"]}
        lines += [
            f"| {said} | {measured(rows[row])} | {name} | {commit_of(found[name])} |"
            for row, said in wanted.items()
            if row in rows
        ]
    used = [head(name, found[name]) for name in HEADLINES if name in found]
    return "\n".join([*lines, "", *(f"{text}  " for text in used)])


def hit_rates(result: dict[str, Any]) -> str:
    """Draw the hit rates of the policies on a trace over the size of memory."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in result["rows"]:
        trace, _, policy = row["name"].rpartition(": gap to the optimum closed, ")
        if not trace or policy not in POLICIES:
            continue
        name = "kvtier (value)" if policy == "value" else policy
        lines[name] = list(zip(SIZES, row["more"]["whole"], strict=True))
        lines["optimum"] = list(zip(SIZES, row["more"]["optimum"], strict=True))
    across = "room, of all different blocks of the trace"
    return draw("A production trace: blocks found again", across, lines, SIZES)


def cold_hit(row: dict[str, Any]) -> tuple[str, str]:
    """Draw the parts of one hit, with the comparisons below them, and the sentence about it."""
    more = row["more"]
    parts = {name: (at, took) for name, at, took in more["parts, from ms, for ms"]}
    came, disk = parts["blocks come from disk"]
    copy = next(took for name, (_, took) in parts.items() if name.startswith("copy"))
    fio, resident = more["fio ms"], more["resident ms"]
    picture = drawn(
        f"{row['name'].removesuffix(', in all')}: {row['value']:.1f} ms to its token",
        [(name, at, took) for name, (at, took) in parts.items()],
        [("a resident hit, same round", 0.0, resident), ("fio, as many bytes", came, fio)],
    )
    said = (
        f"One hit, from the median round (`load` `sync`), takes {row['value']:.1f} ms:"
        f" {row['value'] - resident:.1f} ms more than a hit in the engine's\nown cache ({resident:.1f} ms)."
        f" Reading its blocks from disk takes {disk:.1f} ms; `fio` reads the same number of bytes in"
        f" {fio:.0f} ms.\nCopying them takes {copy:.1f} ms."
    )
    return picture, said


def between(page: Path, text: str) -> str:
    """The page with this text where its figures go."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def wanted() -> dict[Path, str]:
    """What the files have to say."""
    found, docs = results(), ROOT / "docs"
    files = {
        ROOT / "README.md": between(ROOT / "README.md", highlights(found)),
        docs / "figures.md": everything(found),
    }
    if "policy" in found:
        files[docs / "hit-rates.svg"] = hit_rates(found["policy"])
    hit = next((row for row in found.get("ttft", NONE)["rows"] if row["name"] == COLD_HIT), None)
    if hit is not None:
        files[docs / "cold-hit.svg"], said = cold_hit(hit)
        for page, picture in HIT_PAGES.items():
            of = f"Measured at commit {commit_of(found['ttft'])}."
            shown = f"{said}\n{of}\n\n![where the time of a hit from disk goes]({picture})"
            files[docs / page] = between(docs / page, shown)
    return files


def commit_of(result: dict[str, Any]) -> str:
    commit: str = result["environment"].get("commit") or "unknown"
    return commit


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def out_of_date(result: dict[str, Any], root: Path = ROOT) -> str:
    """Why this result says nothing about the tree at `root`; "" where it does."""
    commit = commit_of(result)
    whole = git(root, "rev-parse", "--verify", f"{commit}^{{commit}}")
    if whole not in git(root, "rev-list", f"--max-count={RECENT}", "HEAD").split():
        return f"its commit is not among the last {RECENT} of this history"
    if changed := git(root, "diff", "--name-only", whole, "--", *MEASURED).split():
        return f"code has changed since: {changed[0]}" + (
            f" and {len(changed) - 1} other files" if len(changed) > 1 else ""
        )
    if result["environment"].get("uncommitted"):
        return "the tree had changes that were not committed"
    return ""


def refused(found: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each result that is out of date, with its rows and what measures it again."""
    lines = []
    for name, result in found.items():
        if why := out_of_date(result):
            rows = [row["name"] for row in result["rows"]]
            shown = [row for row in HEADLINES.get(name, {}) if row in rows]
            lines.append(
                f"{name}: {len(rows)} rows of commit {commit_of(result)}: {why};"
                f" run `{SOURCES[name]}`"
            )
            lines += [f"    in README: {row}" for row in shown]
    return lines


def main() -> int:
    """Write them; with --check only say whether the documents say what the results do."""
    stale = [
        path for path, text in wanted().items() if not path.exists() or path.read_text() != text
    ]
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path.relative_to(ROOT)}: not what benchmarks/results say; run `make figures`")
        return int(bool(stale))
    if "--stale" not in sys.argv and (lines := refused(results())):
        print("figures: these results are out of date, so nothing was written:", *lines, sep="\n")
        print("Run them again, or write them as what they are: `make figures FIGURES=--stale`")
        return 1
    for path, text in wanted().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
