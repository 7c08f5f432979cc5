"""The blocking client: open a space, save blocks, load them back. What plugins and scripts use.

Threads may share a client: requests take turns, copies do not. After a fork the child must connect again;
its inherited client raises Unavailable. A client whose daemon hung, died or restarted raises Unavailable from
then on: make a new one.
"""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvtier import wire
from kvtier.arena import Arena
from kvtier.connection import Clock, Connection
from kvtier.errors import KvtierError, ProtocolError, StaleLease, Unavailable
from kvtier.key import KEY_BYTES, Key, Keys, hash_keys, token_keys
from kvtier.layout import KvSpec
from kvtier_kernels import copy_in, copy_out, fresh, release_views, views

if TYPE_CHECKING:
    from kvtier.key import TokenIds

DEFAULT_SOCKET = "/run/kvtier/kvtier.sock"
# One core copies at about half of what memory gives: a large copy takes two where there are two.
COPY_THREADS = 2
LARGE_COPY_BYTES = 32 << 20
CONNECT_PAUSE_S = 0.005

MARK_BYTES = 16
LIMIT_DEFERRED = 4096

# By socket: tokens of closed clients that could not tell their daemon that they touch nothing any more. The
# next client of this process does, so that slots which a lost connection had for writing are free again.
_unsaid: dict[str, list[bytes]] = {}
_unsaid_lock = threading.Lock()

ReplyT = TypeVar("ReplyT", bound=wire.Message)


class Match(msgspec.Struct, frozen=True):
    """How many leading blocks are `ready` in memory, and how many after them are `coming`, in `eta_ms`.
    `refused` says why, where the daemon would not look."""

    ready: int
    coming: int
    eta_ms: float
    refused: str = ""


