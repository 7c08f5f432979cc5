"""What a request wants: `"kv_transfer_params": {"kvtier": {"load": false, "save": false, "pin": 600}}`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("vllm.kvtier")

PARAMETER = "kvtier"
NAMES = ("load", "save", "pin")
LIMIT_PIN_S = 7 * 24 * 3600.0


@dataclass(slots=True, frozen=True)
class Wishes:
    """`pin_s`: how long its prompt is to stay, 0 if that doesn't matter."""

    load: bool = True
    save: bool = True
    pin_s: float = 0.0


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
    pin_s = told.get("pin", 0)
    number = isinstance(pin_s, (int, float)) and not isinstance(pin_s, bool)
    if not number or not 0 <= pin_s < float("inf"):
        log.warning('kvtier: kv_transfer_params: "pin": %r: seconds are meant, left out', pin_s)
        pin_s = 0.0
    return Wishes(_flag(told, "load"), _flag(told, "save"), float(min(pin_s, LIMIT_PIN_S)))


def _flag(told: dict[str, Any], name: str) -> bool:
    value = told.get(name, True)
    if isinstance(value, int):
        return bool(value)
    log.warning("kvtier: kv_transfer_params: %r: %r: true or false is meant, left out", name, value)
    return True
