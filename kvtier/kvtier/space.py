"""A space: look up blocks, load them, save them, pin and forget them."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvtier import wire
from kvtier.arguments import A_WEEK_S, WRONG, Checking, seconds, share, whole
from kvtier.errors import InvalidArgument, Refused, StaleLease
from kvtier.key import KEY_BYTES, Keys, hash_keys, token_keys
from kvtier.layout import LIMIT_SHARDS, KvSpec
from kvtier.loading import Lease, Loading
from kvtier.parts import Selection, choose
from kvtier.saving import Saved, Saving
from kvtier_kernels import Buffers

if TYPE_CHECKING:
    from kvtier.key import TokenIds
    from kvtier.link import Link, Make

LARGE_COPY_BYTES = 8 << 20
LIMIT_COPY_THREADS = 256
GOES_ON = (wire.GRANTED, wire.PRESENT, wire.IN_PROGRESS)  # a save continues after such an outcome
LEAST_TTL_S = 0.001
LOOK_S = 0.001  # between two looks at blocks that come from disk
# The longest wait for more blocks before `meanwhile` is called again, and its share of what is left to wait.
MEANWHILE_S, MEANWHILE_SHARE = 0.005, 1 / 8
LONGEST_DELAY_S = 1.0  # of an answer by the daemon
LONGEST_WAIT_MS = 24 * 3600 * 1000
LONGEST_DEADLINE_MS = 10**12
WAITS = itertools.count(1 << 31)  # numbers of requests, apart from those of callers
ROOM_WAIT_S = 10.0  # how long a save waits while the daemon's memory grows


class Match(msgspec.Struct, frozen=True):
    """The result of a lookup: `ready` leading blocks are in memory; the next `coming` blocks are being
    read from disk and are expected in `eta_ms`. `why` is the reason to read the blocks on disk or not to
    read them. `refused` is the reason if the daemon refused the lookup."""

    ready: int
    coming: int
    eta_ms: float
    refused: str = ""
    why: str = ""


class Located(NamedTuple):
    """Where the leading blocks of a prefix are: `memory` blocks, after these `disk` blocks, and after these
    `store` blocks that are known to be in the store that hosts share."""

    memory: int
    disk: int
    store: int


class Pinned(msgspec.Struct, frozen=True):
    """The result of a pin: how many leading `blocks` are pinned, and why the daemon `refused` it."""

    blocks: int
    refused: str = ""


class Change(NamedTuple):
    """One change: a block was added (`what` is `wire.CAME`) or removed (`wire.WENT`), in memory (`tier` is
    `wire.MEMORY`) or on disk (`wire.DISK`)."""

    what: int
    tier: int
    group: int
    shard: int
    key: bytes


class Changes(msgspec.Struct, frozen=True):
    """The changes of a space, the oldest first. If `missed` is not 0, that many earlier changes were
    lost, and all earlier information about the space is invalid. `refused` is the reason if the daemon
    refused the request."""

    changes: list[Change]
    missed: int = 0
    refused: str = ""


class Space:
    """The blocks of one model configuration of this tenant. Created by `Client.open`.

    `spec` is its description, `identity` its 32-byte identity. All methods accept Keys, or a sequence of
    keys of 32 bytes each. The class has a method for each request, and therefore more than most classes.
    """

    def __init__(self, link: Link, spec: KvSpec, opened: wire.Opened) -> None:
        self.link = link
        self.spec = spec
        self.index = opened.space
        self.identity = opened.identity
        self._secret = opened.secret
        self._accepted = opened.accepted
        self._block_bytes = [spec.group_block_bytes(i) for i in range(len(spec.cache_groups))]
        self._most_keys: dict[int, int] = {}
        self._most_shards = max(group.shards for group in spec.cache_groups)
        self._prefill: tuple[float, float] | None = None
        self._is_watched = self._missed_changes = False
        self._is_all_full = all(self.is_full(at) for at in range(len(spec.cache_groups)))

    def __repr__(self) -> str:
        spec = self.spec
        return f"<space of {spec.model}, blocks of {spec.block_tokens} tokens and {self.block_bytes} bytes>"

    def reopened(self, opened: wire.Opened) -> list[wire.Message]:
        """The client is connected again. Return what else the daemon must know. Raises Refused if the tenant
        has another secret."""
        is_same = opened.secret == self._secret
        is_next = self._secret in opened.accepted or opened.secret in self._accepted
        if opened.identity != self.identity or not (is_same or is_next):
            text = "the tenant of this client, or its secret, has changed: connect again"
            raise Refused("no_tenant", text)
        self.index, self._secret, self._accepted = opened.space, opened.secret, opened.accepted
        self._missed_changes = self._is_watched
        return [] if self._prefill is None else [wire.Prefill(0, self.index, *self._prefill)]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one shard, all groups together, equal to `spec.block_bytes`."""
        return sum(self._block_bytes)

    def is_full(self, group: int) -> bool:
        """Return whether leading blocks of this group are a shorter prefix. Other groups need all blocks."""
        groups = self.spec.cache_groups
        return groups[whole("group", group, 0, len(groups) - 1)].kind == "full"

    def group_block_bytes(self, group: int) -> int:
        """Return the bytes of one group's part of a block in one shard."""
        return self._block_bytes[whole("group", group, 0, len(self._block_bytes) - 1)]

    def keys(self, token_ids: TokenIds, salt: bytes = b"", extras: bytes = b"") -> Keys:
        """Return one key per whole block of these tokens: a list, or a buffer of integers. Keys with a
        different `salt` (for example, a user) or different `extras` (for example, the digest of an
        adapter or an image) are different."""
        return token_keys(
            self._secret, token_ids, self.spec.block_tokens, salt, extras, self._accepted
        )

    def keys_of_hashes(
        self,
        hashes: Sequence[bytes],
        salt: bytes = b"",
        extras: bytes = b"",
        after: Keys | None = None,
        alone: bool = False,
    ) -> Keys:
        """Return one key per block hash of an engine, in place of tokens. Use only hashes that cannot be
        forged, such as SHA-256. `after` contains the keys of the blocks before these. With `alone`, the key
        of a block does not depend on the hashes before it, which its own hash then has to contain."""
        return hash_keys(self._secret, hashes, salt, extras, after, self._accepted, alone)

    # --- lookups -----------------------------------------------------------------------------

    def match(
        self,
        keys: Keys | Sequence[bytes],
        *,
        request: int = 0,
        within_ms: int = 0,
        queued_ms: int = 0,
        awaits: bool = False,
    ) -> Match:
        """Look up how many leading blocks are stored. Starts to read blocks from disk if that is expected
        to be faster than recomputing them.

        `request` is a number for the waiting request: further calls with it ask about the same lookup,
        and `cancel` ends it. `within_ms` is the longest time that the request waits, `queued_ms` the time
        that it waits for the engine in any case. With `awaits` and a number, blocks that another client is
        writing are `coming` too, until they could have been recomputed or `within_ms` has passed.
        """
        packed, others = _packed(keys)
        reply = self.link.ask(
            lambda id_: wire.MatchPrefix(
                id_, self.index, packed, request, within_ms, queued_ms, *others, awaits
            ),
            wire.Matched,
        )
        return Match(reply.ready, reply.coming, reply.eta_ms, why=reply.why)

    def wait(
        self, keys: Keys | Sequence[bytes], within_ms: int = 1000, *, request: int = 0,
        awaits: bool = False,
    ) -> Match:  # fmt: skip
        """Look up as `match` does, and wait until the blocks that are read from disk are in memory, for at
        most `within_ms`. Reads that have not ended by then are cancelled, unless another request waits for
        them. Returns the last answer: `ready` blocks can be loaded.

        The daemon holds what it has read for some seconds. With a number of the caller, `request`, the caller
        ends that with `cancel` once it has a lease; then nothing is cancelled here. `awaits`: as in `match`.
        """
        within_ms = whole("within_ms", within_ms, 0, LONGEST_WAIT_MS)
        until = self.link.connection.clock() + within_ms / 1000
        number = request or next(WAITS)
        while (
            found := self.match(keys, request=number, within_ms=within_ms, awaits=awaits)
        ).coming:
            left_s = until - self.link.connection.clock()
            if left_s <= 0:
                if not request:
                    self.cancel(number)
                break
            time.sleep(min(LOOK_S, left_s))
        return found

    def locate(self, chains: Sequence[Keys | Sequence[bytes]]) -> list[Located]:
        """Find out where the leading blocks of each of these prefixes are, for a router. Starts no reads, and
        counts as no lookup. At most wire.LIMIT_LOCATED prefixes."""
        with Checking("chains"):
            packed = [Keys.of(keys).packed for keys in chains]
        lengths = b"".join((len(one) // KEY_BYTES).to_bytes(4, "little") for one in packed)
        reply = self.link.ask(
            lambda id_: wire.Locate(id_, self.index, b"".join(packed), lengths), wire.Locations
        )
        return [Located(*row) for row in wire.LOCATED.iter_unpack(reply.rows)]

    def prefetch(self, keys: Keys | Sequence[bytes]) -> Match:
        """Read these blocks from disk, because a request will need them soon."""
        packed, others = _packed(keys)
        reply = self.link.ask(
            lambda id_: wire.Prefetch(id_, self.index, packed, *others), wire.Matched
        )
        return Match(reply.ready, reply.coming, reply.eta_ms, why=reply.why)

    def begin_prefetch(self, keys: Keys | Sequence[bytes]) -> int:
        """Send a prefetch and return its ticket at once. `client.poll()` returns the Match later."""
        packed, others = _packed(keys)
        return self.link.tell(lambda id_: wire.Prefetch(id_, self.index, packed, *others))

    def begin_match(self, keys: Keys | Sequence[bytes]) -> int:
        """Send a match and return its ticket at once. `client.poll()` returns the answer later."""
        packed, others = _packed(keys)
        return self.link.tell(
            lambda id_: wire.MatchPrefix(id_, self.index, packed, 0, 0, 0, *others)
        )

    def cancel(self, request: int) -> None:
        """Cancel the reads of the request with this number. Does not wait for an answer."""
        self.link.tell(wire.Cancel(0, request))

    def prefill(self, token_s: float, context_s: float = 0.0) -> None:
        """Report the time to compute: `token_s` per token, plus `context_s` per token for each token
        before it. The daemon compares loads with it, for all clients of this space. Does not wait for an
        answer."""
        self._prefill = token_s, context_s
        self.link.tell(wire.Prefill(0, self.index, token_s, context_s))

    def kept(self) -> tuple[int, int]:
        """Return how many blocks, of all groups and shards, are in memory, and how many on disk; a block
        can be in both. Slow: it lists all blocks of the tenant."""
        report = self.link.ask(lambda id_: wire.Spaces(id_, "", self.index), wire.Report)
        spaces = msgspec.msgpack.decode(report.stats["spaces"])
        (number,) = [one["index"] for one in spaces if one["identity"] == self.identity.hex()] or [
            -1
        ]
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
        self,
        keys: Keys | Sequence[bytes],
        deadline_ms: int = 500,
        group: int = 0,
        shard: int = 0,
        *,
        wait_ms: int = 0,
        layers: Sequence[int] | None = None,
        tokens: range | None = None,
    ) -> Loading:
        """Return a context manager, `with space.load(keys) as blocks:`, with read-only views of the ready
        prefix, held for `deadline_ms`. It first waits for blocks from disk, for at most `wait_ms`.

        `blocks[i]` is block i of the prefix, or None if this group does not need it (a sliding window
        needs only its last blocks). If the `with` block takes longer than the deadline and a slot was
        reused, its end raises StaleLease: do not use the data. Raises ViewsInUse at its end if an object
        still refers to a view.

        With `layers` or `tokens`, as in `load_into`, a view contains only these bytes of its block. They must
        be consecutive: layers one after another, or tokens of one layer if it has one part.
        """
        check_place(self.spec, group, shard)
        is_whole = layers is None and tokens is None
        chosen = None if is_whole else choose(self.spec, group, layers, tokens)
        if chosen is not None and len(chosen.starts) != 1:
            text = "these layers and tokens are not consecutive in a block: use load_into"
            raise InvalidArgument(text)
        wait_ms = whole("wait_ms", wait_ms, 0, LONGEST_WAIT_MS)
        return Loading(self, keys, deadline_ms, group, shard, wait_ms, chosen)

    def load_into(
        self,
        keys: Keys | Sequence[bytes] | Lease,
        targets: Sequence[Any] | Any,
        deadline_ms: int = 500,
        group: int = 0,
        shard: int = 0,
        threads: int | None = None,
        *,
        wait_ms: int = 0,
        layers: Sequence[int] | None = None,
        tokens: range | None = None,
    ) -> int:
        """Copy the ready prefix into `targets`: one buffer per block, or one buffer for all. Returns how
        many blocks of the prefix can be used. It first waits for blocks from disk, for at most `wait_ms`.

        Block i is copied to `targets[i]`. Buffers of blocks that this group does not need, and buffers
        after the prefix, are not changed. `threads`: None selects the number by the size.

        With `layers` (a range or a list) or `tokens` (a range within the block), only these bytes of each
        block are copied, and `targets` have their size: layer after layer, and within a layer as in the
        block. In memory they are found by the description of the space: it must not be opaque, and its
        layout must begin with `layer`. The checksum of a block covers all of it, so a client with `verify`
        still reads whole blocks in memory, and another one verifies no bytes, as in a whole load.

        With `wait_ms` too, blocks that are only on disk are not read to memory: this process reads the pages
        of their frames that it needs, and compares the digests of these, but not that of the whole block. If
        the tenant has no `direct_reads`, in a space with groups that are not `full`, and for frames that are
        encrypted or have a codec `zstd`, `ecsq` or `cachegen`, the daemon reads whole blocks as usual.

        In place of `keys`, a caller that loads several times, for example layer by layer, passes a lease that
        it holds, from `lease`: each load then costs only its copy, and is not counted as another lookup.
        """
        check_place(self.spec, group, shard)
        check_threads(threads)
        is_whole = layers is None and tokens is None
        chosen = None if is_whole else choose(self.spec, group, layers, tokens)
        if isinstance(keys, Lease):
            if wait_ms:
                raise InvalidArgument("wait_ms: the blocks of a lease are in memory")
            return _copy(self, keys, targets, 0, (group, shard), threads, chosen)[0]
        if (
            chosen is not None
            and whole("wait_ms", wait_ms, 0, LONGEST_WAIT_MS)
            and self._is_all_full
        ):
            deadline_ms = whole("deadline_ms", deadline_ms, 1, LONGEST_DEADLINE_MS)
            place = group, shard
            return _load_parts(self, keys, targets, deadline_ms, place, threads, wait_ms, chosen)
        lease = self.lease(keys, deadline_ms, [shard], wait_ms=wait_ms)
        return _copy_and_release(self, lease, targets, 0, (group, shard), threads, chosen)

    def used(
        self, group: int, shard: int, blocks: int, slots: int, chosen: Selection | None = None
    ) -> tuple[int, int]:
        """Return the tokens and bytes that a load of one part used, for `Lease.release`. All parts
        contain the same tokens, so only the first part, and its first layer, count tokens."""
        tokens, nbytes = self.spec.block_tokens, self.group_block_bytes(group)
        if chosen is not None:
            tokens, nbytes = chosen.tokens, chosen.nbytes
        first = (group, shard) == (0, 0)
        with Checking("blocks, slots"):
            return int(blocks) * tokens if first else 0, int(slots) * nbytes if blocks else 0

    def lease(
        self,
        keys: Keys | Sequence[bytes],
        deadline_ms: int = 500,
        shards: Sequence[int] = (0,),
        *,
        wait_ms: int = 0,
        request: int = 0,
        meanwhile: Callable[[Lease], object] | None = None,
    ) -> Lease:
        """Look up the prefix and hold its ready blocks in all groups and shards, for `deadline_ms`. The lease
        contains the slots of `shards`. It first waits for blocks from disk, for at most `wait_ms`.

        While it waits, it calls `meanwhile` with leases of the blocks that are ready so far, which can be
        copied while the others are read; it releases these leases itself. `request`: the number of a `match`
        of the same keys; the reads of that request end with this call.
        """
        link, clock = self.link, self.link.connection.clock

        def ask(request: int = 0, wait_ms: int = 0, bring: bool = True) -> Make:
            within_ms = given_ms if request else 0
            return _lease_request(
                self, keys, deadline_ms, shards, request, within_ms, wait_ms=wait_ms, bring=bring
            )

        def again(id_: int) -> wire.Message:
            return ask(bring=False)(id_)

        given_ms = whole("wait_ms", wait_ms, 0, LONGEST_WAIT_MS)
        if not (given_ms or request):
            return Lease.of(link, ask(), again)
        number, until = request or next(WAITS), clock() + given_ms / 1000
        if link.connection.timeout_s < 2 * LONGEST_DELAY_S:
            # A daemon that recovers delays an answer by up to half of this.
            given_ms = min(given_ms, max(1, int(link.connection.timeout_s * 1000)))
        longest_s = link.connection.timeout_s / 2  # an answer must arrive within that of a request
        first_ms = min(given_ms, max(1, int(longest_s * 1000))) if meanwhile is None else 0
        try:
            lease = Lease.of(link, ask(number, first_ms), again, True)
            while lease.coming and (left_s := until - clock()) > 0:
                turn_s = min(left_s, longest_s)
                before, began = lease, clock()
                try:
                    if meanwhile is not None:
                        meanwhile(before)
                        soon_s = max(MEANWHILE_S, before.eta_ms / 1000 * MEANWHILE_SHARE)
                        turn_s = min(turn_s, soon_s)
                    lease = Lease.of(link, ask(number, max(1, int(turn_s * 1000))), again, True)
                finally:
                    before.release()
                if lease.coming:  # not of reads of this daemon, whose end it waits for
                    time.sleep(max(0.0, min(left_s, LOOK_S) - (clock() - began)))
        finally:
            self.cancel(number)  # only now: until then the daemon holds what it has read
        return lease

    def most_keys(self, shards: int = 1) -> int:
        """Return the largest number of keys of one lease that returns the slots of `shards` shards. The
        daemon refuses more."""
        shards = whole("shards", shards, 0, LIMIT_SHARDS)
        if shards not in self._most_keys:
            self._most_keys[shards] = _most_keys(self.spec, shards, self.link.caller.verify)
        return self._most_keys[shards]

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
        awaits: bool = False,
    ) -> int:
        """Send a lease request and return its ticket at once. `client.poll()` returns the Lease later.

        `request`, `within_ms`, `queued_ms` and `awaits` are as in `match`. `wait_ms`: for a request that
        asked before, or of which no block is ready, delay the answer until its blocks are in memory, at most
        for this time; with `awaits` also those that another client is writing. `first`: the caller has the
        blocks before this one itself; they are not read from disk, and the lease may not contain them. With
        `bring=False` nothing is read from disk.
        """
        asked = _lease_request(
            self,
            keys,
            deadline_ms,
            shards,
            request,
            within_ms,
            queued_ms,
            wait_ms,
            first,
            bring,
            awaits,
        )
        return self.link.tell(asked)

    # --- saving ------------------------------------------------------------------------------

    def reserve(
        self,
        keys: Keys | Sequence[bytes],
        group: int = 0,
        shard: int = 0,
        *,
        wait_s: float = ROOM_WAIT_S,
        ttl_s: float | None = None,
        waits: Callable[[], bool] | None = None,
    ) -> Saving:
        """Return a context manager, `with space.reserve(keys) as saving:`, with writable slots for the
        keys that are new and accepted.

        At the end of the `with` block the leading slots that were written are committed. The first slot
        that was not written, and all slots after it, are given back; after an exception, all slots are.
        Code that fills slots by their addresses (`saving.slots`) calls `saving.commit(count)`. More than
        wire.LIMIT_RESERVED keys are refused.

        Entering waits up to `wait_s` for free memory while the daemon's memory is still being allocated, or
        while the blocks that have to leave it are being written to disk. 0 does not wait: such blocks are
        evicted before they are on disk, as they are if saves have waited for the disk for half of the
        time. With `waits`, the save waits for the disk as long as that returns True, regardless of
        `wait_s`, and then gets no slots.

        With `ttl_s`, a week at most, the new blocks are kept only in memory, and are not found after that
        time. Blocks that are already stored do not change.
        """
        check_place(self.spec, group, shard)
        ttl_ms = 0 if ttl_s is None else int(seconds("ttl_s", ttl_s, LEAST_TTL_S, A_WEEK_S) * 1000)
        return Saving(self, Keys.of(keys), group, shard, seconds("wait_s", wait_s), ttl_ms, waits)

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
        ttl_s: float | None = None,
    ) -> Saved:
        """Save blocks from `arrays`: one buffer per key, or one buffer for all. Returns the keys that are
        stored.

        Copies only blocks that are not stored yet, with stores that bypass the CPU cache. `checksum`
        computes a checksum in the same pass. `threads`: None selects the number by the size. `wait_s` and
        `ttl_s`: as in `reserve`.
        """
        keys = Keys.of(keys)
        check_threads(threads)
        nbytes = self.group_block_bytes(group)
        with Checking("arrays"):
            sources = Buffers(arrays, 0, len(keys), nbytes)
        outcomes = b""
        while not outcomes or len(outcomes) < len(keys):
            at = len(outcomes)
            piece = keys[at : at + wire.LIMIT_RESERVED]
            if len(piece) < len(keys):
                sources = Buffers(arrays, at, len(piece), nbytes, exact=False)
            saving = self.reserve(piece, group, shard, wait_s=wait_s, ttl_s=ttl_s)
            try:
                with saving:
                    if saving.slots:
                        many = threads or copy_threads(len(saving) * nbytes)
                        saving.copy(sources, many, checksum)
            except StaleLease:
                continue  # the daemon has ended, and its memory was not kept: save again
            outcomes += saving.outcomes
            if not outcomes or outcomes[-1] not in GOES_ON:
                # Blocks after a block that is not stored would never be found.
                outcomes += outcomes[-1:] * (len(keys) - len(outcomes))
                break
        return Saved(keys, outcomes)

    # --- pins, hints, forget -----------------------------------------------------------------

    def pin(self, keys: Keys | Sequence[bytes], ttl_s: float = 600.0) -> int:
        """Keep the ready prefix in memory for `ttl_s`, at most a week. Returns how many blocks are pinned."""
        return self.link.ask(_pin_request(self, keys, ttl_s), wire.Counted).blocks

    def begin_pin(self, keys: Keys | Sequence[bytes], ttl_s: float = 600.0) -> int:
        """Send a pin and return its ticket at once. `client.poll()` returns the Pinned later."""
        return self.link.tell(_pin_request(self, keys, ttl_s))

    def begin_watch(self) -> int:
        """Request the changes of this space since the first call, and return a ticket at once.
        `client.poll()` returns the Changes when there are some. Then call again; the daemon keeps a
        limited number of changes until then."""
        return self.link.tell(self._watch)

    def _watch(self, id_: int) -> wire.Message:
        # `Client.poll` reads the answer to a ping as missed changes.
        missed, self._missed_changes, self._is_watched = self._missed_changes, False, True
        return wire.Ping(id_) if missed else wire.Watch(id_, self.index)

    def unpin(self, keys: Keys | Sequence[bytes]) -> int:
        """End the pins that hold only blocks of this prefix. Returns how many blocks they held."""
        packed = Keys.of(keys).packed
        return self.link.ask(lambda id_: wire.Unpin(id_, self.index, packed), wire.Counted).blocks

    def hint(self, keys: Keys | Sequence[bytes], importance: float) -> int:
        """Set the importance of these blocks, from 0 (evict first) to 1: below 1/3 they leave earlier than
        others, from 2/3 on later. Returns how many of them are stored."""
        value = share("importance", importance)
        return self._change(keys, lambda some, id_: wire.Hint(id_, self.index, some.packed, value))

    def begin_hint(self, keys: Keys | Sequence[bytes], importance: float) -> None:
        """Send a hint without an answer."""
        value = share("importance", importance)
        for some in _portions(keys):
            self.link.tell(wire.Hint(0, self.index, some.packed, value))

    def tell_resident(
        self, group: int, entered: Keys | Sequence[bytes] = (), left: Keys | Sequence[bytes] = (),
        reset: bool = False,
    ) -> None:  # fmt: skip
        """Tell the daemon which blocks of a group this client's engine holds in its own cache from now on,
        and which it has dropped, at most 4,096 in all. Without an answer, and never waits. With `reset` it
        held none before. Only if `client.stats()` has `hot`: another daemon ends the connection."""
        mine, dropped = Keys.of(entered).packed, Keys.of(left).packed
        self.link.tell(wire.Resident(0, self.index, group, mine, dropped, reset))

    def forget(self, keys: Keys | Sequence[bytes]) -> int:
        """Make these blocks impossible to find, also after a restart of the daemon. Returns how many
        blocks there were. Raises Refused with the code `disk_failed` if the second part is not certain."""

        def request(some: Keys, id_: int) -> wire.Message:
            packed, others = _packed(some)
            return wire.Forget(id_, self.index, packed, *others)

        return self._change(keys, request)

    def _change(
        self, keys: Keys | Sequence[bytes], request: Callable[[Keys, int], wire.Message]
    ) -> int:
        """Send this request for each portion of the keys; return how many blocks they changed."""
        changed = 0
        for some in _portions(keys):
            changed += self.link.ask(partial(request, some), wire.Counted).blocks
        return changed