class Client:
    """A connection to the daemon and a mapping of this tenant's arena."""

    def __init__(
        self, connection: Connection, arena: Arena, path: str, name: str, read_only: bool
    ) -> None:
        self._connection = connection
        self._path = path
        self._arena = arena
        self._lock = threading.RLock()
        self._writing = 0
        self._lease_tickets: set[int] = set()
        self._deferred: deque[wire.Message] = deque()
        self._closed = False
        with _unsaid_lock:
            ended = _unsaid.get(path, [])[: wire.LIMIT_ENDED]
        hello = wire.Hello(connection.new_id(), wire.SCHEMA, name, read_only, ended)
        welcome = self._ask(hello, wire.Welcome)
        with _unsaid_lock:
            _unsaid[path] = [token for token in _unsaid.get(path, []) if token not in ended]
        self._token = welcome.token
        self.tenant = welcome.tenant
        self.daemon_version = welcome.version

    @classmethod
    def connect(
        cls,
        socket: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = 5.0,
        read_only: bool = False,
        populate: bool = True,
        name: str = "",
        clock: Clock = time.monotonic,
    ) -> Client:
        """Connect to the daemon at `socket`: if None $KVTIER_SOCKET, then that of a daemon of this
        user, then /run/kvtier/kvtier.sock.

        `timeout_s` bounds every request. `read_only` maps the arena for reading only and can't save.
        Raises Unavailable if there is no daemon, Refused if it won't have this client.
        """
        path = os.fspath(socket or default_socket())
        sock = _connected(path, timeout_s, clock)
        connection = Connection(sock, clock, timeout_s)
        arena = Arena(read_only, populate)
        try:
            return cls(connection, arena, path, name or f"pid {os.getpid()}", read_only)
        except BaseException:
            connection.close(farewell=False)
            arena.close()
            raise

    def open(self, spec: KvSpec) -> Space:
        """The space of this description: made on first sight, shared by all who describe it alike."""
        opened = self._ask(wire.Open(self._new_id(), spec.checked()), wire.Opened)
        return Space(self, spec, opened)

    def stats(self) -> dict[str, Any]:
        """What `kvtier status --json` prints."""
        report = self._ask(wire.Stats(self._new_id()), wire.Report)
        return {name: msgspec.msgpack.decode(value) for name, value in report.stats.items()}

    def ping(self) -> None:
        self._ask(wire.Ping(self._new_id()), wire.Done)

    def adopt(self, token: bytes, shards: Sequence[int] = (0,)) -> Lease:
        """Join a lease that another process of this tenant holds, by its token."""
        loaded = self._ask(wire.Adopt(self._new_id(), token, list(shards)), wire.Loaded)
        return Lease(self, loaded)

    def fileno(self) -> int:
        """Readable when `poll` has something to say."""
        return self._connection.fileno()

    def poll(self) -> dict[int, Match | Lease]:
        """Answers that have come to `begin_match` and `begin_lease`, by ticket. Never waits, not for the
        daemon and not for another thread of this client: then there is nothing yet."""
        self._connection.check_process()
        if not self._lock.acquire(blocking=False):
            return {}
        try:
            self._send_deferred()
            replies = self._connection.poll()
            self._map_extents()
        finally:
            self._lock.release()
        found: dict[int, Match | Lease] = {}
        for ticket, reply in replies.items():
            asked_for_lease = ticket in self._lease_tickets
            self._lease_tickets.discard(ticket)
            if isinstance(reply, wire.Matched):
                found[ticket] = Match(reply.ready, reply.coming, reply.eta_ms)
            elif isinstance(reply, wire.Loaded):
                found[ticket] = Lease(self, reply)
            elif isinstance(reply, wire.Failed) and asked_for_lease:
                nothing = wire.Loaded(ticket, 0, 0, 0.0, 0, b"", [])
                found[ticket] = Lease(self, nothing, refused=reply.text)
            elif isinstance(reply, wire.Failed):
                found[ticket] = Match(0, 0, 0.0, reply.text)
        return found

    def close(self) -> None:
        """Let everything go. Views of slots are invalid from now on.

        A save that another thread is in the middle of fails; only when it has ended is the daemon told that
        its slots are free.
        """
        if self._connection.inherited:
            self._connection.close(farewell=False)
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            said = self._connection.close(farewell=not self._writing)
            if not said and not self._writing:
                self._leave_unsaid()
            self._arena.close()

    def _begin_writing(self) -> None:
        self._connection.check_process()
        with self._lock:
            self._writing += 1

    def _end_writing(self) -> None:
        """Nothing touches the slots of one save any more. In a forked child that is not ours to say."""
        if self._connection.inherited:
            return
        with self._lock:
            self._writing -= 1
            if self._closed and not self._writing:
                self._leave_unsaid()

    def _leave_unsaid(self) -> None:
        with _unsaid_lock:
            _unsaid.setdefault(self._path, []).append(self._token)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_id(self) -> int:
        return self._connection.new_id()

    def _ask(self, request: wire.Message, expected: type[ReplyT]) -> ReplyT:
        self._connection.check_process()
        with self._lock:
            self._send_deferred()
            reply = self._connection.wait(self._connection.send(request))
            self._map_extents()
            self._send_deferred()
        if not isinstance(reply, expected):
            raise ProtocolError(f"{type(request).__name__} was answered by {type(reply).__name__}")
        return reply

    def _tell(self, request: wire.Message) -> int:
        """Send without waiting: not for the daemon, and not for another thread's request in flight, after
        which it goes then."""
        self._connection.check_process()
        if isinstance(request, wire.Load):
            self._lease_tickets.add(request.id)
        self._deferred.append(request)
        if len(self._deferred) > LIMIT_DEFERRED:
            raise Unavailable(f"{len(self._deferred)} requests wait for another thread's answer")
        if self._lock.acquire(blocking=False):
            try:
                self._send_deferred()
            finally:
                self._lock.release()
        return request.id

    def _send_deferred(self) -> None:
        while self._deferred:
            self._connection.begin(self._deferred.popleft())

    def _map_extents(self) -> None:
        extents = self._connection.extents
        while extents:
            try:
                self._arena.add(*extents.popleft())
            except OSError as error:
                raise self._connection.fail(f"an extent can't be mapped: {error}") from error


