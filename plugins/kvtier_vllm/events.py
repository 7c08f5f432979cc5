"""KV events: which of this engine's known blocks are in memory and on disk, as the daemon reports it.

The daemon's changes are the only source, so events are in the order of the changes, and include the saves of
other engines. If changes were missed, or the session ended, all blocks are reported as removed: a router may
then miss a hit, but never expects one that does not exist. Imports no vLLM.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvtier import KvtierError, wire
from kvtier.client import Change, Changes, Lease
from kvtier.key import Keys
from kvtier_vllm.daemon import Daemon, DaemonSession
from kvtier_vllm.layout import Layout

log = logging.getLogger("vllm.kvtier")

LIMIT_KNOWN = 1 << 17  # blocks: at most 100 MB, including their tokens


@dataclass(slots=True)
class Stored:
    """Consecutive blocks of a prompt were stored in a tier."""

    group: int
    tier: int
    hashes: list[bytes]
    parent: bytes | None
    tokens: array[int]
    lora: Any


@dataclass(slots=True)
class Removed:
    """Blocks were removed from a tier."""

    group: int
    tier: int
    hashes: list[bytes]


Event = Stored | Removed


@dataclass(slots=True)
class KnownBlock:
    """A block, and the shards that each group and tier contains of it: one bit per shard."""

    hash: bytes
    parent: bytes | None
    tokens: array[int]
    lora: Any
    shards: dict[tuple[int, int], int] = field(default_factory=dict)


class KvEvents:
    """Turns the daemon's changes into events. Knows `LIMIT_KNOWN` blocks of this engine's requests."""

    def __init__(self, layout: Layout) -> None:
        self._block_tokens = layout.block_tokens
        self._ratio = layout.block_tokens // layout.hash_tokens
        self._all_shards = (1 << layout.shards.count) - 1
        self._known: dict[bytes, KnownBlock] = {}
        self._events: list[Event] = []

    def name(self, request: Any, keys: Keys, first: int) -> None:
        """Record the keys of a request's blocks from `first` on."""
        hashes, ratio, size = request.block_hashes, self._ratio, self._block_tokens
        for at in range(first, len(keys)):
            if keys[at] in self._known:
                continue
            if len(self._known) >= LIMIT_KNOWN:
                oldest = next(iter(self._known))
                self._remove(self._known.pop(oldest))
            tokens = array("I", request.all_token_ids[at * size : (at + 1) * size])
            parent = hashes[at * ratio - 1] if at else None
            self._known[keys[at]] = KnownBlock(
                hashes[(at + 1) * ratio - 1], parent, tokens, request.lora_request
            )

    def found(self, keys: Keys, lease: Lease) -> None:
        """The lease holds these blocks, so they are in memory."""
        for part in lease.parts:
            for at in range(part.first, lease.ready):
                self._add_shard(keys[at], part.group, part.shard, wire.MEMORY)

    def apply(self, changes: Iterable[Change]) -> None:
        for what, tier, group, shard, key in changes:
            if what == wire.CAME:
                self._add_shard(key, group, shard, tier)
            else:
                self._remove_shard(key, group, shard, tier)

    def remove_all(self) -> None:
        """Report all blocks as removed."""
        for known in self._known.values():
            self._remove(known)

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _add_shard(self, key: bytes, group: int, shard: int, tier: int) -> None:
        known = self._known.get(key)
        if known is None:
            return
        before = known.shards.get((group, tier), 0)
        now = known.shards[group, tier] = before | 1 << shard
        if before != self._all_shards == now:
            self._add_stored(known, group, tier)

    def _remove_shard(self, key: bytes, group: int, shard: int, tier: int) -> None:
        known = self._known.get(key)
        if known is None:
            return
        before = known.shards.get((group, tier), 0)
        known.shards[group, tier] = before & ~(1 << shard)
        if before == self._all_shards:
            self._add_removed(known.hash, group, tier)

    def _add_stored(self, known: KnownBlock, group: int, tier: int) -> None:
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

    def _remove(self, known: KnownBlock) -> None:
        for (group, tier), shards in known.shards.items():
            if shards == self._all_shards:
                self._add_removed(known.hash, group, tier)
        known.shards.clear()

    def _add_removed(self, name: bytes, group: int, tier: int) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed) and (last.group, last.tier) == (group, tier):
            last.hashes.append(name)
        else:
            self._events.append(Removed(group, tier, [name]))


class TierWatch:
    """Requests the daemon's changes, again after each answer. `counts` counts missed changes."""

    def __init__(self, events: KvEvents, daemon: Daemon, counts: Counter[str]) -> None:
        self._events = events
        self._daemon = daemon
        self._counts = counts
        self._session: DaemonSession | None = None

    def follow_session(self) -> None:
        """Start again if the session is another one."""
        session = self._daemon.session
        if session is not self._session:
            self._events.remove_all()
            self._session = session
            self._request()

    def changed(self, changes: Changes) -> None:
        """Publish these changes and request the next ones."""
        if changes.refused:
            log.warning("kvtier: publishing no events of the tiers: %s", changes.refused)
            return
        if changes.missed:
            self._counts["missed"] += changes.missed
            self._events.remove_all()
        self._events.apply(changes.changes)
        self._request()

    def _request(self) -> None:
        if self._session is not None:
            try:
                self._session.space.begin_watch()
            except KvtierError as error:
                self._daemon.lost(self._session, error)
