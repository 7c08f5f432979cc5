"""How a tier stands: what it was switched to, what is wrong with it, and what ends that."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any, Final

ON, OPENING, DRAINING, DRAINED, CLOSING, OFF = (
    "on", "opening", "draining", "drained", "closing", "off",
)  # fmt: skip
RECOVERING: Final = "recovering"
SWITCHED_OFF: Final = "switched off; `kvtier tier on cold` has it used again"
AWAY: Final = (CLOSING, OFF, OPENING)  # its disks are not used
MEANING: Final = {
    ("warm", DRAINING): "what is in memory alone is being written to the disks",
    ("warm", DRAINED): "all is on disk too, and what is saved goes there at once;"
    " `kvtier tier on warm` ends that",
    ("cold", DRAINING): "nothing more is written; what was begun ends",
    ("cold", DRAINED): "nothing is written, it is read as before; `kvtier tier on cold` ends that",
    ("cold", CLOSING): "its files are being closed",
    ("cold", OFF): "as was asked: what is on its disks is a miss until `kvtier tier on cold`",
    ("cold", OPENING): "its files are being opened",
    ("cold", RECOVERING): "its disks are being looked through; what is not found yet is a miss",
}


def meaning(name: str, tier: Mapping[str, Any]) -> str:
    """What this tier's state means, or nothing where it is simply used."""
    state = tier.get("state", ON)
    if state == OFF and tier.get("failure", "") not in ("", SWITCHED_OFF):
        return f"{state}: {tier['failure']}"
    return f"{state}: {MEANING[name, state]}" if (name, state) in MEANING else ""


def is_away(cold: Mapping[str, Any]) -> bool:
    """Whether it does nothing because somebody wants it so, and not because of what is wrong with it."""
    return cold.get("state", ON) in AWAY and not cold.get("given_up")


def is_drained(cold: Mapping[str, Any]) -> bool:
    """Whether it takes nothing more because somebody wants it so; it may have faults beside that."""
    return cold.get("state", ON) in (DRAINING, DRAINED) and not cold.get("given_up")


def remedy(failure: str) -> str:
    """What a person does about a disk that failed so."""
    if os.strerror(errno.ENOSPC) in failure or os.strerror(errno.EDQUOT) in failure:
        return "free some of that file system, or set cold.size to what it may have and restart"
    if os.strerror(errno.EROFS) in failure:
        return "dmesg says why it was made read-only; mend that and mount it again"
    return "look at the disk with dmesg and smartctl"
