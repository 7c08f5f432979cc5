"""A short measurement of this machine with a temporary daemon, and the comparison of two results.

kvtier and its limit (the fastest copy loop, the fastest direct reads of the same disk) are measured
alternately. The result is the median of the rounds, with a bootstrap interval. Every loaded block is
compared with the saved one.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from kvtier import Client, Space
from kvtier.errors import ConfigError
from kvtier.key import Keys
from kvtier.layout import KvSpec
from kvtier.units import MIB
from kvtier_daemon.tools import machine_limits
from kvtier_daemon.tools.temporary_daemon import temporary_daemon, temporary_folder

BLOCK_BYTES: Final = 2 * MIB
BLOCKS: Final = 96  # per round: larger than the caches of a processor
SET_BYTES: Final = BLOCKS * BLOCK_BYTES
SETS: Final = 4  # on disk, of which memory holds two
COLD_BYTES: Final = 6 * SET_BYTES
NEEDED_BYTES: Final = 8 * SET_BYTES
ROUNDS, QUICK_ROUNDS, LEAST_ROUNDS = 11, 5, 3
DISK_S: Final = 30.0
BOOTSTRAPS: Final = 1000
LIMIT_SPREAD: Final = 0.30
SETTLE_S: Final = 20.0
SPEC: Final = KvSpec.dense(
    model="kvtier-bench", layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16,
    weights="made-up",
)  # fmt: skip

Told = Callable[[str, int, int], None]


def run(quick: bool, folder: Path | None, told: Told) -> dict[str, Any]:
    """Measure; the result has the format of those in benchmarks/results."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    place = (folder or Path(tempfile.gettempdir())).absolute()
    if not place.is_dir():
        raise ConfigError(f"--cold {place}: no such directory")
    _check_room(place)
    with temporary_folder("kvtier-bench-", place) as work:
        rows, spread = _memory(work, rounds, told)
        rows += _disk(work, rounds, told)
    return {
        "benchmark": "machine",
        "valid": spread <= LIMIT_SPREAD,
        "environment": {"cores": os.cpu_count(), "kernel": os.uname().release},
        "rows": rows,
    }


def _check_room(place: Path) -> None:
    found = os.statvfs(place)
    free, need = found.f_bavail * found.f_frsize, NEEDED_BYTES
    if free < need:
        raise ConfigError(
            f"{place} has {free // MIB} MiB free, but {need // MIB} MiB are needed: give "
            "another directory with --cold"
        )


@contextmanager
def _daemon(work: Path, cold: bool) -> Iterator[Client]:
    """Return a client of a daemon that ends with this context."""
    settings = ""
    if cold:
        (work / "cold").mkdir()
        settings = (
            f'[cold]\ndirectories = ["{work / "cold"}"]\nsize = "{COLD_BYTES}"\ncodec = "raw"\n'
        )
        settings += 'write = "through"\nadmission = "all"\nscrub = 0\n'
    with temporary_daemon(work, 2 * SET_BYTES, "bench", settings, populate=True) as (client, _):
        yield client


def _keys(space: Space, number: int) -> Keys:
    return space.keys([number] * BLOCKS * SPEC.block_tokens)


def _filled() -> memoryview:
    """Return incompressible blocks, in huge pages if possible, as an engine's are."""
    memory = machine_limits.huge(SET_BYTES)
    memory[:] = os.urandom(BLOCK_BYTES) * BLOCKS
    return memory


def _cut(whole: memoryview) -> list[memoryview]:
    return [whole[at : at + BLOCK_BYTES] for at in range(0, len(whole), BLOCK_BYTES)]


