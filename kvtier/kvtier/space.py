"""A space as its client sees it: look blocks up, load them, save them, say what matters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvtier import wire
from kvtier.arguments import Checking, seconds, whole
from kvtier.errors import InvalidArgument
from kvtier.key import Keys, hash_keys, token_keys
from kvtier.layout import LIMIT_SHARDS, KvSpec
from kvtier.loading import Lease, Loading
from kvtier.saving import Saved, Saving
from kvtier_kernels import Buffers

if TYPE_CHECKING:
    from kvtier.key import TokenIds
    from kvtier.link import Link

# One core copies at about half of what memory gives: a large copy takes two where there are two.
COPY_THREADS = 2
LARGE_COPY_BYTES = 32 << 20
LIMIT_COPY_THREADS = 256
GOES_ON = (wire.GRANTED, wire.PRESENT, wire.IN_PROGRESS)  # a save, after a part that ends so
ROOM_WAIT_S = 10.0  # for a save, while the daemon's memory grows


class Match(msgspec.Struct, frozen=True):
    """How many leading blocks are `ready` in memory, and how many after them are `coming`, in `eta_ms`.
    `refused` says why, where the daemon would not look; `why` is the reason for bringing what is on disk, or
    for leaving it there (see planning.WHY)."""

    ready: int
    coming: int
    eta_ms: float
    refused: str = ""
    why: str = ""


class Pinned(msgspec.Struct, frozen=True):
    """How many leading blocks stay. `refused` says why, where the daemon would not."""

    blocks: int
    refused: str = ""


class Change(NamedTuple):
    """A block came (`wire.CAME`) or went (`wire.WENT`), in `wire.MEMORY` or on `wire.DISK`."""

    what: int
    tier: int
    group: int
    shard: int
    key: bytes


class Changes(msgspec.Struct, frozen=True):
    """What came and went in a space, the oldest first. `missed` others before them are not known: what was
    known of the space until then is not either. `refused` says why, where the daemon would not tell."""

    changes: list[Change]
    missed: int = 0
    refused: str = ""


class Space:
    """What shares keys: blocks of one model configuration of this tenant."""

    def __init__(self, link: Link, spec: KvSpec, opened: wire.Opened) -> None:
        self.link = link
        self.spec = spec
        self.index = opened.space
        self.identity = opened.identity
        self._secret = opened.secret
        self._block_bytes = [spec.group_block_bytes(i) for i in range(len(spec.cache_groups))]
        self._most_keys: dict[int, int] = {}

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one shard, all groups together, as `spec.block_bytes`."""
        return sum(self._block_bytes)

    def group_block_bytes(self, group: int) -> int:
        """Bytes of one group's part of a block in one shard, as `spec.group_block_bytes`."""
        return self._block_bytes[whole("group", group, 0, len(self._block_bytes) - 1)]

    def keys(self, token_ids: TokenIds, salt: bytes = b"", extras: bytes = b"") -> Keys:
        """One key per whole block of these tokens: a list, or a buffer of integers. Another `salt` (a user,
        a session) or other `extras` (an adapter's digest, an image's) share no key."""
        return token_keys(self._secret, token_ids, self.spec.block_tokens, salt, extras)

    def keys_of_hashes(
        self,
        hashes: Sequence[bytes],
        salt: bytes = b"",
        extras: bytes = b"",
        after: Keys | None = None,
    ) -> Keys:
        """One key per block hash of an engine, in place of tokens. Only for hashes nobody can forge:
        SHA-256 and its like. `after`: the keys of the blocks before these, where a chain has grown."""
        return hash_keys(self._secret, hashes, salt, extras, after)

    # --- looking -----------------------------------------------------------------------------

    def match(
        self,
        keys: Keys | Sequence[bytes],
        *,
        request: int = 0,
        within_ms: int = 0,
        queued_ms: int = 0,
    ) -> Match:
        """How much of this prefix is here; starts to bring what is on disk, if that is expected before it is
        computed again.

        `request`: a number of the caller's for who waits: asking again by it asks nothing new, and `cancel`
        ends it. `within_ms`: how long it waits at most; `queued_ms`: how long it has to wait anyway.
        """
        packed = Keys.of(keys).packed
        asked = wire.Match(
            self.link.new_id(), self.index, packed, request, within_ms, queued_ms
        )  # fmt: skip
        reply = self.link.ask(asked, wire.Matched)
        return Match(reply.ready, reply.coming, reply.eta_ms, why=reply.why)

    def prefetch(self, keys: Keys | Sequence[bytes]) -> Match:
        """Match for its effect: these blocks will be wanted soon."""
        packed = Keys.of(keys).packed
        reply = self.link.ask(wire.Prefetch(self.link.new_id(), self.index, packed), wire.Matched)
        return Match(reply.ready, reply.coming, reply.eta_ms, why=reply.why)

    def begin_match(self, keys: Keys | Sequence[bytes]) -> int:
        """Send a match and return its ticket at once; `client.poll()` has the answer later."""
        return self.link.tell(wire.Match(self.link.new_id(), self.index, Keys.of(keys).packed))

    def cancel(self, request: int) -> None:
        """Nobody waits any more for what was asked for by this number. Not waited for."""
        self.link.tell(wire.Cancel(0, request))

    def prefill(self, token_s: float, context_s: float = 0.0) -> None:
        """Say what computing takes here: `token_s` for each token, and `context_s` more for each one that is
        before it. The daemon compares loads with it, for all who use this space. Not waited for."""
        self.link.tell(wire.Prefill(0, self.index, token_s, context_s))

    def kept(self) -> tuple[int, int]:
        """How many blocks, of all groups and shards, are in memory and how many on disk: one may be in both.
        Asks in pieces, of all that the tenant has: for people, not for each request."""
        asked = wire.Spaces(self.link.new_id(), "", self.index)
        told = self.link.ask(asked, wire.Report).stats["spaces"]
        (number,) = [
            one["index"]
            for one in msgspec.msgpack.decode(told)
            if one["identity"] == self.identity.hex()
        ] or [-1]
        first = memory = disk = 0
        while number >= 0:
            piece = self.link.ask(wire.List(self.link.new_id(), "", -1, first), wire.Listed)
            for space, in_memory, on_disk, *_ in wire.TALLY.iter_unpack(piece.rows):
                if space == number:
                    memory, disk = memory + in_memory, disk + on_disk
            if not (first := piece.next):
                break
        return memory, disk

    # --- loading -----------------------------------------------------------------------------

    def load(
        self, keys: Keys | Sequence[bytes], deadline_ms: int = 500, group: int = 0, shard: int = 0
    ) -> Loading:
        """`with space.load(keys) as blocks:` read-only views of the ready prefix, held for `deadline_ms`.

        `blocks[i]` is block i of the prefix: None where this group can do without it (a sliding window needs
        only its trailing blocks). If the `with` takes longer than the deadline and a slot was given away
        meanwhile, leaving it raises StaleLease: what was read is not to be used.
        """
        self._check_place(group, shard)
        return Loading(self, keys, deadline_ms, group, shard)

    def load_into(
        self,
        keys: Keys | Sequence[bytes],
        targets: Sequence[Any] | Any,
        deadline_ms: int = 500,
        group: int = 0,
        shard: int = 0,
        threads: int | None = None,
    ) -> int:
        """Copy the ready prefix into `targets` (a buffer per block of the prefix, or one for all); how many
        blocks of the prefix can be used.

        Block i goes to `targets[i]`; those that this group can do without are left alone, and so is what lies
        beyond. `threads`: None leaves it to the size.
        """
        self._check_place(group, shard)
        _check_threads(threads)
        lease = self.lease(keys, deadline_ms, [shard])
        if not lease.ready:
            return 0
        blocks = good = 0
        try:
            part, nbytes = lease.part(group, shard), self._block_bytes[group]
            count = len(part.slots) // wire.SLOT_BYTES
            with Checking("targets"):
                wanted = Buffers(targets, part.first, count, nbytes, writable=True, exact=False)
            good = lease.copy_out(part, wanted, threads or _copy_threads(count * nbytes))
            # A full group's leading blocks are a shorter prefix; any other group needs what it lost.
            whole = self.spec.cache_groups[group].kind == "full"
            blocks = lease.ready if good == count else good if whole else 0
        finally:
            lease.release(*self.used(group, shard, blocks, good))
        return blocks

    def used(self, group: int, shard: int, blocks: int, slots: int) -> tuple[int, int]:
        """The tokens and bytes that a load of one part used, for `Lease.release`. All parts are of the same
        tokens: those of the first one count."""
        first = (group, shard) == (0, 0)
        return (
            blocks * self.spec.block_tokens if first else 0,
            slots * self.group_block_bytes(group) if blocks else 0,
        )

    def _check_place(self, group: int, shard: int) -> None:
        groups = self.spec.cache_groups
        if not (isinstance(group, int) and isinstance(shard, int)):
            raise InvalidArgument(f"group {group!r}, shard {shard!r}: both are integers")
        if not (0 <= group < len(groups) and 0 <= shard < groups[group].shards):
            raise InvalidArgument(f"the space has no group {group}, shard {shard}")

    def lease(
        self,
        keys: Keys | Sequence[bytes],
        deadline_ms: int = 500,
        shards: Sequence[int] = (0,),
    ) -> Lease:
        """Match, and hold the ready prefix in all its groups and shards; tells the slots of `shards`."""
        request = self._lease_request(keys, deadline_ms, shards)
        mappings = self.link.mappings
        return Lease(self.link, mappings, self.link.ask(request, wire.Loaded))

    def most_keys(self, shards: int = 1) -> int:
        """How many leading keys one lease that tells so many shards may ask for: of more it is refused."""
        whole("shards", shards, 0, LIMIT_SHARDS)
        if shards not in self._most_keys:
            self._most_keys[shards] = self._counted_most_keys(shards)
        return self._most_keys[shards]

    def _counted_most_keys(self, shards: int) -> int:
        most = min(wire.LIMIT_KEYS, wire.LIMIT_LOOKS // self.spec.places)
        told, trailing = 0, 0
        for group in self.spec.cache_groups:
            if group.kind == "full":
                told += min(shards, group.shards)
            else:
                blocks = len(group.needed_blocks(self.spec.block_tokens, most))
                trailing += blocks * min(shards, group.shards)
        left = max(0, wire.LIMIT_TOLD_SLOTS - trailing)
        return min(most, left // told) if told else most

    def begin_lease(
        self,
        keys: Keys | Sequence[bytes],
        deadline_ms: int = 500,
        shards: Sequence[int] = (0,),
        *,
        request: int = 0,
        within_ms: int = 0,
        queued_ms: int = 0,
        wait_ms: int = 0,
        first: int = 0,
        bring: bool = True,
    ) -> int:
        """Send a lease request and return its ticket at once; `client.poll()` has the Lease later. Who waits,
        and how long, is said as in `match`. `wait_ms`: of a request that asked before, have it answered as
        soon as what it waits for is here, and after so long at the latest. `first`: the caller holds the
        blocks before this one itself: they are not read from disk, and the lease may lack them. Without
        `bring` nothing is read from disk."""
        asked = self._lease_request(
            keys, deadline_ms, shards, request, within_ms, queued_ms, wait_ms, first, bring
        )
        return self.link.tell(asked)

    def _lease_request(
        self,
        keys: Keys | Sequence[bytes],
        deadline_ms: int,
        shards: Sequence[int],
        request: int = 0,
        within_ms: int = 0,
        queued_ms: int = 0,
        wait_ms: int = 0,
        first: int = 0,
        bring: bool = True,
    ) -> wire.Load:
        packed, most = Keys.of(keys).packed, max(group.shards for group in self.spec.cache_groups)
        with Checking("shards"):
            wanted = list(shards)
        for shard in wanted:
            if not (isinstance(shard, int) and 0 <= shard < most):
                text = f"the space has no shard {shard}: its groups have up to {most}"
                raise InvalidArgument(text)
        return wire.Load(
            self.link.new_id(), self.index, packed, deadline_ms, wanted, request, within_ms,
            queued_ms, wait_ms, first, bring,
        )  # fmt: skip

    # --- saving ------------------------------------------------------------------------------

    def reserve(
        self,
        keys: Keys | Sequence[bytes],
        group: int = 0,
        shard: int = 0,
        *,
        wait_s: float = ROOM_WAIT_S,
    ) -> Saving:
        """`with space.reserve(keys) as saving:` writable slots for the keys that are new and admitted.

        On leaving, the leading slots that were written are committed; the first that was handed out but never
        written, and all after it, are given back, and so are all on an exception. Whoever fills slots
        otherwise (by their addresses, in `saving.slots`) says so with `saving.commit(count)`. At most
        wire.LIMIT_RESERVED keys: more are refused.

        While the daemon's memory is still growing, entering waits up to `wait_s` for room; 0 does not wait.
        Never waits for a disk.
        """
        self._check_place(group, shard)
        return Saving(self, Keys.of(keys), group, shard, seconds("wait_s", wait_s))

    def save(
        self,
        keys: Keys | Sequence[bytes],
        arrays: Sequence[Any] | Any,
        group: int = 0,
        shard: int = 0,
        checksum: bool = True,
        threads: int | None = None,
        *,
        wait_s: float = ROOM_WAIT_S,
    ) -> Saved:
        """Copy blocks in: a buffer per key, or one for all. What was kept comes back.

        Only blocks that are not here yet are copied. Streams past the cache, summing on the way.
        `threads`: None leaves it to the size. While the daemon's memory is still growing, waits up to
        `wait_s` for room; 0 does not wait.
        """
        keys = Keys.of(keys)
        _check_threads(threads)
        nbytes = self._block_bytes[group]
        with Checking("arrays"):
            sources = Buffers(arrays, 0, len(keys), nbytes)
        outcomes = b""
        while not outcomes or len(outcomes) < len(keys):
            at = len(outcomes)
            piece = keys[at : at + wire.LIMIT_RESERVED]
            if len(piece) < len(keys):
                sources = Buffers(arrays, at, len(piece), nbytes, exact=False)
            with self.reserve(piece, group, shard, wait_s=wait_s) as saving:
                if saving.slots:
                    saving.copy(sources, threads or _copy_threads(len(saving) * nbytes), checksum)
            outcomes += saving.outcomes
            if not outcomes or outcomes[-1] not in GOES_ON:
                # What comes after a block that is not kept would never be found.
                outcomes += outcomes[-1:] * (len(keys) - len(outcomes))
                break
        return Saved(keys, outcomes)

    # --- wishes ------------------------------------------------------------------------------

    def pin(self, keys: Keys | Sequence[bytes], ttl_s: float = 600.0) -> int:
        """Ask that the ready prefix stay for `ttl_s`, a week at most; how many blocks will."""
        return self.link.ask(self._pin_request(keys, ttl_s), wire.Counted).blocks

    def begin_pin(self, keys: Keys | Sequence[bytes], ttl_s: float = 600.0) -> int:
        """Send a pin and return its ticket at once; `client.poll()` has the Pinned later."""
        return self.link.tell(self._pin_request(keys, ttl_s))

    def _pin_request(self, keys: Keys | Sequence[bytes], ttl_s: float) -> wire.Pin:
        ttl_ms = int(seconds("ttl_s", ttl_s) * 1000)
        return wire.Pin(self.link.new_id(), self.index, Keys.of(keys).packed, ttl_ms)

    def begin_watch(self) -> int:
        """Ask for what comes to this space and goes, from the first time on; returns a ticket at once, and
        `client.poll()` has the Changes when there are some. Then ask again: until then so many are kept."""
        return self.link.tell(wire.Watch(self.link.new_id(), self.index))

    def unpin(self, keys: Keys | Sequence[bytes]) -> int:
        """End the pins that hold nothing but blocks of this prefix; how many blocks they held."""
        packed = Keys.of(keys).packed
        return self.link.ask(
            wire.Unpin(self.link.new_id(), self.index, packed), wire.Counted
        ).blocks

    def hint(self, keys: Keys | Sequence[bytes], importance: float) -> int:
        """Say how much these blocks matter, 0 (may go first) to 1; how many of them are here."""
        packed = Keys.of(keys).packed
        request = wire.Hint(self.link.new_id(), self.index, packed, importance)
        return self.link.ask(request, wire.Counted).blocks

    def begin_hint(self, keys: Keys | Sequence[bytes], importance: float) -> None:
        """The same, not waited for: no answer comes."""
        self.link.tell(wire.Hint(0, self.index, Keys.of(keys).packed, importance))

    def forget(self, keys: Keys | Sequence[bytes]) -> int:
        """These blocks are not to be found from now on, after a restart of the daemon neither; how many
        there were. Raises Refused, `disk_failed`, where the second can't be promised."""
        packed = Keys.of(keys).packed
        return self.link.ask(
            wire.Forget(self.link.new_id(), self.index, packed), wire.Counted
        ).blocks


def _check_threads(threads: int | None) -> None:
    if threads is not None:
        whole("threads", threads, 1, LIMIT_COPY_THREADS)


def _copy_threads(nbytes: int) -> int:
    """How many threads copy so much, unless the caller says."""
    if nbytes < LARGE_COPY_BYTES:
        return 1
    return min(COPY_THREADS, len(os.sched_getaffinity(0)))
