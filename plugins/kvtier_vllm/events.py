"""KV events: which of this engine's known blocks are in memory and on disk, as the daemon reports it.

The daemon's changes are the only source, so events are in the order of the changes, and include the saves of
other engines. If changes were missed, or the session ended, all blocks are reported as removed: a router may
then miss a hit, but never expects one that does not exist. Imports no vLLM.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvtier import KvtierError, wire
from kvtier.client import Change, Changes, Lease
from kvtier.key import Keys
from kvtier_vllm.daemon import Daemon, DaemonSession
from kvtier_vllm.layout import Layout

log = logging.getLogger("vllm.kvtier")

# A router knows these names. Blocks that are only in the store of several hosts are not published.
MEDIA = {wire.MEMORY: "CPU", wire.DISK: "STORAGE"}
LOCAL = "LOCAL"  # a router ignores other localities
LIMIT_KNOWN = 1 << 17  # blocks: at most 100 MB, including their tokens


@dataclass(slots=True)
class Stored:
    """Consecutive blocks of a prompt were stored in a tier: one hash for each of the engine's blocks in this
    group. `extra_keys` has what else determines each hash, or is empty."""

    group: int
    tier: int
    hashes: list[bytes]
    parent: bytes | None
    tokens: array[int]
    lora: Any
    extra_keys: list[Any]
    session: str | None


@dataclass(slots=True)
class Removed:
    """Blocks were removed from a tier."""

    group: int
    tier: int
    hashes: list[bytes]


Event = Stored | Removed


@dataclass(slots=True)
class KnownBlock:
    """A block, and the shards that each group and tier contains of it: one bit per shard. `hashes`: the
    engine's for these tokens; `extra_keys`: by how many of the engine's blocks the group has, if any."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: array[int]
    lora: Any
    extra_keys: dict[int, list[Any]]
    session: str | None
    shards: dict[tuple[int, int], int] = field(default_factory=dict)


# What determines the hash of a request's tokens from one place to another, besides the tokens.
ExtraKeys = Callable[[Any, int, int], Any]


def no_extra_keys(request: Any, begin: int, end: int) -> None:
    pass


class KvEvents:
    """Turns the daemon's changes into events. Knows `LIMIT_KNOWN` blocks of this engine's requests."""

    def __init__(self, layout: Layout, extra_keys: ExtraKeys = no_extra_keys) -> None:
        self._block_tokens = layout.block_tokens
        self._ratio = layout.block_tokens // layout.hash_tokens
        self._parts = [group.parts for group in layout.groups]
        self._extra_keys = extra_keys
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
                tuple(hashes[at * ratio : (at + 1) * ratio]), parent, tokens, request.lora_request,
                self._extra_keys_of(request, at), getattr(request, "session_id", None),
            )  # fmt: skip

    def _extra_keys_of(self, request: Any, at: int) -> dict[int, list[Any]]:
        """The additional keys of this block, for each size of the engine's blocks."""
        if not has_extra_keys(request):
            return {}
        found, size = {}, self._block_tokens
        for parts in set(self._parts):
            step = size // parts
            found[parts] = [
                self._extra_keys(request, begin, begin + step)
                for begin in range(at * size, (at + 1) * size, step)
            ]
        return found

    def _hashes(self, known: KnownBlock, group: int) -> list[bytes]:
        """The hashes of the engine's blocks in this group."""
        step = self._ratio // self._parts[group]
        return list(known.hashes[step - 1 :: step])

    def found(self, keys: Keys, lease: Lease) -> None:
        """The lease holds these blocks, so they are in memory."""
        for part in lease.parts:
            for at in range(part.first, lease.ready):
                self._set_shard(keys[at], part.group, part.shard, wire.MEMORY, True)

    def apply(self, changes: Iterable[Change]) -> None:
        for what, tier, group, shard, key in changes:
            self._set_shard(key, group, shard, tier, what == wire.CAME)

    def remove_all(self) -> None:
        """Report all blocks as removed."""
        for known in self._known.values():
            self._remove(known)

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _set_shard(self, key: bytes, group: int, shard: int, tier: int, is_there: bool) -> None:
        known = self._known.get(key)
        if known is None:
            return
        before, bit = known.shards.get((group, tier), 0), 1 << shard
        now = known.shards[group, tier] = before | bit if is_there else before & ~bit
        if before != self._all_shards == now:
            self._add_stored(known, group, tier)
        elif now != self._all_shards == before:
            self._add_removed(known, group, tier)

    def _add_stored(self, known: KnownBlock, group: int, tier: int) -> None:
        last = self._events[-1] if self._events else None
        hashes, extra = self._hashes(known, group), known.extra_keys.get(self._parts[group], [])
        if (
            isinstance(last, Stored)
            and (last.group, last.tier, last.lora) == (group, tier, known.lora)
            and (last.session, bool(last.extra_keys)) == (known.session, bool(extra))
            and last.hashes[-1] == known.parent
        ):
            last.hashes += hashes
            last.tokens += known.tokens
            last.extra_keys += extra
            return
        stored = Stored(
            group, tier, hashes, known.parent, known.tokens[:], known.lora, extra[:], known.session
        )
        self._events.append(stored)

    def _remove(self, known: KnownBlock) -> None:
        for (group, tier), shards in known.shards.items():
            if shards == self._all_shards:
                self._add_removed(known, group, tier)
        known.shards.clear()

    def _add_removed(self, known: KnownBlock, group: int, tier: int) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed) and (last.group, last.tier) == (group, tier):
            last.hashes += self._hashes(known, group)
        else:
            self._events.append(Removed(group, tier, self._hashes(known, group)))


def has_extra_keys(request: Any) -> bool:
    """Whether more than tokens determines this request's hashes."""
    names = ("lora_request", "mm_features", "cache_salt", "prompt_embeds")
    return any(
        getattr(request, name, None) is not None and getattr(request, name) != [] for name in names
    )


class SpecKind(NamedTuple):
    """What a group caches, in vLLM's words."""

    kind: str
    window_tokens: int | None


NO_KIND = SpecKind("", None)


def fields_of(
    event: Event, layout: Layout, kinds: Mapping[int, SpecKind], name: Callable[[bytes], Any]
) -> dict[str, Any]:
    """The fields of vLLM's event for an event of this plugin: `BlockStored`, or `BlockRemoved` for `Removed`.
    `kinds`: by the engine's number of a group; `name` converts a hash."""
    group = layout.groups[event.group]
    fields = {
        "block_hashes": [name(one) for one in event.hashes],
        "medium": MEDIA[event.tier],
        "group_idx": group.group_id,
        "locality": LOCAL,
    }
    if isinstance(event, Removed):
        return fields
    kind, window = kinds.get(group.group_id, NO_KIND)
    return fields | {
        "parent_block_hash": None if event.parent is None else name(event.parent),
        "token_ids": event.tokens.tolist(),
        "block_size": layout.block_tokens // group.parts,
        "lora_id": event.lora.adapter_id if event.lora else None,
        "lora_name": event.lora.name if event.lora else None,
        "extra_keys": event.extra_keys or None,
        "kv_cache_spec_kind": kind or None,
        "kv_cache_spec_sliding_window": window,
        "session_id": event.session,
    }


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
