"""The clients: each has a process and one connection, and does what the plan says. It checks each answer."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import struct
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtier import wire
from kvtier_kernels import Mapping, xxh3_128

from .direct import DirectFiles, DirectRead
from .machine import DEVICE_S, PAGE, Machine, Process
from .oracle import NEVER, OTHER_BITS, UNIT, Oracle, Pin, User, Value, content
from .plan import ALL_KEYS, DEPTH, KEYS, SPECS, TENANTS, block_bytes, places
from .virtual import CLOCK

if TYPE_CHECKING:
    from .daemon import Daemon

ANSWER_S = 45.0  # in which each request must be answered
RECEIVE_BYTES = 1 << 16
RIGHTS_BYTES = socket.CMSG_LEN(8 * array("i").itemsize)  # of descriptors
GENERATION = struct.Struct("<Q")
# Failures that a client may get, by the code.
EXPECTED = {"disk_failed", "too_many"}
ASKS_MOST = 8
ROOM_TRIES, ROOM_PAUSE_S = 3, 0.03  # of saves that wait for writes to disk
FIRST_READER = 3001  # users that may only read


@dataclass(slots=True)
class Slot:
    """A slot as the client knows it: where, which generation, and who uses it."""

    extent: int
    offset: int
    generation: int
    nbytes: int
    user: int = 0

    @property
    def pages(self) -> range:
        return range(self.offset // PAGE, -(-(self.offset + self.nbytes) // PAGE))


@dataclass(slots=True, eq=False)
class Writing:
    """A save in progress."""

    home: Link  # where its slots are mapped
    lease: int
    values: list[Value]
    slots: list[Slot]
    is_open: list[bool]  # not committed or aborted
    nbytes: int
    expires_at: float
    is_lost: bool = False  # a later connection did not get all of its slots

    def stop(self, at: int | None = None) -> None:
        """No thread writes to this slot from now on, or to any."""
        for one in range(len(self.slots)) if at is None else (at,):
            if self.is_open[one]:
                self.is_open[one] = False
                self.home.end_use([self.slots[one]])

    def regainable(self) -> list[int]:
        """The blocks that the next connection may ask for: those whose commit was not answered."""
        return [
            at
            for at, value in enumerate(self.values)
            if self.is_open[at] or (value.commit_sent and value.committed_at == NEVER)
        ]


@dataclass(slots=True, eq=False)
class Reading:
    """A lease, and what its slots must contain."""

    lease: int
    until: float
    slots: list[tuple[Slot, bytes]]
    space: int
    keys: list[bytes]
    asked_at: float  # by the first holder
    first: int  # block that the first holder asked for
    request: int = 0
    token: bytes = b""


@dataclass(slots=True)
class Asked:
    message: wire.Message
    at: float
    then: Callable[[Any], None]


class Link:
    """One connection to a daemon."""

    def __init__(
        self, client: Client, daemon: Daemon, read_only: bool, before: Link | None
    ) -> None:
        self.client = client
        self.machine = client.machine
        self.oracle = client.oracle
        self.daemon = daemon
        self.read_only = read_only
        self.sock = daemon.connect(client.process)
        self.fd = self.sock.fileno()
        self.is_open = True
        self.ends = ""  # why it is about to end
        # A connection that continues another one has its token, also before the daemon says so.
        self.token = before.token if before is not None else b""
        self.before = before
        # Saves of connections before this one, to whose slots the process may still write.
        self.unclaimed: list[Writing] = []
        self.asked: dict[int, Asked] = {}
        self.spaces: dict[int, int] = {}
        self.identities: dict[int, bytes] = {}
        self.direct = DirectFiles(self)
        self.cancelled: set[int] = set()
        self.resident: list[tuple[int, int, list[bytes]]] = []  # space, group, keys
        # By their number, with the inode of the memory. Retired extents are not announced.
        self.extents: dict[int, tuple[Mapping, Mapping, int]] = {}
        self.writing: list[Writing] = []
        self.reading: list[Reading] = []
        self.stalled_until = 0.0
        self._framer = wire.Framer()
        self._fds: deque[int] = deque()
        self._unsent = b""
        self._last_id = 0
        self.machine.client_readers[self.fd] = self.receive
        self.machine.watch(self.fd)
        if before is not None:
            client.lost_links.remove(before)
            self.unclaimed = [*before.unclaimed, *before.writing]
        ended = client.ended_tokens()
        client.disowned(ended)
        tokens, resumes = [token for token, _ in ended], self.token
        self._stolen = client.stolen_token()
        if self._stolen:
            # That of another tenant ends nothing, and that of another process gives no slots.
            if self._stolen[1].tenant != client.tenant:
                tokens.append(self._stolen[0])
            resumes = resumes or self._stolen[0]
        hello = wire.Hello(
            0, wire.SCHEMA, client.name, read_only, tokens, "engine", resumes=resumes,
            device=client.process.device,
        )  # fmt: skip
        self.ask(hello, self._welcomed)

    def _welcomed(self, reply: wire.Welcome) -> None:
        is_known, self.token = reply.token == self.token, reply.token
        if self._stolen and reply.token == self._stolen[0]:
            self.machine.violate(f"{self.client.name} continues a session of another process")
        if self.before is not None:
            Resumption(self, self.before, is_known).begin()

    # --- messages ----------------------------------------------------------------------------

    def ask(self, message: wire.Message, then: Callable[[Any], None]) -> None:
        if not self.is_open:
            return
        self._last_id += 1
        message.id = self._last_id
        self.asked[message.id] = Asked(message, CLOCK.now, then)
        self.tell(message)

    def tell(self, message: wire.Message) -> None:
        frame = wire.encode(message)
        self.machine.trace(self.client.name, "asks", frame)
        self._unsent += frame
        self._send()

    def _send(self) -> None:
        if not self.is_open or not self._unsent:
            return
        self.machine.may_be_ready = True
        try:
            sent = self.sock.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # the daemon has closed it; `receive` sees that
            self._unsent = b""
            return
        self._unsent = self._unsent[sent:]
        if self._unsent:
            self.machine.after(0.001, self._send)

    def receive(self) -> None:
        if CLOCK.now < self.stalled_until:
            self._pause()
            return
        try:
            data, rights, _, _ = self.sock.recvmsg(RECEIVE_BYTES, RIGHTS_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data, rights = b"", []
        for _, _, fds in rights:
            self._fds.extend(array("i", fds))
        if not data:
            self._lost()
            return
        for body in self._framer.feed(data):
            self._received(wire.decode_reply(body))
            if not self.is_open:
                return

    def _pause(self) -> None:
        """Stop reading until the stall is over."""
        del self.machine.client_readers[self.fd]
        self.machine.watch(self.fd)
        self.machine.after(self.stalled_until - CLOCK.now, self._resume)

    def _resume(self) -> None:
        if self.is_open:
            self.machine.client_readers[self.fd] = self.receive
            self.machine.watch(self.fd)

    def _received(self, reply: Any) -> None:
        what = type(reply).__name__ if isinstance(reply, wire.Report | wire.Events) else reply
        self.machine.trace(self.client.name, "gets", what)
        if isinstance(reply, wire.ExtentAdded):
            extent_fd, table_fd = self._fds.popleft(), self._fds.popleft()
            self.extents[reply.index] = self.client.map(
                extent_fd,
                table_fd,
                reply.bytes,
                not self.read_only and self.client.uid < FIRST_READER,
            )
            return
        if isinstance(reply, wire.DirectReadFile):
            self.direct.add(reply, self._fds.popleft())
            return
        if isinstance(reply, wire.GoingDown):
            self.ends = "the daemon stops"
            return
        if isinstance(reply, wire.Failed):
            self._failed(reply)
            return
        asked = self.asked.pop(reply.id, None)
        if asked is None:
            self.machine.violate(f"{self.client.name}: an answer to no request: {reply}")
        asked.then(reply)

    def _failed(self, reply: wire.Failed) -> None:
        asked = self.asked.pop(reply.id, None)
        if reply.fatal:
            self.ends = reply.code
        message = asked.message if asked is not None else None
        orders = isinstance(message, wire.Tier | wire.Settings)
        writes = self.read_only and reply.code == "read_only"
        # A space without users and blocks may be removed.
        if not (reply.code in EXPECTED or writes or (orders and reply.code == "bad_request")):
            self.machine.violate(
                f"{self.client.name}: {message} failed: {reply.code}: {reply.text}"
            )
        if asked is not None and (failed := getattr(asked.then, "failed", None)) is not None:
            failed(reply)

    # --- the end -----------------------------------------------------------------------------

    def _lost(self) -> None:
        """The daemon has closed the connection."""
        daemon_is_over = not self.daemon.is_serving
        stalled = CLOCK.now - self.stalled_until < 1.0
        if not (self.ends or daemon_is_over or stalled):
            self.machine.violate(f"{self.client.name} was disconnected without a reason")
        self.close("lost")

    def close(self, how: str) -> None:
        """Close the connection. Without a Bye, the process may still write to its slots."""
        if not self.is_open:
            return
        self.machine.trace(self.client.name, how)
        if how == "bye":
            self.tell(wire.Bye(0))
        self.is_open = False
        self.machine.client_readers.pop(self.fd, None)
        self.machine.watch(self.fd)
        self.machine.may_be_ready = True
        self.sock.close()
        self.machine.client_fds.discard(self.fd)
        for fd in self._fds:
            os.close(fd)
        self.direct.close()
        for reading in self.reading:
            self.end_use(slot for slot, _ in reading.slots)
        self.reading.clear()
        self.before = None
        if how == "bye":
            self.stop_writing()
        else:
            self.client.lost_links.append(self)
        self.client.link = None

    def stop_writing(self) -> None:
        """No thread writes to a slot of this connection, or of those that it continues, from now on."""
        for writing in (*self.writing, *self.unclaimed):
            writing.stop()
        self.writing.clear()
        self.unclaimed.clear()

    # --- slots -------------------------------------------------------------------------------

    def use(self, slot: Slot, until: float, writes: bool) -> None:
        new = User(slot.pages.start, slot.generation, writes, until)
        _, mapped, memory = self.extents[slot.extent]
        table, where = memoryview(mapped), f"extent {slot.extent} of tenant {self.client.tenant}"

        def generation_of(page: int) -> int:
            return int(GENERATION.unpack_from(table, page * GENERATION.size)[0])

        slot.user = self.oracle.use(memory, slot.pages, new, generation_of, where)

    def end_use(self, slots: Any) -> None:
        for slot in slots:
            self.oracle.end_use(self.extents[slot.extent][2], slot.pages, slot.user)

    def write(self, slot: Slot, data: bytes) -> None:
        memoryview(self.extents[slot.extent][0])[slot.offset : slot.offset + len(data)] = data

    def read(self, slot: Slot) -> tuple[bytes, bool]:
        """The bytes of a slot, and whether its generation was the same after they were read."""
        extent, table, _ = self.extents[slot.extent]
        data = bytes(memoryview(extent)[slot.offset : slot.offset + slot.nbytes])
        (now,) = GENERATION.unpack_from(memoryview(table), slot.offset // PAGE * GENERATION.size)
        return data, now == slot.generation

    def check_progress(self) -> None:
        for asked in self.asked.values():
            unbounded = isinstance(asked.message, wire.Watch | wire.Monitor | wire.Grow)
            if CLOCK.now - asked.at > ANSWER_S and not unbounded:
                self.machine.violate(
                    f"{self.client.name}: no answer after {CLOCK.now - asked.at:.1f} s: {asked.message}"
                )


class Resumption:
    """Gets the slots of a lost connection in the one that continues it. `is_known`: the daemon knows the
    session."""

    def __init__(self, link: Link, before: Link, is_known: bool) -> None:
        self._link = link
        self._before = before
        self._is_known = is_known
        self._chance = link.machine.chance
        self._waits_for = 0
        self._has_others = False  # slots that were not regained, to which threads still write

    def begin(self) -> None:
        """Ask for the slots of all saves that have not ended, also of those whose commit was not answered."""
        unclaimed = self._link.unclaimed[:]
        open_places = {
            value.place
            for writing in unclaimed
            if not writing.is_lost
            for value, is_open in zip(writing.values, writing.is_open, strict=True)
            if is_open
        }
        for writing in unclaimed:
            # Another save of the client may have slots for the keys of one that was lost, or committed.
            some = [
                at
                for at in writing.regainable()
                if not writing.is_lost
                and (writing.is_open[at] or writing.values[at].place not in open_places)
            ]
            if some and self._chance.random() < 0.95:
                self._waits_for += 1
                space = writing.values[0].place[1]
                self._link.client._open(
                    self._link, space, lambda writing=writing, some=some: self._ask(writing, some)
                )
            elif self._chance.random() < 0.9:
                writing.stop()
            else:
                self._has_others |= any(writing.is_open)
                # Another daemon may give slots for these keys to a later save.
                writing.is_lost |= writing.home.daemon is not self._link.daemon
        self._ended()

    def _ask(self, writing: Writing, some: list[int]) -> None:
        _, space, group, shard, _ = writing.values[0].place
        keys = b"".join(writing.values[at].place[4] for at in some)
        left_ms = 0
        if writing.expires_at < NEVER:
            left_ms = max(1, int((writing.expires_at - CLOCK.now) * 1000))
        regain = wire.Regain(0, self._link.spaces[space], group, shard, keys, left_ms)
        asked_at = CLOCK.now
        self._link.ask(
            regain, lambda reply: self._regained(writing, some, left_ms, asked_at, reply)
        )

    def _regained(
        self, writing: Writing, some: list[int], left_ms: int, asked_at: float, reply: wire.Reserved
    ) -> None:  # fmt: skip
        link, machine = self._link, self._link.machine
        slots = [
            Slot(extent, offset, generation, writing.nbytes)
            for extent, _, offset, generation in wire.SLOT.iter_unpack(reply.slots)
        ]
        granted = [
            at for at, code in zip(some, reply.outcomes, strict=True) if code == wire.GRANTED
        ]
        if len(slots) != len(granted) or bool(slots) != bool(reply.lease):
            machine.violate(f"{len(slots)} regained slots for {len(granted)} blocks: {reply}")
        for at, code in zip(some, reply.outcomes, strict=True):
            self._check_outcome(writing, at, code, asked_at)
        for at, slot in zip(granted, slots, strict=True):
            before = writing.slots[at]
            was = writing.home.extents[before.extent][2], before.offset, before.generation
            if (link.extents[slot.extent][2], slot.offset, slot.generation) != was:
                machine.violate(f"the slot {before} was regained as {slot}")
            writing.stop(at)
            link.use(slot, 0.0, writes=True)
        if granted:
            machine.count("regained", len(granted))
            values = [writing.values[at] for at in granted]
            for value in values:
                value.run = link.daemon.number
            again = Writing(
                link, reply.lease, values, slots, [True] * len(slots), writing.nbytes,
                writing.expires_at,
            )  # fmt: skip
            link.writing.append(again)
            link.client._copy(link, again, self._chance_of_save(), asked_at, left_ms)
        writing.is_lost = any(writing.is_open)
        if self._chance.random() < 0.7:
            writing.stop()
        self._has_others |= any(writing.is_open)
        self._waits_for -= 1
        self._ended()

    def _chance_of_save(self) -> random.Random:
        return random.Random(self._chance.getrandbits(32))

    def _check_outcome(self, writing: Writing, at: int, code: int, asked_at: float) -> None:
        machine, value, run = self._link.machine, writing.values[at], self._link.daemon.number
        if code == wire.PRESENT:
            if not self._link.oracle.may_be_present(value.place, asked_at, run):
                machine.violate(f"a block that nobody may load is present: {value.place}")
        elif code != wire.GRANTED and code != wire.NO_ROOM:
            machine.violate(f"a regained slot has outcome {code}")
        # A reload may retire the memory.
        is_kept = writing.home.daemon is self._link.daemon or machine.config.keep_s
        must = writing.is_open[at] and self._is_known and is_kept and not machine.counts["reload"]
        if must and code != wire.GRANTED:
            machine.violate(f"a slot that {self._link.client.name} writes to was not regained")

    def _ended(self) -> None:
        """After the last answer, give the other slots back if no thread writes to them."""
        if self._waits_for or self._link.before is None:
            return
        self._link.before = None
        if not self._has_others:
            self._link.unclaimed.clear()
            self._link.ask(wire.Abort(0, 0), lambda _: None)


@dataclass(eq=False)
class Client:
    machine: Machine
    oracle: Oracle
    name: str
    tenant: int
    uid: int
    daemon_of: Callable[[], Daemon | None]
    process: Process = field(init=False)
    link: Link | None = None
    # Lost connections: the process may still write to their slots.
    lost_links: list[Link] = field(default_factory=list)
    requests: int = 0

    def __post_init__(self) -> None:
        self.new_process()

    def new_process(self) -> None:
        machine = self.machine
        pid = 5000 + len(machine.processes)
        self.process = Process(pid, self.uid, device=pid % 3 == 0)
        machine.processes[self.process.pid] = self.process

    def connected(self, read_only: bool = False) -> Link | None:
        """The connection; a new one if there is none. None while no daemon serves."""
        if self.link is not None:
            return self.link
        daemon = self.daemon_of()
        if daemon is None or not daemon.is_serving:
            return None
        self.link = Link(self, daemon, read_only, self._to_resume(read_only))
        self.machine.client_fds.add(self.link.fd)
        return self.link

    def stolen_token(self) -> tuple[bytes, Client] | None:
        """Sometimes, the token of a session of another client."""
        machine = self.machine
        if self.tenant < 0 or machine.chance.random() < 0.6:
            return None
        found = [
            (link.token, other)
            for other in machine.clients
            if other is not self
            for link in (other.link, *other.lost_links)
            if link is not None and link.token
        ]
        return machine.chance.choice(found) if found else None

    def _to_resume(self, read_only: bool) -> Link | None:
        """The lost connection that the next one continues."""
        lost = [link for link in self.lost_links if link.token and not link.read_only]
        machine = self.machine
        if (
            read_only
            or self.tenant < 0
            or not lost
            or machine.chance.random() >= machine.config.resumes
        ):
            return None
        return machine.chance.choice(lost)

    def map(
        self, extent_fd: int, table_fd: int, nbytes: int, writable: bool
    ) -> tuple[Mapping, Mapping, int]:
        for fd, is_writable in ((extent_fd, writable), (table_fd, False)):
            if (
                fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
                != (os.O_RDONLY, os.O_RDWR)[is_writable]
            ):
                self.machine.violate(f"{self.name} got a descriptor with the wrong access")
        try:
            table_bytes, memory = os.fstat(table_fd).st_size, os.fstat(extent_fd).st_ino
            extent, table = (
                Mapping(extent_fd, nbytes, writable),
                Mapping(table_fd, table_bytes, False),
            )
            return extent, table, memory
        finally:
            os.close(extent_fd)
            os.close(table_fd)

    def ended_tokens(self) -> list[tuple[bytes, Link]]:
        """The lost connections whose slots no thread of this process writes to from now on."""
        return [(link.token, link) for link in self.lost_links if link.token]

    def disowned(self, ended: list[tuple[bytes, Link]]) -> None:
        for _, link in ended:
            link.stop_writing()
            self.lost_links.remove(link)

    def die(self) -> None:
        """The process ends, and its sockets close: it writes no longer, but its device may."""
        self.machine.trace(self.name, "dies")
        self.process.end()
        if self.link is not None:
            self.link.close("dies")
        links, self.lost_links = self.lost_links, []

        def stop() -> None:
            for link in links:
                link.stop_writing()

        if self.process.device:
            self.machine.after(DEVICE_S, stop)
        else:
            stop()
        self.new_process()

    # --- operations --------------------------------------------------------------------------

    def act(self, kind: str, chance: random.Random) -> None:
        if kind == "die":
            self.die()
            return
        if kind in ("bye", "drop"):
            if self.link is not None:
                self.link.close(kind)
            return
        if kind == "read_only":
            self._read_only(chance)
            return
        link = self.connected()
        if link is None:
            return
        space = chance.choice(self.machine.config.spaces)
        if space not in link.spaces and kind not in ("stall", "stats", "explain", "grow"):
            self._open(link, space, lambda: self._do(link, kind, space, chance))
        else:
            self._do(link, kind, space, chance)

    def _read_only(self, chance: random.Random) -> None:
        """Connect with an option, or as another user: both get memory that they can only read."""
        if chance.random() < 0.5:
            self.connected(read_only=True)
            return
        name, uid = f"reader of {self.name}", FIRST_READER + self.tenant
        reader = Client(self.machine, self.oracle, name, self.tenant, uid, self.daemon_of)
        if reader.connected() is not None:
            self.machine.after(0.05, reader.die)

    def _open(self, link: Link, space: int, then: Callable[[], None]) -> None:
        def opened(reply: wire.Opened) -> None:
            link.spaces[space], link.identities[space] = reply.space, reply.identity
            then()

        link.ask(wire.Open(0, SPECS[space]), opened)

    def _do(self, link: Link, kind: str, space: int, chance: random.Random) -> None:
        if link.is_open:
            getattr(self, f"_{kind}")(link, space, chance)

    def _prefix(self, space: int, chance: random.Random) -> list[bytes]:
        chain = KEYS[space][chance.randrange(self.machine.config.chains)]
        return chain[: chance.choice((1, 2, 3, DEPTH, DEPTH, DEPTH))]

    # Saves.

    def _save(self, link: Link, space: int, chance: random.Random) -> None:
        chain = KEYS[space][chance.randrange(self.machine.config.chains)]
        first = chance.choice((0, 0, 0, 1, 3))
        keys = chain[first : first + chance.choice((1, 2, 3, DEPTH))]
        ttl_ms = chance.choice((500, 3000)) if chance.random() < 0.08 else 0
        parent = chain[first - 1] if first else b""
        for group, shard in places(space):
            if chance.random() < 0.95:
                self._reserve(link, space, group, shard, parent, keys, ttl_ms, chance)

    def _reserve(
        self, link: Link, space: int, group: int, shard: int, parent: bytes, keys: list[bytes],
        ttl_ms: int, chance: random.Random, tries: int = ROOM_TRIES,
    ) -> None:  # fmt: skip
        if not link.is_open:
            return
        asked_at = CLOCK.now
        nbytes = block_bytes(space, group)

        def reserved(reply: wire.Reserved) -> None:
            machine = self.machine
            if wire.WRITING in reply.outcomes:
                if not tries or reply.lease:
                    machine.violate(
                        f"{tries} tries are left, and a save gets lease {reply.lease} and waits"
                    )
                machine.count("saves that wait", 1)
                again = (link, space, group, shard, parent, keys, ttl_ms, chance, tries - 1)
                machine.after(ROOM_PAUSE_S, lambda: self._reserve(*again))
                return
            if len(reply.outcomes) != len(keys):
                machine.violate(f"{len(reply.outcomes)} outcomes for {len(keys)} keys")
            granted = [
                key for key, code in zip(keys, reply.outcomes, strict=True) if code == wire.GRANTED
            ]
            for key, code in zip(keys, reply.outcomes, strict=True):
                place = (self.tenant, space, group, shard, key)
                run = link.daemon.number
                if code == wire.PRESENT and not self.oracle.may_be_present(place, asked_at, run):
                    machine.violate(f"a block that nobody may load is present: {place}")
            slots = [
                Slot(extent, offset, generation, nbytes)
                for extent, _, offset, generation in wire.SLOT.iter_unpack(reply.slots)
            ]
            if len(slots) != len(granted) or bool(slots) != bool(reply.lease):
                machine.violate(
                    f"{len(slots)} slots and lease {reply.lease} for {len(granted)} keys"
                )
            if not slots:
                return
            values = []
            for key, slot in zip(granted, slots, strict=True):
                link.use(slot, 0.0, writes=True)
                value = self.oracle.new_value(
                    (self.tenant, space, group, shard, key), link.daemon.number
                )
                if ttl_ms:
                    value.is_kept_only_in_memory = True
                    self.oracle.expiring.add(self.tenant)
                values.append(value)
            expires_at = CLOCK.now + ttl_ms / 1000 if ttl_ms else NEVER
            writing = Writing(
                link, reply.lease, values, slots, [True] * len(slots), nbytes, expires_at
            )
            link.writing.append(writing)
            self._copy(link, writing, chance, asked_at, ttl_ms)

        link.ask(
            wire.Reserve(
                0, link.spaces[space], group, shard, parent, b"".join(keys), ttl_ms, bool(tries)
            ),
            reserved,
        )

    def _copy(
        self, link: Link, writing: Writing, chance: random.Random, asked_at: float, ttl_ms: int
    ) -> None:
        """Write the blocks, in two steps, and then commit or abort them, or leave them open."""
        machine = self.machine
        process = self.process

        def half() -> None:
            if not process.writes:
                return
            for value, slot, is_open in zip(
                writing.values, writing.slots, writing.is_open, strict=True
            ):
                if is_open:
                    link.write(slot, content(value.number, slot.nbytes)[: slot.nbytes // 2])

        def whole() -> None:
            if not process.writes:
                return
            for value, slot, is_open in zip(
                writing.values, writing.slots, writing.is_open, strict=True
            ):
                if is_open:
                    link.write(slot, content(value.number, slot.nbytes))

        def end() -> None:
            if not link.is_open or not any(writing.is_open):
                return
            fate = chance.random()
            if fate < 0.08:
                return  # the slots stay in writing until the connection or the process ends
            if fate < 0.16:
                self._end_writing(link, writing)
                link.ask(wire.Abort(0, writing.lease), lambda _: None)
                return
            count = len(writing.slots)
            cut = chance.randrange(1, count) if count > 1 and chance.random() < 0.3 else count
            self._commit(link, writing, 0, cut, chance, asked_at, ttl_ms)
            if cut < count:
                if chance.random() < 0.7:
                    self._commit(link, writing, cut, count - cut, chance, asked_at, ttl_ms)
                else:
                    self._end_writing(link, writing)
                    link.ask(wire.Abort(0, writing.lease), lambda _: None)

        slow = chance.choice((0.0, 0.001, 0.02, 0.3))
        if slow:
            machine.after(slow * chance.random(), half)
        machine.after(slow, whole)
        machine.after(slow, end)

    def _end_writing(self, link: Link, writing: Writing) -> None:
        writing.stop()
        if writing in link.writing:
            link.writing.remove(writing)

    def _commit(
        self, link: Link, writing: Writing, first: int, count: int, chance: random.Random,
        asked_at: float, ttl_ms: int,
    ) -> None:  # fmt: skip
        some = range(first, first + count)
        checksums = b""
        if chance.random() < 0.8:
            checksums = b"".join(
                xxh3_128(content(writing.values[at].number, writing.nbytes)) for at in some
            )
        values = [writing.values[at] for at in some]
        link.end_use(writing.slots[at] for at in some)
        for at in some:
            writing.is_open[at] = False
        if not any(writing.is_open) and writing in link.writing:
            link.writing.remove(writing)
        reserved_before = CLOCK.now
        for value in values:
            value.commit_sent = True
            if ttl_ms:
                value.expires_at = reserved_before + ttl_ms / 1000

        def committed(_: wire.Done) -> None:
            for value in values:
                value.committed_at = CLOCK.now
            link.client.machine.count("commits", len(values))

        link.ask(wire.Commit(0, writing.lease, first, count, checksums), committed)

    # Loads.

    def _load(self, link: Link, space: int, chance: random.Random) -> None:
        keys = self._prefix(space, chance)
        self.requests += 1
        request = self.requests if chance.random() < 0.7 else 0
        first = chance.randrange(len(keys)) if chance.random() < 0.1 else 0
        deadline_ms = chance.choice((50, 2000, 30_000, 30_000))
        shards = list(range(SPECS[space].cache_groups[0].shards))
        if chance.random() < 0.1:
            shards = shards[:1]
        self._ask_load(link, space, keys, request, first, deadline_ms, shards, chance, 0, None)

    def _ask_load(
        self, link: Link, space: int, keys: list[bytes], request: int, first: int, deadline_ms: int,
        shards: list[int], chance: random.Random, times: int, earlier: Reading | None,
    ) -> None:  # fmt: skip
        asked_at = CLOCK.now

        def loaded(reply: wire.Loaded) -> None:
            # A load that is cancelled while it waits finds nothing.
            how = "cancelled" if request in link.cancelled and not reply.lease else "load"
            reading = self._loaded(
                link, space, keys, first, deadline_ms, shards, asked_at, reply, how
            )
            if request and not reply.coming:
                link.daemon.check_answered(self.tenant, link.token, request)
            if reading is not None:
                reading.request = request
            if earlier is not None:
                self._release_reading(link, earlier, chance)
            if reply.coming and request and times < ASKS_MOST and chance.random() < 0.95:
                delay = chance.choice((0.0, 0.001, reply.eta_ms / 1000))
                args = (
                    link,
                    space,
                    keys,
                    request,
                    first,
                    deadline_ms,
                    shards,
                    chance,
                    times + 1,
                    reading,
                )
                self.machine.after(min(delay, 1.0), self._ask_load, *args)
                return
            if request and reply.coming and chance.random() < 0.5:
                link.ask(wire.Cancel(0, request), lambda _: None)
            if reading is not None:
                hold = chance.choice((0.0, 0.002, 0.1, 1.0))
                self.machine.after(hold, self._release_reading, link, reading, chance)

        if not link.is_open:
            return
        wait_ms = chance.choice((0, 5, 500)) if times else 0
        link.ask(
            wire.Load(
                0, link.spaces[space], b"".join(keys), deadline_ms, shards, request,
                chance.choice((0, 0, 10, 1000)), 0, wait_ms, first, chance.random() < 0.95,
                awaits=chance.random() < 0.3,
            ),
            loaded,
        )  # fmt: skip

    def _loaded(
        self, link: Link, space: int, keys: list[bytes], first: int, deadline_ms: int, shards: list[int],
        asked_at: float, reply: wire.Loaded, how: str,
    ) -> Reading | None:  # fmt: skip
        """Read what was loaded, and check it."""
        machine = self.machine
        if reply.ready + reply.coming > len(keys):
            machine.violate(f"{reply.ready} blocks ready and {reply.coming} coming of {len(keys)}")
        if not first and how == "load":
            self.oracle.check_found(self.tenant, space, keys, asked_at, reply.ready)
        if not reply.lease:
            if reply.parts:
                machine.violate("slots without a lease")
            return None
        # The answer of a daemon that has ended may arrive late, and its lease has ended with it.
        until = asked_at + deadline_ms / 1000 if link.daemon.is_up else 0.0
        reading = Reading(
            reply.lease, until, [], space, keys[: reply.ready], asked_at, first, 0, reply.token
        )
        link.reading.append(reading)
        self._check_parts(space, reply, first, shards)
        for part in reply.parts:
            nbytes = block_bytes(space, part.group)
            for at, fields in enumerate(wire.SLOT.iter_unpack(part.slots)):
                extent, _, offset, generation = fields
                slot = Slot(extent, offset, generation, nbytes)
                if until > CLOCK.now:
                    link.use(slot, until, writes=False)
                data, is_same = link.read(slot)
                if not is_same:
                    if until > CLOCK.now and link.daemon.is_serving:
                        machine.violate(f"a slot under a lease has another generation: {slot}")
                    continue
                place = (self.tenant, space, part.group, part.shard, keys[part.first + at])
                self.oracle.check_block(data, place, asked_at, link.daemon.number, how)
                reading.slots.append((slot, data))
        return reading

    def _check_parts(self, space: int, reply: wire.Loaded, first: int, shards: list[int]) -> None:
        """The answer has all blocks that restore the ready prefix."""
        spec = SPECS[space]
        for group, shard in places(space):
            needed = spec.cache_groups[group].needed_blocks(spec.block_tokens, reply.ready)
            wanted = {at for at in needed if at >= first} if shard in shards else set()
            got = {
                part.first + at
                for part in reply.parts
                if (part.group, part.shard) == (group, shard)
                for at in range(len(part.slots) // wire.SLOT_BYTES)
            }
            if got != wanted and not (first and got <= set(needed) | wanted):
                self.machine.violate(
                    f"group {group} shard {shard}: blocks {sorted(got)} for a prefix of {reply.ready}, "
                    f"expected {sorted(wanted)}"
                )

    def _release_reading(self, link: Link, reading: Reading, chance: random.Random) -> None:
        """Read again what the lease has kept, and end it."""
        if not link.is_open or reading not in link.reading:
            return
        if CLOCK.now < reading.until and link.daemon.is_serving:
            for slot, before in reading.slots:
                data, is_same = link.read(slot)
                if not is_same or data != before:
                    self.machine.violate(f"a block changed under a lease: {slot}")
        link.reading.remove(reading)
        link.end_use(slot for slot, _ in reading.slots)
        tokens = 16 * len(reading.keys)
        used = (tokens, 0, 4096 * len(reading.keys)) if chance.random() < 0.8 else (0, 0, 0)
        link.ask(wire.Release(0, reading.lease, *used), lambda _: None)

    def _release(self, link: Link, space: int, chance: random.Random) -> None:
        if link.reading:
            self._release_reading(link, link.reading[0], chance)

    def _recheck(self, link: Link, space: int, chance: random.Random) -> None:
        """Doubt blocks that are sound: none of them may be forgotten."""

        def checked(reply: wire.Counted) -> None:
            if reply.blocks:
                self.machine.violate(f"a recheck has forgotten {reply.blocks} sound blocks")

        if link.reading:
            link.ask(wire.Recheck(0, chance.choice(link.reading).lease), checked)

    def _cancel(self, link: Link, space: int, chance: random.Random) -> None:
        request = max(1, self.requests - chance.randrange(2))
        link.cancelled.add(request)
        link.ask(wire.Cancel(0, request), lambda _: None)

    def _match(self, link: Link, space: int, chance: random.Random) -> None:
        keys, asked_at = self._prefix(space, chance), CLOCK.now

        def matched(reply: wire.Matched) -> None:
            self.oracle.check_found(self.tenant, space, keys, asked_at, reply.ready)

        link.ask(wire.MatchPrefix(0, link.spaces[space], b"".join(keys)), matched)

    def _prefetch(self, link: Link, space: int, chance: random.Random) -> None:
        keys = self._prefix(space, chance)
        link.ask(wire.Prefetch(0, link.spaces[space], b"".join(keys)), lambda _: None)

    def _direct(self, link: Link, space: int, chance: random.Random) -> None:
        if self.machine.config.has_direct_reads:
            DirectRead(link, space, self._prefix(space, chance), chance).begin()

    def _resident(self, link: Link, space: int, chance: random.Random) -> None:
        """Report what an engine holds in its own cache, and what it has dropped. A wrong report harms no
        block."""
        how, held = chance.random(), link.resident
        if held and how > 0.4:
            space, group, keys = held.pop(chance.randrange(len(held)))
        else:
            group = chance.randrange(len(SPECS[space].cache_groups))
            keys = ALL_KEYS[space] if how < 0.2 else self._prefix(space, chance)
        packed, enters = b"".join(keys), how <= 0.4
        if enters:
            held.append((space, group, keys))
        resident = wire.Resident(
            0, link.spaces[space], group, packed if enters else b"", b"" if enters else packed,
            how > 0.98,
        )  # fmt: skip
        link.ask(resident, lambda _: None)

    def _adopt(self, link: Link, space: int, chance: random.Random) -> None:
        """Take part in a lease of this client or of another one of its tenant."""
        known = [
            (other.link, reading)
            for other in self.machine.clients
            if other.tenant == self.tenant and other.link is not None
            for reading in other.link.reading
            if reading.token
        ]
        if not known:
            return
        owner, theirs = chance.choice(known)
        if theirs.until < CLOCK.now + 1.0 or owner.daemon is not link.daemon:
            return
        # It has the blocks of the load, also if they were forgotten since.
        asked_at = theirs.asked_at

        def adopted(reply: wire.Loaded) -> None:
            shards = list(range(SPECS[theirs.space].cache_groups[0].shards))
            left_ms = int((theirs.until - asked_at) * 1000)
            keys = theirs.keys
            reading = self._loaded(
                link, theirs.space, keys, theirs.first, left_ms, shards, asked_at, reply, "adopt"
            )
            if reading is not None:
                reading.token = b""
                self.machine.after(0.05, self._release_reading, link, reading, chance)

        def failed(reply: wire.Failed) -> None:
            pass

        shards = list(range(SPECS[theirs.space].cache_groups[0].shards))
        link.ask(wire.Adopt(0, theirs.token, shards), Then(adopted, failed))

    # Forgets.

    def _forget(self, link: Link, space: int, chance: random.Random) -> None:
        chain = KEYS[space][chance.randrange(self.machine.config.chains)]
        keys = chance.sample(chain, chance.choice((1, 1, 2, DEPTH)))
        values = self.oracle.committed_before(self.tenant, space, set(keys), CLOCK.now)

        def done(_: wire.Counted) -> None:
            self.oracle.forgotten(values)
            self.machine.count("forgets", 1)

        self._ask_unpinning(link, wire.Forget(0, link.spaces[space], b"".join(keys)), done)

    def _ask_unpinning(
        self, link: Link, message: wire.Message, done: Callable[[Any], None]
    ) -> None:
        """Send a request that may end pins."""
        if not link.is_open:
            return
        number = self.oracle.unpins(self.tenant)

        def answered(reply: Any) -> None:
            self.oracle.unpinned(self.tenant, number)
            done(reply)

        def failed(_: wire.Failed) -> None:
            self.oracle.unpinned(self.tenant, number)

        link.ask(message, Then(answered, failed))

    def _purge(self, link: Link, space: int, chance: random.Random) -> None:
        values = self.oracle.committed_before(self.tenant, space, None, CLOCK.now)

        def purged(reply: wire.Purged) -> None:
            if reply.next:
                more = wire.Purge(0, "", link.spaces[space], reply.next)
                self._ask_unpinning(link, more, purged)
                return
            self.oracle.forgotten(values)
            self.machine.count("purges", 1)
            link.ask(wire.Purge(0, "", -1, 0), erased)

        def erased(reply: wire.Purged) -> None:
            if reply.next:
                link.ask(wire.Purge(0, "", -1, reply.next), erased)
            elif link.daemon.is_up:
                self._check_erased({value.number for value in values})

        self._ask_unpinning(link, wire.Purge(0, "", link.spaces[space], 0), purged)

    def _check_erased(self, numbers: set[int]) -> None:
        """No segment file has bytes of these values, which were purged. Encoded blocks are not looked for."""
        name = TENANTS[self.tenant]
        for path in self.machine.folder.glob(f"*/segments/{name}/*"):
            data = path.read_bytes()
            for at in range(0, len(data), PAGE):
                number, other = UNIT.unpack_from(data, at)
                if number in numbers and other == number ^ OTHER_BITS:
                    self.machine.violate(
                        f"{path.name} has value {number} at page {at // PAGE} after its purge"
                    )
        self.machine.count("erased", 1)

    # Others.

    def _pin(self, link: Link, space: int, chance: random.Random) -> None:
        keys, asked_at = self._prefix(space, chance), CLOCK.now
        ttl_ms = chance.choice((100, 5000, 60_000))

        def pinned(reply: wire.Counted) -> None:
            self.oracle.unpinned(self.tenant, number)
            if reply.blocks:
                until = asked_at + ttl_ms / 1000
                pin = Pin(space, keys[: reply.blocks], CLOCK.now, until)
                self.oracle.pinned(self.tenant, number, pin)

        def failed(_: wire.Failed) -> None:
            self.oracle.unpinned(self.tenant, number)

        # It replaces pins of parts of this prefix, perhaps by shorter ones.
        number = self.oracle.unpins(self.tenant)
        link.ask(wire.Pin(0, link.spaces[space], b"".join(keys), ttl_ms), Then(pinned, failed))

    def _unpin(self, link: Link, space: int, chance: random.Random) -> None:
        keys = self._prefix(space, chance)
        unpin = wire.Unpin(0, link.spaces[space], b"".join(keys))
        self._ask_unpinning(link, unpin, lambda _: None)

    def _hint(self, link: Link, space: int, chance: random.Random) -> None:
        keys = self._prefix(space, chance)
        hint = wire.Hint(0, link.spaces[space], b"".join(keys), chance.choice((0.0, 0.5, 1.0)))
        link.ask(hint, lambda _: None)

    def _stall(self, link: Link, space: int, chance: random.Random) -> None:
        link.stalled_until = CLOCK.now + chance.choice((0.1, 2.0, 15.0))

    def _half(self, link: Link, space: int, chance: random.Random) -> None:
        """Send a request in parts."""
        frame = wire.encode(wire.Ping(0))
        link._unsent += frame[:3]
        link._send()

        def rest() -> None:
            if link.is_open:
                link._unsent += frame[3:]
                link._send()

        # Nothing may be sent in between.
        rest()

    def _list(self, link: Link, space: int, chance: random.Random) -> None:
        link.ask(wire.List(0, "", link.spaces[space], 0), lambda _: None)

    def _stats(self, link: Link, space: int, chance: random.Random) -> None:
        link.ask(wire.Stats(0), lambda _: None)

    def _explain(self, link: Link, space: int, chance: random.Random) -> None:
        link.ask(wire.Explain(0, 0, chance.choice(ALL_KEYS[space])), lambda _: None)

    def _grow(self, link: Link, space: int, chance: random.Random) -> None:
        if not any(isinstance(one.message, wire.Grow) for one in link.asked.values()):
            known = 1 + max(link.extents, default=-1)
            link.ask(wire.Grow(0, known, chance.choice((0, 100, 2000))), lambda _: None)

    def _watch(self, link: Link, space: int, chance: random.Random) -> None:
        if not any(isinstance(one.message, wire.Watch) for one in link.asked.values()):
            link.ask(wire.Watch(0, link.spaces[space]), lambda _: None)


class Then:
    """What to do with an answer, and with a failure."""

    def __init__(self, done: Callable[[Any], None], failed: Callable[[wire.Failed], None]) -> None:
        self._done = done
        self.failed = failed

    def __call__(self, reply: Any) -> None:
        self._done(reply)