def _memory(work: Path, rounds: int, told: Told) -> tuple[list[dict[str, Any]], float]:
    """Measure saves and loads relative to the fastest copy loop, and the variation of that loop."""
    source, target = _filled(), machine_limits.huge(SET_BYTES)
    views, outs = _cut(source), _cut(target)
    setting, copy = machine_limits.best(machine_limits.copies(outs, views))
    seconds: dict[str, list[float]] = {"copy": [], "save": [], "load": [], "match": []}
    with _daemon(work, cold=False) as client:
        space = client.open(SPEC)
        for number in range(rounds + 1):
            told("memory", number, rounds + 1)
            keys = _keys(space, number)
            one = {"copy": _timed(copy)}
            one["save"] = _timed(partial(space.save, keys, views))
            one["match"] = _timed(partial(space.match, keys))
            target[:] = bytes(len(target))
            one["load"] = _timed(partial(_loaded, space, keys, outs))
            if _differ(outs, views):
                raise ConfigError("a loaded block differs from what was saved: please report this")
            if number:  # the first round is a warm-up
                for name, took in one.items():
                    seconds[name].append(took)
    gigabytes = len(source) / 1e9
    rows = [
        _row(name, [gigabytes / took for took in seconds[kind]], "GB/s", note)
        for name, kind, note in (
            ("copy in memory", "copy", f"the limit, at best: {setting}"),
            ("save, with checksums", "save", ""),
            ("load from memory", "load", "every byte compared"),
        )
    ]
    rows.append(
        _row(f"match of {BLOCKS} keys", [took * 1e6 for took in seconds["match"]], "us", "")
    )
    return rows, _spread(seconds["copy"])


def _differ(outs: Sequence[memoryview], views: Sequence[memoryview]) -> bool:
    """Compare copies: views are compared one byte at a time, which takes 20 times as long."""
    return any(bytes(out) != bytes(view) for out, view in zip(outs, views, strict=True))


def _loaded(space: Space, keys: Keys, outs: Sequence[memoryview]) -> None:
    count = space.load_into(keys, outs, deadline_ms=20_000)
    if count != len(keys):
        raise ConfigError(
            f"only {count} of {len(keys)} blocks were loaded: the machine may be short of memory"
        )


def _disk(work: Path, rounds: int, told: Told) -> list[dict[str, Any]]:
    """Measure the daemon's reads from disk relative to direct reads of a file in the same directory."""
    source, target = _filled(), machine_limits.huge(SET_BYTES)
    views, outs = _cut(source), _cut(target)
    until = time.monotonic() + DISK_S
    direct: list[float] = []
    read: list[float] = []
    with _daemon(work, cold=True) as client, _probe_file(work, views) as fd:
        space = client.open(SPEC)
        for number in range(SETS):
            told("disk, written", number, SETS)
            space.save(_keys(space, number), views)
            _written(client)
        setting, read_direct = machine_limits.best(
            machine_limits.reads(fd, _cut(machine_limits.huge(SET_BYTES))), 1
        )
        for number in range(rounds):
            if time.monotonic() > until and len(read) >= LEAST_ROUNDS:
                break
            told("disk, read", number, rounds)
            direct.append(len(source) / 1e9 / _timed(read_direct))
            keys = _keys(space, number % SETS)
            started = time.perf_counter()
            coming = _brought(space, keys)
            took = time.perf_counter() - started
            _loaded(space, keys, outs)
            if _differ(outs, views):
                raise ConfigError(
                    "a block read from disk differs from what was saved: please report this"
                )
            if coming >= BLOCKS // 2:
                read.append(coming * BLOCK_BYTES / 1e9 / took)
    if len(read) < LEAST_ROUNDS:
        return [_row("direct reads of a file", direct, "GB/s", "the daemon's blocks were not read")]
    return [
        _row("direct reads of a file", direct, "GB/s", f"the limit, at best: {setting}"),
        _row("load from disk into memory", read, "GB/s", "every byte compared"),
    ]


