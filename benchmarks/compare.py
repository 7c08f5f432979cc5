"""Measure another commit and the present tree alternately in one run; fail where the present one is slower.

The commit is extracted and built under build/compare/; the present tree is what this interpreter imports.
This tree's `compare_side.py` drives both, so both get the same measurement.

Noise: in each round both sides run in alternating order. Each pass starts new daemons and new clients,
because a process keeps its memory layout. A row's ratio is the present median divided by the base's median
over all rounds; its interval contains 95% of the ratios of resampled rounds. A row that is slower by more
than the limit is measured again in new passes, whose rounds are added. It fails when it stays slower by more
than the limit: as WORSE if the whole interval is above 1, as UNCLEAR if the interval contains 1. Both end
with status 1: an unclear row needs a quieter machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build" / "compare"
SIDE = ROOT / "benchmarks" / "compare_side.py"
GROUPS = ("match", "views", "copies", "plugin", "million")
LIMIT = 0.05
RETRIES = 2
BOOTSTRAPS = 1000
# Smaller differences are not counted, whatever their ratio: a tail of some microseconds has no stable ratio.
LEAST_US = {"match, p99 beyond echo": 25.0}


@dataclass
class Tree:
    """What is measured: an interpreter that imports it, and its tests for the plugin's fake engine."""

    name: str
    python: Path
    root: Path