class Space:
    """What shares keys: blocks of one model configuration of this tenant."""

    def __init__(self, client: Client, spec: KvSpec, opened: wire.Opened) -> None:
        self._client = client
        self.spec = spec
        self.index = opened.space
        self.identity = opened.identity
        self._secret = opened.secret
        self._block_bytes = [spec.group_block_bytes(i) for i in range(len(spec.cache_groups))]

    def keys(self, token_ids: TokenIds, salt: bytes = b"", extras: bytes = b"") -> Keys:
        """One key per whole block of these tokens: a list, or a buffer of integers. Another `salt` (a user,
        a session) or other `extras` (an adapter's digest, an image's) share no key."""
        return token_keys(self._secret, token_ids, self.spec.block_tokens, salt, extras)

    def keys_of_hashes(
        self, hashes: Sequence[bytes], salt: bytes = b"", extras: bytes = b""
    ) -> Keys:
        """One key per block hash of an engine, in place of tokens. Only for hashes nobody can forge:
        SHA-256 and its like."""
        return hash_keys(self._secret, hashes, salt, extras)

    # --- looking -----------------------------------------------------------------------------

    def match(self, keys: Keys | Sequence[bytes]) -> Match:
        """How much of this prefix is here; starts the promotion of what is on its way."""
        packed = Keys.of(keys).packed
        reply = self._ask(wire.Match(self._new_id(), self.index, packed), wire.Matched)
        return Match(reply.ready, reply.coming, reply.eta_ms)

    def prefetch(self, keys: Keys | Sequence[bytes]) -> Match:
        """Match for its effect: these blocks will be wanted soon."""
        packed = Keys.of(keys).packed
        reply = self._ask(wire.Prefetch(self._new_id(), self.index, packed), wire.Matched)
        return Match(reply.ready, reply.coming, reply.eta_ms)

    def begin_match(self, keys: Keys | Sequence[bytes]) -> int:
        """Send a match and return its ticket at once; `client.poll()` has the answer later."""
        return self._client._tell(wire.Match(self._new_id(), self.index, Keys.of(keys).packed))

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
        lease = self.lease(keys, deadline_ms, [shard])
        if not lease.ready:
            return 0
        try:
            part = lease.part(group, shard)
            nbytes = self._block_bytes[group]
            count = len(part.slots) // wire.SLOT_BYTES
            wanted = _between(targets, part.first, part.first + count, nbytes)
            threads = threads or _copy_threads(count * nbytes)
            copy_out(lease._extents, part.slots, nbytes, wanted, threads, False)
            good = lease.fresh(part)
        finally:
            lease.release()
        if good == count:
            return lease.ready
        # A full group's leading blocks are a shorter prefix; any other group needs what it lost.
        return good if self.spec.cache_groups[group].kind == "full" else 0

    def _check_place(self, group: int, shard: int) -> None:
        groups = self.spec.cache_groups
        if not (0 <= group < len(groups) and 0 <= shard < groups[group].shards):
            raise ValueError(f"the space has no group {group}, shard {shard}")

    def lease(
        self,
        keys: Keys | Sequence[bytes],
        deadline_ms: int = 500,
        shards: Sequence[int] = (0,),
    ) -> Lease:
        """Match, and hold the ready prefix in all its groups and shards; tells the slots of `shards`."""
        request = self._lease_request(keys, deadline_ms, shards)
        return Lease(self._client, self._ask(request, wire.Loaded))

    def begin_lease(
        self,
        keys: Keys | Sequence[bytes],
        deadline_ms: int = 500,
        shards: Sequence[int] = (0,),
    ) -> int:
        """Send a lease request and return its ticket at once; `client.poll()` has the Lease later."""
        return self._client._tell(self._lease_request(keys, deadline_ms, shards))

    def _lease_request(
        self, keys: Keys | Sequence[bytes], deadline_ms: int, shards: Sequence[int]
    ) -> wire.Load:
        packed = Keys.of(keys).packed
        return wire.Load(self._new_id(), self.index, packed, deadline_ms, list(shards))

    # --- saving ------------------------------------------------------------------------------

    def reserve(self, keys: Keys | Sequence[bytes], group: int = 0, shard: int = 0) -> Saving:
        """`with space.reserve(keys) as saving:` writable slots for the keys that are new and admitted.

        On leaving, the leading slots that were written are committed; the first that was handed out but never
        written, and all after it, are given back, and so are all on an exception. Whoever fills slots
        otherwise (by their addresses, in `saving.slots`) says so with `saving.commit(count)`. Waits for no
        disk.
        """
        self._check_place(group, shard)
        return Saving(self, Keys.of(keys), group, shard)

    def save(
        self,
        keys: Keys | Sequence[bytes],
        arrays: Sequence[Any] | Any,
        group: int = 0,
        shard: int = 0,
        checksum: bool = True,
        threads: int | None = None,
    ) -> Saved:
        """Copy blocks in: a buffer per key, or one for all. What was kept comes back.

        Only blocks that are not here yet are copied. Streams past the cache, summing on the way.
        `threads`: None leaves it to the size.
        """
        keys = Keys.of(keys)
        nbytes = self._block_bytes[group]
        _check_sources(arrays, len(keys), nbytes)
        saving = self.reserve(keys, group, shard)
        with saving:
            if saving.slots:
                sources = _chosen(arrays, saving, len(keys), nbytes)
                threads = threads or _copy_threads(len(saving) * nbytes)
                saving.checksums = copy_in(
                    self._client._arena.extents, saving.slots, nbytes, sources, threads, checksum
                )
                saving.commit(len(saving))
        return Saved(keys, saving.outcomes)

    # --- wishes ------------------------------------------------------------------------------

    def pin(self, keys: Keys | Sequence[bytes], ttl_s: float = 600.0) -> int:
        """Ask that the ready prefix stay for `ttl_s`; how many blocks will."""
        packed = Keys.of(keys).packed
        ttl_ms = int(ttl_s * 1000)
        return self._ask(wire.Pin(self._new_id(), self.index, packed, ttl_ms), wire.Counted).blocks

    def hint(self, keys: Keys | Sequence[bytes], importance: float) -> int:
        """Say how much these blocks matter, 0 (may go first) to 1; how many of them are here."""
        packed = Keys.of(keys).packed
        request = wire.Hint(self._new_id(), self.index, packed, importance)
        return self._ask(request, wire.Counted).blocks

    def forget(self, keys: Keys | Sequence[bytes]) -> int:
        """These blocks are not to be found from now on; how many there were."""
        packed = Keys.of(keys).packed
        return self._ask(wire.Forget(self._new_id(), self.index, packed), wire.Counted).blocks

    def _new_id(self) -> int:
        return self._client._new_id()

    def _ask(self, request: wire.Message, expected: type[ReplyT]) -> ReplyT:
        return self._client._ask(request, expected)