def _written(client: Client) -> None:
    """Wait until everything in memory is also on disk."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        stats = client.stats()["tiers"]
        if not stats["cold"]["writing"] and stats["cold"]["blocks"] >= stats["warm"]["blocks"]:
            return
        time.sleep(0.01)
    raise ConfigError(
        f"the saved blocks are not on disk after {SETTLE_S:.0f} s: give a directory on a "
        "faster disk with --cold"
    )


def _brought(space: Space, keys: Keys) -> int:
    """Wait until all blocks are in memory. Returns how many came from the disk."""
    first = space.match(keys, within_ms=20_000)
    deadline = time.monotonic() + SETTLE_S
    while space.match(keys, within_ms=20_000).ready < len(keys):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"the disk did not deliver {len(keys)} blocks within {SETTLE_S:.0f} s"
            )
        time.sleep(0.001)
    return len(keys) - first.ready


@contextmanager
def _probe_file(work: Path, blocks: Sequence[memoryview]) -> Iterator[int]:
    path = work / "probe"
    with path.open("wb") as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        raise ConfigError(
            f"{work.parent}: direct reads are not possible ({error.strerror}): give a "
            "directory on a disk with --cold"
        ) from error
    try:
        yield fd
    finally:
        os.close(fd)


def _timed(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _row(name: str, values: Sequence[float], unit: str, note: str) -> dict[str, Any]:
    low, high = interval(values)
    value = median(values)
    return {"name": name, "value": value, "unit": unit, "low": low, "high": high, "note": note}


def interval(values: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """Return a bootstrap interval of the median."""
    chance = random.Random(0)
    medians = sorted(median(chance.choices(values, k=len(values))) for _ in range(BOOTSTRAPS))
    edge = (1 - share) / 2
    return medians[int(edge * BOOTSTRAPS)], medians[int((1 - edge) * BOOTSTRAPS) - 1]


def _spread(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[-1 - len(ordered) // 10] - ordered[len(ordered) // 10]) / median(ordered)


# --- two results ---------------------------------------------------------------------------------

SMALLER_IS_BETTER: Final = ("s", "ms", "us", "ns", "s/GB", "B", "MiB", "%", "B/block")


def read(path: Path) -> Mapping[str, Any]:
    """Return a result. Raises ConfigError if the file contains none."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: invalid JSON: {error}") from error
    rows = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not all(_is_row(row) for row in rows):
        raise ConfigError(f"{path}: not a result of `kvtier bench --json` or of benchmarks/")
    return dict(found)


def _is_row(row: object) -> bool:
    return isinstance(row, dict) and isinstance(row.get("value"), int | float) and "name" in row


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Compare each measurement of both results. A difference counts only if the intervals do not overlap."""
    earlier = {row["name"]: row for row in before["rows"]}
    rows = [_compared(earlier[row["name"]], row) for row in after["rows"] if row["name"] in earlier]
    if not rows:
        raise ConfigError("the two results have no row in common")
    remarks = []
    names = {row["name"] for row in after["rows"]} ^ set(earlier)
    if names:
        remarks.append(f"only in one of them: {', '.join(sorted(names))}")
    here, there = after.get("environment", {}), before.get("environment", {})
    differs = [key for key in here if key in there and here[key] != there[key] and key != "commit"]
    if differs:
        remarks.append(f"not the same machine or software: {', '.join(differs)} differ")
    for name, result in (("A", before), ("B", after)):
        if result.get("valid") is False:
            remarks.append(f"{name} was measured on a busy machine")
    return {"rows": rows, "remarks": remarks}


def _compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    unit, bar = after.get("unit", ""), after.get("bar") or ""
    change = after["value"] / before["value"] - 1 if before["value"] else 0.0
    found = [row.get(edge) for row in (before, after) for edge in ("low", "high")]
    edges = [edge for edge in found if edge is not None]
    if len(edges) < len(found):
        verdict = "no interval"
    else:
        apart = edges[2] > edges[1] or edges[3] < edges[0]
        falling = bar.startswith("<=") or (not bar.startswith(">=") and unit in SMALLER_IS_BETTER)
        verdict = ("better" if (change < 0) == falling else "worse") if apart else "same"
    return {
        "name": after["name"], "unit": unit, "before": before["value"], "after": after["value"],
        "change": change, "verdict": verdict,
    }  # fmt: skip
