"""Run every stage of a GPU's proof, each as a process with a time limit, in at most nine minutes.

A stage that fails or hangs does not stop the others. Its rows are in the results as soon as they are known,
with what was measured, the bar and the verdict. The status is 1 if a stage failed or a bar was missed. With
--emulated, the driver without a device (tests/cuda/driver.cpp) takes the place of a GPU: then no rate has a
verdict. `tools/gpu_run.sh` installs what this needs and calls it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import harness
from harness import Row

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "gpu.json"
MOST_S = 540.0
LOOK_S = 0.5  # how often the rows of a running stage are read
EMULATED_PATIENCE = (
    5.0  # times the limits without a device: that machine may be busy, and its rates mean nothing
)
KEPT_OUTPUT = 4_000  # characters of a stage that failed


@dataclass(frozen=True)
class Stage:
    """A function of gpu_stages.py."""

    name: str
    title: str
    seconds: float


STAGES = (
    Stage("environment", "environment, install", 10),
    Stage("texts", "the texts by NVRTC", 15),
    Stage("codecs", "codecs against the CPU; damaged parts", 35),
    Stage("copies", "copies, real device memory", 40),
    Stage("captures", "default stream, graph capture", 10),
    Stage("kills", "kill -9 during saves", 65),
    Stage("holder", "holder", 40),
    Stage("kvikio", "kvikio, digest on the GPU, damage", 20),
    Stage("model", "model: save, kill, load", 30),
    Stage("transformers", "transformers", 125),
    Stage("rates", "decode; XXH3", 20),
    Stage("engine", "cost to the engine", 20),
    Stage("sanitizers", "compute-sanitizer", 100),
)
assert sum(stage.seconds for stage in STAGES) <= MOST_S


@dataclass
class Results:
    """The file with the results; written again after each change."""

    path: Path
    environment: dict[str, Any]
    stages: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def write(self, more: Sequence[Row] = ()) -> None:
        body = {
            "benchmark": "gpu", "valid": True, "environment": self.environment, "noise": [],
            "stages": self.stages, "rows": [asdict(row) for row in (*self.rows, *more)],
        }  # fmt: skip
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.with_suffix(".new")
        written.write_text(json.dumps(body, indent=1) + "\n")
        written.rename(self.path)


def rows_in(path: Path) -> list[Row]:
    """The rows that a stage has written so far; the last line may be incomplete."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [Row(**json.loads(line)) for line in lines]


def run(
    stage: Stage, limit_s: float, folder: Path, results: Results, log: Path | None = None
) -> None:
    """Run one stage, add its rows to the results, and a row with its end. Its output is added to `log`."""
    rows, output = folder / f"{stage.name}.rows", folder / f"{stage.name}.out"
    started = time.monotonic()
    with output.open("w") as to:
        running = subprocess.Popen(
            [sys.executable, str(HERE / "gpu_stages.py"), stage.name, str(rows)],
            stdout=to, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        known, ended = 0, "hung"
        try:
            while (left := limit_s - (time.monotonic() - started)) > 0:
                try:
                    status = running.wait(min(LOOK_S, left))
                    ended = "ended" if status == 0 else f"failed with status {status}"
                    break
                except subprocess.TimeoutExpired:
                    found = rows_in(rows)
                    if len(found) > known:
                        known = len(found)
                        results.write(found)
        finally:
            # With all processes that it started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    took = time.monotonic() - started
    text = output.read_text(errors="replace")
    if log is not None:
        with log.open("a") as kept:
            kept.write(f"--- {stage.name}, {took:.1f} s, {ended}\n{text}\n")
    more = {} if ended == "ended" else {"how": ended, "output": text[-KEPT_OUTPUT:]}
    for row in rows_in(rows):
        row.name = f"{stage.title}: {row.name}"
        results.rows.append(row)
        print(row.line(), flush=True)
    last = Row(f"{stage.title}: the stage", took, "s", f"ends within {limit_s:g} s",
               ended == "ended", more=more)  # fmt: skip
    results.rows.append(last)
    results.stages.append({"name": stage.name, "seconds": took, "how": ended})
    results.write()
    print(last.line(), flush=True)


def emulated(folder: Path) -> None:
    """Let this process and its stages find the driver without a device."""
    from support.fake_cuda import build, environment

    os.environ.update(environment(folder, build()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="*", help="names of stages; all, if none is named")
    parser.add_argument("--emulated", action="store_true", help="with the driver without a device")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--log", type=Path, help="add the output of the stages to this file")
    arguments = parser.parse_args()
    known = {stage.name: stage for stage in STAGES}
    if unknown := set(arguments.stages) - known.keys():
        parser.error(
            f"no stage is named {', '.join(sorted(unknown))}; there are {', '.join(known)}"
        )
    patience = EMULATED_PATIENCE if arguments.emulated else 1.0
    deadline = time.monotonic() + MOST_S * patience
    results = Results(arguments.out, harness.environment())
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if arguments.emulated:
            emulated(folder)
        for stage in STAGES:
            if arguments.stages and stage.name not in arguments.stages:
                continue
            limit_s = min(stage.seconds * patience, deadline - time.monotonic())
            run(stage, limit_s, folder, results, arguments.log)
    failed = [row.name for row in results.rows if row.ok is False]
    print(f"written to {arguments.out}; {len(failed)} of {len(results.rows)} rows failed")
    for name in failed:
        print(f"  {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
