"""The number of rounds of long tests: few in `make test`, more in `make test-all`, most in `make faults`."""

from __future__ import annotations

import os

FAULTS = bool(os.environ.get("KVTIER_FAULTS"))
ALL = FAULTS or bool(os.environ.get("KVTIER_ALL"))


def effort(default: int, in_all: int, in_faults: int) -> int:
    """Return the number for this run."""
    return in_faults if FAULTS else in_all if ALL else default
