"""Where a block is, or why it is not stored."""

from __future__ import annotations

from typing import Any

from kvtier.wire import GRANTED, IN_PROGRESS
from kvtier_daemon.catalog.blocks import BELOW, PROMOTING, BlockTable
from kvtier_daemon.catalog.miss_log import BY_POLICY, near
from kvtier_daemon.catalog.spaces import KnownSpace, SpaceTable
from kvtier_kernels import Store

WHERE = ("in_memory", "coming", "on_disk", "in_progress", "incomplete")


def find_reason(
    blocks: BlockTable, spaces: SpaceTable, policy: str, key: bytes, space: KnownSpace | None
) -> dict[str, Any]:
    searched = [space] if space is not None else list(spaces)
    best: tuple[str, KnownSpace | None] = ("", space)
    for one in searched:
        where = _where(blocks.store, one, key)
        if where and (not best[0] or WHERE.index(where) < WHERE.index(best[0])):
            best = where, one
    found: dict[str, Any] = {"key": key.hex(), "why": best[0]}
    if best[1] is not None:
        found["space"] = best[1].number
        if engines := blocks.residency.engines(best[1], key):
            found["engines"] = engines
    if best[0] in ("", "incomplete"):
        why, ago = blocks.miss_log.of(key)
        if why:
            found |= {"why": why, "ago_s": round(ago, 1)}
            if why in BY_POLICY:
                found["policy"] = policy
        elif not best[0]:
            found["why"] = "never_stored"
            if space is not None and (others := near(space, list(spaces))):
                found["near"] = others
                if space.index < 0:
                    found["why"] = "other_identity"
    return found


def _where(store: Store, space: KnownSpace, key: bytes) -> str:
    """Where this block is in this space, one of WHERE; empty if it is not stored."""
    if space.index < 0:
        return ""
    states = set(store.states(space.index, key))
    if IN_PROGRESS in states:
        return "in_progress"
    if not states - {GRANTED}:
        return ""
    if GRANTED in states:
        return "incomplete"
    if max(states) > BELOW:
        return "on_disk"
    return "coming" if PROMOTING in states else "in_memory"