def _portions(keys: Keys | Sequence[bytes]) -> Iterator[Keys]:
    """As many keys as one request may change, also under other secrets; one portion if there are none."""
    all_keys = Keys.of(keys)
    most = min(wire.LIMIT_CHANGED, wire.LIMIT_OTHERS // max(1, len(all_keys.others)))
    for at in range(0, max(1, len(all_keys)), most):
        yield all_keys[at : at + most]


def _load_parts(
    space: Space, given: Keys | Sequence[bytes], targets: Sequence[Any] | Any, deadline_ms: int,
    place: tuple[int, int], threads: int | None, wait_ms: int, chosen: Selection,
) -> int:  # fmt: skip
    """Read the blocks that are only on disk, and load the others through the daemon's memory."""
    from kvtier.direct_parts import batches  # imported here because few clients need it

    keys, done, clock = Keys.of(given), 0, space.link.connection.clock
    until = clock() + wait_ms / 1000
    for found, end in batches(space, space.spec, keys, chosen, place, clock, until):
        while done < end:
            is_read, stop = done in found, done + 1
            while stop < end and (stop in found) == is_read:
                stop += 1
            if is_read:
                with Checking("targets"):
                    wanted = Buffers(
                        targets, done, stop - done, chosen.nbytes, writable=True, exact=False
                    )
                for number in range(stop - done):
                    wanted.write(number, found[done + number])
                done = stop
                continue
            left_ms = max(0, int((until - clock()) * 1000))
            lease = space.lease(keys[done:stop], deadline_ms, [place[1]], wait_ms=left_ms)
            done += _copy_and_release(space, lease, targets, done, place, threads, chosen)
            if done < stop:
                return done
    return done


def _copy_and_release(
    space: Space, lease: Lease, targets: Sequence[Any] | Any, at: int, place: tuple[int, int],
    threads: int | None, chosen: Selection | None,
) -> int:  # fmt: skip
    """Copy a lease's blocks into the targets from `at` on, and release it; how many can be used."""
    if not lease.ready:
        return 0
    blocks = good = 0
    try:
        blocks, good = _copy(space, lease, targets, at, place, threads, chosen)
    finally:
        lease.release(*space.used(*place, blocks, good, chosen))
    return blocks


def _copy(
    space: Space, lease: Lease, targets: Sequence[Any] | Any, at: int, place: tuple[int, int],
    threads: int | None, chosen: Selection | None,
) -> tuple[int, int]:  # fmt: skip
    """Copy a lease's blocks into the targets from `at` on; how many can be used, and were copied."""
    if not lease.ready:
        return 0, 0
    part = lease.part(*place)
    nbytes = chosen.nbytes if chosen is not None else space.group_block_bytes(place[0])
    count = len(part.slots) // wire.SLOT_BYTES
    with Checking("targets"):
        first = at + part.first
        wanted = Buffers(targets, first, count, nbytes, writable=True, exact=False)
    good = lease.copy_out(part, wanted, threads or copy_threads(count * nbytes), chosen)
    # The leading blocks of a full group are a shorter prefix; other groups need all blocks.
    return lease.ready if good == count else good if space.is_full(place[0]) else 0, good


def _lease_request(
    space: Space,
    keys: Keys | Sequence[bytes],
    deadline_ms: int,
    shards: Sequence[int],
    request: int = 0,
    within_ms: int = 0,
    queued_ms: int = 0,
    wait_ms: int = 0,
    first: int = 0,
    bring: bool = True,
    awaits: bool = False,
) -> Make:
    (packed, others), most = _packed(keys), space._most_shards
    deadline_ms = whole("deadline_ms", deadline_ms, 1, LONGEST_DEADLINE_MS)
    try:
        wanted = list(shards)
    except WRONG as error:
        raise InvalidArgument(f"shards: {error}") from error
    for shard in wanted:
        if not (isinstance(shard, int) and 0 <= shard < most):
            text = f"the space has no shard {shard}: its groups have at most {most} shards"
            raise InvalidArgument(text)
    return lambda id_: wire.Load(
        id_, space.index, packed, deadline_ms, wanted, request, within_ms, queued_ms, wait_ms, first,
        bring, *others, awaits,
    )  # fmt: skip


def _packed(keys: Keys | Sequence[bytes]) -> tuple[bytes, tuple[bytes, int]]:
    """Return the keys as bytes, and those under other accepted secrets with their number."""
    whole_keys = Keys.of(keys)
    if not whole_keys.others:
        return whole_keys.packed, (b"", 0)
    blocks = min(len(whole_keys), wire.LIMIT_OTHERS // len(whole_keys.others))
    others = b"".join(other[: blocks * KEY_BYTES] for other in whole_keys.others)
    return whole_keys.packed, (others, blocks)


def _pin_request(space: Space, keys: Keys | Sequence[bytes], ttl_s: float) -> Make:
    ttl_ms = int(seconds("ttl_s", ttl_s, LEAST_TTL_S, A_WEEK_S) * 1000)
    packed = Keys.of(keys).packed
    return lambda id_: wire.Pin(id_, space.index, packed, ttl_ms)


def _most_keys(spec: KvSpec, shards: int, verify: bool) -> int:
    """Return how many keys one request may have, so that the answer fits the slots of `shards` shards."""
    most = min(wire.LIMIT_KEYS, wire.LIMIT_LOOKS // spec.places)
    per_block, trailing = 0, 0
    for group in spec.cache_groups:
        if group.kind == "full":
            per_block += min(shards, group.shards)
        else:
            blocks = len(group.needed_blocks(spec.block_tokens, most))
            trailing += blocks * min(shards, group.shards)
    left = max(0, wire.told_slots(verify) - trailing)
    return min(most, left // per_block) if per_block else most


def check_place(spec: KvSpec, group: int, shard: int) -> None:
    groups = spec.cache_groups
    if not (isinstance(group, int) and isinstance(shard, int)):
        raise InvalidArgument(f"group {group!r}, shard {shard!r}: both must be integers")
    if not (0 <= group < len(groups) and 0 <= shard < groups[group].shards):
        raise InvalidArgument(f"the space has no group {group}, shard {shard}")


def check_threads(threads: int | None) -> None:
    if threads is not None:
        whole("threads", threads, 1, LIMIT_COPY_THREADS)


def copy_threads(nbytes: int, most: int = 2) -> int:
    """Return how many threads, at most `most`, copy `nbytes`. One core reaches about half of the memory's
    bandwidth. The threads of a copy run on the cores of the calling thread."""
    return 1 if nbytes < LARGE_COPY_BYTES else min(most, len(os.sched_getaffinity(0)))
