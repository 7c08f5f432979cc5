"""A calibration profile of a small model: `calibrated.py MODEL FILE`, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SECONDS = 300.0
# Errors have a large effect on an untrained model, so the loss that a level permits is multiplied
# by this.
LOSSES = 10.0


def write_profile(model: Path, folder: Path) -> Path:
    """Calibrate a profile with a text, and write it into this folder."""
    target = folder / "model.kvtp"
    done = subprocess.run(
        [sys.executable, __file__, str(model), str(target)],
        check=False, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return target


def main() -> None:
    model, target = map(Path, sys.argv[1:])
    from kvtier_daemon.calibration import measuring
    from kvtier_daemon.cli import main as kvtier

    # Short sequences, because the model is small.
    measuring.PREFIX, measuring.NEXT, measuring.SEQUENCE, measuring.TRIALS = 64, 16, 81, 8
    for losses in (measuring.ECSQ_LOSS, measuring.CACHEGEN_LOSS):
        losses.update({level: LOSSES * loss for level, loss in losses.items()})
    text = target.with_suffix(".txt")
    numbers = (f"{number * 7919 % 1009:x} is {number % 13} and " for number in range(1500))
    text.write_text("".join(numbers))
    kvtier(
        ["calibrate", "--model", str(model), "--text", str(text), "--out", str(target),
         "--tokens", "4096", "--device", "cpu"]
    )  # fmt: skip


if __name__ == "__main__":
    main()
