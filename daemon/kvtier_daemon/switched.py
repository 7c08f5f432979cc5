"""What a tier may have been switched to, and what that means for the person who looks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

ON, OPENING, DRAINING, DRAINED, CLOSING, OFF = (
    "on", "opening", "draining", "drained", "closing", "off",
)  # fmt: skip
RECOVERING: Final = "recovering"
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
    return f"{state}: {MEANING[name, state]}" if (name, state) in MEANING else ""


def is_away(cold: Mapping[str, Any]) -> bool:
    """Whether it does nothing because somebody wants it so, and not because of what is wrong with it."""
    return cold.get("state", ON) in AWAY and not cold.get("given_up")


def is_drained(cold: Mapping[str, Any]) -> bool:
    """Whether it takes nothing more because somebody wants it so; it may have faults beside that."""
    return cold.get("state", ON) in (DRAINING, DRAINED) and not cold.get("given_up")