class Lease:
    """Blocks that stay where they are until `release` or the deadline. `token` lets others join."""

    __slots__ = (
        "_client", "_extents", "_id", "_tables", "coming", "eta_ms", "parts", "ready", "refused", "token",
    )  # fmt: skip

    def __init__(self, client: Client, loaded: wire.Loaded, refused: str = "") -> None:
        self.refused = refused
        self._client = client
        # Of its own: the mappings outlive a client that is closed under a lease.
        self._extents = client._arena.extents
        self._tables = client._arena.tables
        self._id = loaded.lease
        self.ready = loaded.ready
        self.coming = loaded.coming
        self.eta_ms = loaded.eta_ms
        self.token = loaded.token
        self.parts: list[wire.Part] = loaded.parts

    def part(self, group: int, shard: int) -> wire.Part:
        """The slots of one group and shard; KeyError if they were not asked for."""
        for part in self.parts:
            if part.group == group and part.shard == shard:
                return part
        raise KeyError(f"the lease tells nothing of group {group}, shard {shard}")

    def views(self, part: wire.Part, nbytes: int) -> list[memoryview]:
        """Read-only views of a part's slots."""
        return views(self._extents, part.slots, nbytes, False)

    def fresh(self, part: wire.Part) -> int:
        """How many leading blocks of a part still are what they were. Ask after reading them."""
        return fresh(self._tables, part.slots)

    def release(self) -> None:
        """Let go. Does not wait for the daemon; a second call does nothing. A daemon that is gone has
        forgotten the lease already; the next request will say so."""
        if self._id:
            lease, self._id = self._id, 0
            with contextlib.suppress(Unavailable):
                self._client._tell(wire.Release(0, lease))


class Blocks(list["memoryview | None"]):
    """The ready prefix: a read-only view a block, valid until the `with` block ends; None for the blocks
    before `first`, which this group can do without."""

    first: int = 0
    coming: int = 0
    eta_ms: float = 0.0


