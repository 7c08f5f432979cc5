"""The states of a tier, their meaning, and the remedy of a failure."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any, Final

ON, OPENING, DRAINING, DRAINED, CLOSING, OFF = (
    "on", "opening", "draining", "drained", "closing", "off",
)  # fmt: skip
RECOVERING: Final = "recovering"
HANDING_OVER: Final = "handing-over"
WARMING_UP: Final = "warming-up"
SWITCHED_OFF: Final = "switched off; run `kvtier tier on cold` to use it again"
REMOTE_SWITCHED_OFF: Final = "switched off; run `kvtier tier on remote` to use it again"
AWAY: Final = (CLOSING, OFF, OPENING)  # its disks are not used
MEANING: Final = {
    ("warm", DRAINING): "blocks that are only in memory are being written to disk",
    ("warm", DRAINED): "all blocks are also on disk, and saves are written at once; `kvtier "
    "tier on warm` ends this",
    ("cold", DRAINING): "new writes are refused; writes under way are finishing",
    ("cold", DRAINED): "it is read, but not written; `kvtier tier on cold` ends this",
    ("cold", CLOSING): "its files are being closed",
    ("cold", OFF): "requested by an operator: blocks on its disks are misses until `kvtier "
    "tier on cold`",
    ("cold", OPENING): "its files are being opened",
    ("remote", DRAINING): "blocks that wait are being written to the store, and no others",
    ("remote", HANDING_OVER): "all blocks in memory and on disk are being written to the store",
    ("remote", WARMING_UP): "blocks that other hosts want are being read to memory",
    ("remote", DRAINED): "it is read, but not written; `kvtier tier on remote` ends this",
    ("cold", RECOVERING): "its segments are being read; blocks that are not found yet are misses",
}


def meaning(name: str, tier: Mapping[str, Any]) -> str:
    """Return the meaning of the tier's state; empty if it is on."""
    state = tier.get("state", ON)
    if state == OFF and tier.get("failure", "") not in ("", SWITCHED_OFF):
        return f"{state}: {tier['failure']}"
    return f"{state}: {MEANING[name, state]}" if (name, state) in MEANING else ""


def is_away(cold: Mapping[str, Any]) -> bool:
    """Whether an operator switched it off; False if a failure did."""
    return cold.get("state", ON) in AWAY and not cold.get("given_up")


def is_switched_off(remote: Mapping[str, Any]) -> bool:
    """Whether an operator switched the remote tier off; False if a failure did."""
    return bool(remote.get("failure") == REMOTE_SWITCHED_OFF)


def is_drained(cold: Mapping[str, Any]) -> bool:
    """Whether an operator drained it, regardless of faults."""
    return cold.get("state", ON) in (DRAINING, DRAINED) and not cold.get("given_up")


# Of the failures that contain their own remedy.
INSTRUCTS = ("; run `", "; create it", "; mount", ": mount", ": restore", ": stop", ", remove one")


def remedy(failure: str) -> str:
    """Return what an operator can do about this failure of a disk."""
    if any(part in failure for part in INSTRUCTS):
        return "do what it says"
    if os.strerror(errno.ENOSPC) in failure or os.strerror(errno.EDQUOT) in failure:
        return "free space in that file system, or lower cold.size and restart"
    if os.strerror(errno.EROFS) in failure:
        return "see dmesg for why it became read-only; repair it and mount it again"
    return "check the disk with dmesg and smartctl"
