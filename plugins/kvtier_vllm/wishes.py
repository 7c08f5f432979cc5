"""What a request wants: `"kv_transfer_params": {"kvtier": {"load": false, "pin": 600, "priority": 0.9}}`."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger("vllm.kvtier")

PARAMETER = "kvtier"
NAMES = ("load", "save", "pin", "priority")
LIMIT_PIN_S = 7 * 24 * 3600.0


@dataclass(slots=True, frozen=True)
class Wishes:
    """`pin_s`: how long its prompt is to stay, 0 if that doesn't matter. `priority`: how much its prompt
    matters to eviction, 0 (may go first) to 1. `asked`: it sent something, and so is told what it got."""

    load: bool = True
    save: bool = True
    pin_s: float = 0.0
    priority: float | None = None
    asked: bool = field(default=False, compare=False)

    @property
    def keeps(self) -> bool:
        """Whether the daemon is to be told something of its prompt."""
        return self.pin_s > 0 or self.priority is not None


def read_wishes(parameters: Any) -> Wishes:
    """Never raises: a user sent it. What makes no sense is left out, and said in the log."""
    told = parameters.get(PARAMETER) if isinstance(parameters, dict) else None
    if told is None:
        return Wishes()
    if not isinstance(told, dict):
        log.warning("kvtier: kv_transfer_params: %r under %r: left out", told, PARAMETER)
        return Wishes()
    for name in told.keys() - NAMES:
        log.warning("kvtier: kv_transfer_params: no %r: there are %s", name, ", ".join(NAMES))
    pin_s = _number(told, "pin", sys.float_info.max, "seconds are meant")
    priority = _number(told, "priority", 1.0, "a number from 0 to 1 is meant")
    return Wishes(
        _flag(told, "load"), _flag(told, "save"), min(pin_s or 0.0, LIMIT_PIN_S), priority, True
    )  # fmt: skip


def _number(told: dict[str, Any], name: str, most: float, meant: str) -> float | None:
    if name not in told:
        return None
    value = told[name]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= most:
        return float(value)
    log.warning("kvtier: kv_transfer_params: %r: %r: %s, left out", name, value, meant)
    return None


def _flag(told: dict[str, Any], name: str) -> bool:
    value = told.get(name, True)
    if isinstance(value, int):
        return bool(value)
    log.warning("kvtier: kv_transfer_params: %r: %r: true or false is meant, left out", name, value)
    return True