class Loading:
    """A load as a context; see Space.load."""

    __slots__ = ("_args", "_blocks", "_lease", "_part", "_space", "_views")

    def __init__(
        self, space: Space, keys: Keys | Sequence[bytes], deadline_ms: int, group: int, shard: int
    ) -> None:
        self._space = space
        self._args = (keys, deadline_ms, group, shard)
        self._lease: Lease | None = None
        self._part: wire.Part | None = None
        self._views: list[memoryview] = []
        self._blocks = Blocks()

    def __enter__(self) -> Blocks:
        keys, deadline_ms, group, shard = self._args
        lease = self._lease = self._space.lease(keys, deadline_ms, [shard])
        if lease.ready:
            try:
                part = self._part = lease.part(group, shard)
                self._views = lease.views(part, self._space._block_bytes[group])
            except BaseException:
                lease.release()
                raise
            self._blocks = Blocks([*[None] * part.first, *self._views])
            self._blocks.first = part.first
        self._blocks.coming = lease.coming
        self._blocks.eta_ms = lease.eta_ms
        return self._blocks

    def __exit__(
        self, kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        assert self._lease is not None
        stale, kept = False, 0
        if self._part is not None:
            stale = self._lease.fresh(self._part) * wire.SLOT_BYTES < len(self._part.slots)
            kept = release_views(self._views)
        self._lease.release()
        if stale and kind is None:
            raise StaleLease("the lease ran out while its blocks were read: use nothing of them")
        if kept and kind is None:
            text = "are still shown by something made from their views (an array, a slice): copy instead"
            raise BufferError(f"{kept} blocks {text}; they may be another's at any time")


class Saving(Mapping[Key, memoryview]):
    """A save as a context: key -> writable slot, in order; see Space.reserve."""

    def __init__(self, space: Space, keys: Keys, group: int, shard: int) -> None:
        self._space = space
        self._keys = keys
        self._group = group
        self._shard = shard
        self._lease = 0
        self._committed = 0
        self._mark = os.urandom(MARK_BYTES)
        self._buffers: dict[Key, memoryview] | None = None
        self.checksums = b""
        self.slots = b""
        self.outcomes = b""

    @property
    def granted(self) -> list[int]:
        """Which of the keys, by place, have a slot."""
        return [at for at, outcome in enumerate(self.outcomes) if outcome == wire.GRANTED]

    @property
    def refused(self) -> dict[Key, str]:
        """Why each of the other keys has none: present, in_progress, leaving, no_room."""
        return {
            key: wire.OUTCOMES[outcome]
            for key, outcome in zip(self._keys, self.outcomes, strict=False)
            if outcome != wire.GRANTED
        }

    def commit(self, count: int) -> None:
        """The next `count` granted blocks are written: others may read them from now on."""
        if not 0 <= count <= len(self) - self._committed:
            raise ValueError(
                f"{count} of {len(self) - self._committed} blocks that are not committed"
            )
        if not count:
            return
        if self._buffers is not None and self._written() < count:
            raise ValueError(
                f"block {self._written()} of these {count} was handed out and never written"
            )
        at, sums = self._committed, self.checksums
        digests = sums[at * wire.DIGEST_BYTES : (at + count) * wire.DIGEST_BYTES]
        request = wire.Commit(self._space._new_id(), self._lease, at, count, digests)
        self._space._ask(request, wire.Done)
        self._committed += count

    def _slot_views(self) -> dict[Key, memoryview]:
        if self._buffers is None:
            nbytes = self._space._block_bytes[self._group]
            buffers = views(self._space._client._arena.extents, self.slots, nbytes, True)
            for buffer in buffers[self._committed :]:
                # Tells a slot that was never written, and still holds what was evicted from it.
                buffer[:MARK_BYTES] = self._mark[: len(buffer)]
            keys = [self._keys[at] for at in self.granted]
            self._buffers = dict(zip(keys, buffers, strict=True))
        return self._buffers

    def _written(self) -> int:
        """How many leading blocks after the committed ones have been written to."""
        count = 0
        for buffer in list((self._buffers or {}).values())[self._committed :]:
            if buffer[:MARK_BYTES] == self._mark[: len(buffer)]:
                break
            count += 1
        return count

    def __getitem__(self, key: Key) -> memoryview:
        return self._slot_views()[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._slot_views())

    def __len__(self) -> int:
        return len(self.slots) // wire.SLOT_BYTES

    def __enter__(self) -> Saving:
        keys, space = self._keys, self._space
        request = wire.Reserve(
            space._new_id(), space.index, self._group, self._shard, keys.parent, keys.packed
        )
        space._client._begin_writing()
        try:
            reserved = space._ask(request, wire.Reserved)
        except BaseException:
            space._client._end_writing()
            raise
        if len(reserved.outcomes) != len(keys.packed) // KEY_BYTES:
            raise ProtocolError("a reserve was answered for another number of keys")
        self._lease, self.slots, self.outcomes = reserved.lease, reserved.slots, reserved.outcomes
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._buffers is not None:
                self.commit(self._written())
            if self._buffers:
                release_views(list(self._buffers.values()))
            if self._committed < len(self):
                # What went wrong first is what the caller wants to hear.
                hushed = () if kind is None else (KvtierError,)
                with contextlib.suppress(*hushed):
                    self._space._ask(wire.Abort(self._space._new_id(), self._lease), wire.Done)
        finally:
            self._space._client._end_writing()


class Saved(Sequence[Key]):
    """The keys that are in the cache after a save: `stored` by it, or `present` before; and the `refused`."""

    def __init__(self, keys: Keys, outcomes: bytes) -> None:
        self._keys = keys
        self._outcomes = outcomes
        self.stored = outcomes.count(wire.GRANTED)
        self.present = outcomes.count(wire.PRESENT)

    @cached_property
    def _kept(self) -> Sequence[Key]:
        if len(self) == len(self._keys):
            return self._keys
        kept = (wire.GRANTED, wire.PRESENT)
        return [key for key, outcome in self._pairs() if outcome in kept]

    @property
    def refused(self) -> dict[Key, str]:
        """Why each of the others is not kept: in_progress, leaving, no_room."""
        kept = (wire.GRANTED, wire.PRESENT)
        return {
            key: wire.OUTCOMES[outcome] for key, outcome in self._pairs() if outcome not in kept
        }

    def _pairs(self) -> Iterator[tuple[Key, int]]:
        return zip(self._keys, self._outcomes, strict=True)

    def __len__(self) -> int:
        return self.stored + self.present

    def __getitem__(self, index: Any) -> Any:
        return self._kept[index]

    def __repr__(self) -> str:
        refused = len(self._keys) - len(self)
        return f"<{self.stored} blocks stored, {self.present} present, {refused} refused>"


def _connected(path: str, timeout_s: float, clock: Clock) -> sockets.socket:
    sock = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    deadline = clock() + timeout_s
    try:
        sock.settimeout(timeout_s)
        while True:
            try:
                sock.connect(path)
                return sock
            except BlockingIOError:
                # The daemon lives, but more are waiting to be let in than its backlog holds.
                if clock() >= deadline:
                    raise
                time.sleep(CONNECT_PAUSE_S)
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        raise Unavailable(f"no daemon at {path}: {reason}; is `kvtier serve` running?") from error


def default_socket() -> str:
    """Where a daemon is looked for when nobody says where."""
    if named := os.environ.get("KVTIER_SOCKET"):
        return named
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    own = f"{runtime}/kvtier/kvtier.sock"
    return own if runtime.startswith("/") and os.access(own, os.F_OK) else DEFAULT_SOCKET


def _copy_threads(nbytes: int) -> int:
    """How many threads copy so much, unless the caller says."""
    if nbytes < LARGE_COPY_BYTES:
        return 1
    return min(COPY_THREADS, len(os.sched_getaffinity(0)))


def _check_sources(arrays: Any, total: int, nbytes: int) -> None:
    """One array a key, or one buffer of just their size; the copy checks each array's own."""
    if isinstance(arrays, (list, tuple)):
        if len(arrays) != total:
            raise ValueError(f"{len(arrays)} arrays for {total} keys")
        sizes = {memory.nbytes for memory in arrays if isinstance(memory, memoryview)}
        sizes |= {len(memory) for memory in arrays if isinstance(memory, (bytes, bytearray))}
        if sizes - {nbytes}:
            raise ValueError(f"arrays of {min(sizes - {nbytes})} bytes: a block has {nbytes}")
    elif isinstance(arrays, (bytes, bytearray)) and len(arrays) != total * nbytes:
        raise ValueError(f"{len(arrays)} bytes for {total} blocks of {nbytes}")


def _chosen(arrays: Any, saving: Saving, total: int, nbytes: int) -> Any:
    """The sources of the granted keys, out of a buffer per key or one for all."""
    if len(saving) == total:
        return arrays
    if isinstance(arrays, (list, tuple)):
        return [arrays[at] for at in saving.granted]
    flat = memoryview(arrays).cast("B")
    if flat.nbytes != total * nbytes:
        raise ValueError(f"{flat.nbytes} bytes for {total} blocks of {nbytes}")
    return [flat[at * nbytes : (at + 1) * nbytes] for at in saving.granted]


def _between(targets: Any, first: int, end: int, nbytes: int) -> Any:
    """The targets of blocks [first, end), out of a buffer per block or one for all."""
    if isinstance(targets, (list, tuple)):
        if len(targets) < end:
            raise ValueError(f"{len(targets)} targets for {end} ready blocks")
        return targets[first:end]
    flat = memoryview(targets).cast("B")
    if flat.nbytes < end * nbytes:
        raise ValueError(f"{flat.nbytes} bytes of target for {end} blocks of {nbytes}")
    return flat[first * nbytes : end * nbytes]