@dataclass
class Row:
    """The rounds of one row: microseconds of the base and of the present tree, in pairs."""

    name: str
    pairs: list[tuple[float, float]] = field(default_factory=list)

    @property
    def medians(self) -> tuple[float, float]:
        base, present = zip(*self.pairs, strict=True)
        return median(base), median(present)

    @property
    def ratio(self) -> float:
        return _ratio(self.pairs)

    def interval(self) -> tuple[float, float]:
        chance = random.Random(0)
        ratios = sorted(
            _ratio(chance.choices(self.pairs, k=len(self.pairs))) for _ in range(BOOTSTRAPS)
        )
        return ratios[BOOTSTRAPS // 40], ratios[-BOOTSTRAPS // 40]

    def spread(self) -> float:
        """How far apart the quarters of the base's rounds are, as a share of their median."""
        values = sorted(base for base, _ in self.pairs)
        return (values[len(values) * 3 // 4] - values[len(values) // 4]) / max(median(values), 1e-9)

    def slower(self, limit: float) -> bool:
        base, present = self.medians
        return present - base > LEAST_US.get(self.name, 0.0) and self.ratio > 1 + limit

    def verdict(self, limit: float) -> str:
        if not self.slower(limit):
            return "ok"
        return "WORSE" if self.interval()[0] > 1 else "UNCLEAR"


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    base, present = zip(*pairs, strict=True)
    # A tail can lie below the echo's: it counts as one microsecond.
    return max(median(present), 1.0) / max(median(base), 1.0)


def git(*arguments: str, cwd: Path = ROOT) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=cwd, check=True, capture_output=True, text=True
    ).stdout.strip()


def built(base: str) -> Tree:
    """The tree of this commit, extracted and built. One that is built already is used again."""
    commit = git("rev-parse", "--verify", f"{base}^{{commit}}")
    name = git("rev-parse", "--short", commit)
    place = PLACE / name
    tree, python = place / "tree", place / "venv" / "bin" / "python"
    if not (place / "ready").exists():
        print(f"building {name} in {place}", flush=True)
        if place.exists():
            shutil.rmtree(place)
        tree.mkdir(parents=True)
        git("archive", "--output", str(place / "tree.tar"), commit)
        shutil.unpack_archive(place / "tree.tar", tree, filter="data")
        _install(tree, place / "venv")
        (place / "ready").touch()
    return Tree(name, python, tree)


def _install(tree: Path, venv: Path) -> None:
    """An environment with this tree in it, and the packages of the present one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    tag = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = venv / "lib" / tag / "site-packages"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
         "--no-warn-script-location", "--target", str(packages), str(tree)],
        check=True,
    )  # fmt: skip
    # Its .pth files are not read there, so the present tree, installed editable, stays out.
    others = Path(sys.prefix) / "lib" / tag / "site-packages"
    (packages / "present.pth").write_text(f"{others}\n")


class Side:
    """A process that measures one group of rows of one tree, a round at a time."""

    def __init__(self, tree: Tree, group: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.tree = tree
        self.process = subprocess.Popen(
            [str(tree.python), str(SIDE), group, str(tree.root / "tests")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.tree.name}: the measuring process ended, as its output says")
        return line

    def round(self) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        values: dict[str, float] = json.loads(self.line())
        return values

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@contextmanager
def both(trees: Sequence[Tree], group: str) -> Iterator[list[Side]]:
    sides: list[Side] = []
    try:
        for tree in trees:
            sides.append(Side(tree, group))
            imported = Path(sides[-1].line().strip())  # one prepares at a time
            assert imported.is_relative_to(tree.python.parents[2]), (
                f"{tree.name} imported {imported}"
            )
        yield sides
    finally:
        for side in sides:
            side.close()


def measure(trees: Sequence[Tree], group: str, rounds: int, rows: dict[str, Row]) -> None:
    """One pass: rounds of both sides in alternating order, added to the rows."""
    with both(trees, group) as sides:
        for number in range(rounds):
            order = sides if number % 2 == 0 else sides[::-1]
            values = {side.tree.name: side.round() for side in order}
            base, present = (values[tree.name] for tree in trees)
            for name in base:
                rows.setdefault(name, Row(name)).pairs.append((base[name], present[name]))


def compared(
    trees: Sequence[Tree], group: str, passes: int, rounds: int, limit: float
) -> list[Row]:
    """The rows of a group; where one is too slow, after more passes."""
    rows: dict[str, Row] = {}
    for number in range(passes + RETRIES):
        if number >= passes and not any(row.slower(limit) for row in rows.values()):
            break
        measure(trees, group, rounds, rows)
    return list(rows.values())


def lacks(tree: Tree, group: str) -> bool:
    return (
        group == "plugin" and not (tree.root / "plugins" / "kvtier_vllm" / "scheduler.py").exists()
    )


def table(rows: Sequence[Row], names: tuple[str, str], limit: float) -> Iterator[str]:
    yield f"| row | {names[0]}, us | {names[1]}, us | ratio (95%) | spread | rounds | |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        base, present = row.medians
        low, high = row.interval()
        yield (
            f"| {row.name} | {base:.4g} | {present:.4g} | {row.ratio:.3f} ({low:.3f} to {high:.3f})"
            f" | {row.spread():.0%} | {len(row.pairs)} | {row.verdict(limit)} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--rows", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP",
                        help=f"of {', '.join(GROUPS)}; the default is all of them")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=9, help="of each pass; the default is 9")
    parser.add_argument("--passes", type=int, default=3, help="with new daemons; the default is 3")
    parser.add_argument("--limit", type=float, default=LIMIT, help="what is too slow; default 0.05")
    arguments = parser.parse_args()
    base = built(arguments.base)
    dirty = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    trees = [
        base,
        Tree(
            git("rev-parse", "--short", "HEAD") + dirty + " (present)", Path(sys.executable), ROOT
        ),
    ]
    rows: list[Row] = []
    for group in arguments.rows:
        if lacks(base, group):
            print(f"{group}: {base.name} has no such part; left out")
            continue
        rows += compared(trees, group, arguments.passes, arguments.rounds, arguments.limit)
        print(f"{group}: measured", file=sys.stderr, flush=True)
    for line in table(rows, (trees[0].name, trees[1].name), arguments.limit):
        print(line)
    failed = [row for row in rows if row.slower(arguments.limit)]
    for row in failed:
        print(f"{row.verdict(arguments.limit)}: {row.name}: {row.ratio:.3f} times the base's time;"
              f" the limit is {1 + arguments.limit:.2f}")  # fmt: skip
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
