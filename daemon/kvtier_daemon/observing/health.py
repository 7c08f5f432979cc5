"""The health of the daemon, in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier.units import format_bytes
from kvtier_daemon.observing.loop_lag import RECENT_S
from kvtier_daemon.tiers.states import is_away, is_drained, is_switched_off, meaning

STALL_S: Final = 2.0  # an engine's plugin has disconnected after this time


@dataclass(frozen=True, slots=True)
class Health:
    """`ok`: whether clients benefit from the daemon. A `degraded` daemon still serves."""

    ok: bool
    text: str


def health(figures: Mapping[str, Any]) -> Health:
    """Return the problems, the worst first; `figures` is what `kvtier status --json` prints."""
    if wrong := "; ".join(_failures(figures)):
        return Health(False, f"failed: {_line(wrong)}")
    if wrong := "; ".join(_losses(figures)):
        return Health(True, f"degraded: {_line(wrong)}")
    return Health(True, "ok")


def _failures(figures: Mapping[str, Any]) -> Iterator[str]:
    if figures["stopping"]:
        yield "the daemon is stopping"
    late = figures["loop"]["most_s"][str(RECENT_S)]
    if late >= STALL_S:
        yield (
            f"its event loop stalled for {late:.1f} s in the last {RECENT_S} s; its log may say why"
        )
    warm = figures["tiers"]["warm"]
    if not warm["allocated_bytes"]:
        yield (f"there is no warm tier: {warm['failure'] or 'its first extent is being allocated'}")


def _losses(figures: Mapping[str, Any]) -> Iterator[str]:
    warm, cold = figures["tiers"]["warm"], figures["tiers"].get("cold")
    if warm["failure"]:
        have, wanted = format_bytes(warm["allocated_bytes"]), format_bytes(warm["capacity_bytes"])
        yield f"the warm tier has {have} of {wanted}: {warm['failure']}"
    remote = figures["tiers"].get("remote")
    if remote is not None and is_switched_off(remote):
        remote = None
    if remote is not None and not remote["on"]:
        yield f"the remote tier is off, retrying: {remote['failure']}"
    elif remote is not None and not remote["writable"]:
        yield "the remote tier cannot be written, retrying: see the log"
    if cold is None:
        return
    failure = cold["failure"] or "its disks do not complete requests"
    if cold["given_up"]:
        yield f"the cold tier is off until a restart: {failure}"
    elif is_away(cold) or (is_drained(cold) and not cold["failure"]):
        yield f"the cold tier is {meaning('cold', cold)}"
    elif not cold["on"]:
        yield f"the cold tier is off, retrying: {failure}"
    elif cold["failure"]:
        yield f"the cold tier: {failure}"


def _line(text: str) -> str:
    return " ".join(text.split())
