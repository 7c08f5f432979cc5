"""KV events: which of the blocks that this engine knows are in memory and on disk, as the daemon tells it.

The daemon's word is the only source, so events come in the order in which things happened, other engines'
saves among them. Where some of its words were missed, or the connection was, everything is told as removed:
who routes by these events sends a request elsewhere once too often, never to where nothing is. No vLLM here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvtier import wire
from kvtier.client import Change, Lease
from kvtier.key import Keys
from kvtier_vllm.layout import Layout

LIMIT_KNOWN = 1 << 17  # blocks: 100 MB at most, their tokens among them


@dataclass(slots=True)
class Stored:
    """Consecutive blocks of a prompt are in a tier."""

    group: int
    tier: int
    hashes: list[bytes]
    parent: bytes | None
    tokens: array[int]
    lora: Any


@dataclass(slots=True)
class Removed:
    group: int
    tier: int
    hashes: list[bytes]


Event = Stored | Removed


@dataclass(slots=True)
class Known:
    """A block, and in which shards of which group and tier it is: a bit each."""

    hash: bytes
    parent: bytes | None
    tokens: array[int]
    lora: Any
    there: dict[tuple[int, int], int] = field(default_factory=dict)


class Events:
    def __init__(self, layout: Layout) -> None:
        self._block_tokens = layout.block_tokens
        self._ratio = layout.block_tokens // layout.hash_tokens
        self._whole = (1 << layout.shards.count) - 1
        self._known: dict[bytes, Known] = {}
        self._events: list[Event] = []

    def name(self, request: Any, keys: Keys, first: int) -> None:
        """The blocks of a request from `first` on are called so."""
        hashes, ratio, size = request.block_hashes, self._ratio, self._block_tokens
        for at in range(first, len(keys)):
            if keys[at] in self._known:
                continue
            if len(self._known) >= LIMIT_KNOWN:
                oldest = next(iter(self._known))
                self._remove(self._known.pop(oldest))
            tokens = array("I", request.all_token_ids[at * size : (at + 1) * size])
            parent = hashes[at * ratio - 1] if at else None
            self._known[keys[at]] = Known(
                hashes[(at + 1) * ratio - 1], parent, tokens, request.lora_request
            )

    def found(self, keys: Keys, lease: Lease) -> None:
        """These are in memory: who says so holds them."""
        for part in lease.parts:
            for at in range(part.first, lease.ready):
                self._came(keys[at], part.group, part.shard, wire.MEMORY)

    def heard(self, changes: Iterable[Change]) -> None:
        for what, tier, group, shard, key in changes:
            if what == wire.CAME:
                self._came(key, group, shard, tier)
            else:
                self._went(key, group, shard, tier)

    def forget(self) -> None:
        """What was known is not known any more."""
        for known in self._known.values():
            self._remove(known)

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _came(self, key: bytes, group: int, shard: int, tier: int) -> None:
        known = self._known.get(key)
        if known is None:
            return
        before = known.there.get((group, tier), 0)
        now = known.there[group, tier] = before | 1 << shard
        if before != self._whole == now:
            self._store(known, group, tier)

    def _went(self, key: bytes, group: int, shard: int, tier: int) -> None:
        known = self._known.get(key)
        if known is None:
            return
        before = known.there.get((group, tier), 0)
        known.there[group, tier] = before & ~(1 << shard)
        if before == self._whole:
            self._gone(known.hash, group, tier)

    def _store(self, known: Known, group: int, tier: int) -> None:
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, Stored)
            and (last.group, last.tier, last.lora) == (group, tier, known.lora)
            and last.hashes[-1] == known.parent
        ):
            last.hashes.append(known.hash)
            last.tokens += known.tokens
            return
        stored = Stored(group, tier, [known.hash], known.parent, known.tokens[:], known.lora)
        self._events.append(stored)

    def _remove(self, known: Known) -> None:
        for (group, tier), shards in known.there.items():
            if shards == self._whole:
                self._gone(known.hash, group, tier)
        known.there.clear()

    def _gone(self, name: bytes, group: int, tier: int) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed) and (last.group, last.tier) == (group, tier):
            last.hashes.append(name)
        else:
            self._events.append(Removed(group, tier, [name]))
