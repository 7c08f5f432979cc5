"""The messages between a client and the daemon, and how they are framed. No I/O.

    +----------------+---------------------------------------------+
    | length u32 LE  | body: msgpack array [tag, request id, ...]  |
    +----------------+---------------------------------------------+

The request's id comes back in its reply; 0 asks for no reply, and is the id of what the daemon sends by
itself. Block bytes never travel here: a slot is 24 bytes, extent u32, zero u32, offset u64, generation u64.
An `ExtentAdded` brings two file descriptors: the extent, then its table of generations (read-only).
"""

from __future__ import annotations

import hashlib
import inspect
import struct
from collections.abc import Iterator
from typing import Annotated

import msgspec

from kvtier.errors import ProtocolError
from kvtier.layout import Group, KvSpec

LIMIT_FRAME_BYTES = 4 << 20  # of a message that carries keys or checksums, and of every reply
LIMIT_REQUEST_BYTES = 64 << 10  # of any other request: larger than any description of a space
LIMIT_HELLO_BYTES = 16 << 10  # of what comes before a session is greeted
LIMIT_KEYS = 65_536
LIMIT_RESERVED = 16_384  # keys in one Reserve: some 2 ms where room has to be made for all of them
LIMIT_LOOKS = 1 << 20  # keys times places of one request: some 10 ms
LIMIT_USED = 1 << 50  # tokens or bytes that one Release may tell
LIMIT_TOLD_SLOTS = 160_000  # in one reply: what fits into a frame
LIMIT_SOCKET_PATH = 107  # bytes: sockaddr_un.sun_path less its zero byte
LIMIT_ENDED = 64  # tokens in one Hello
LIMIT_SHARDS_TOLD = 4096  # numbers in a Load or Adopt: more are refused before they are decoded
SLOT = struct.Struct("<IIQQ")  # extent, reserved, offset, generation
SLOT_BYTES = SLOT.size
DIGEST_BYTES = 16
CHANGE = struct.Struct("<BBHI32s")  # what, tier, group, shard, key
CAME, WENT = 0, 1
MEMORY, DISK = 0, 1
LIMIT_CHANGES = (
    512  # in one Changed: less than what a socket holds, so that nobody has to wait for a reader
)
TALLY = struct.Struct(
    "<IIIIQQ"
)  # space, blocks in memory, on disk, neither, bytes in memory, on disk
LISTED = struct.Struct(
    "<IIIIHBBBB2x32s"
)  # id, group, shard, payload bytes, leases, state, on disk, codec, rounds, key
LIMIT_LISTED = 4096  # in one Listed
LIMIT_EVENTS = 256  # in one Events
LENGTH = struct.Struct("<I")


def split(slots: bytes, parts: int, nbytes: int) -> list[bytes]:
    """Packed places within slots: of each slot so many, of so many bytes, one after the other."""
    return [
        SLOT.pack(extent, reserved, offset + at * nbytes, generation)
        for extent, reserved, offset, generation in SLOT.iter_unpack(slots)
        for at in range(parts)
    ]


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    id: int


# --- what a client asks -------------------------------------------------------------------------


class Hello(Message, tag=1):
    """First on every connection: both sides must speak the same schema.

    `ended`: tokens of earlier sessions whose client could not say goodbye, and now promises that nothing
    of them touches a slot any more. `engine`: a name that the processes of one engine share, and by which it
    is counted once; a client without one is an engine of its own.
    """

    schema: bytes
    client: str
    read_only: bool = False
    ended: list[bytes] = []
    engine: str = ""


class Open(Message, tag=2):
    spec: KvSpec


class Match(Message, tag=3):
    """How much of this prefix is here. Starts its promotion.

    `request`: the client's own number for who waits, by which it asks again and cancels; 0 is none.
    `within_ms`: how long it waits at most, and `queued_ms` how long it would have to anyway; 0: not said.
    """

    space: int
    keys: bytes
    request: int = 0
    within_ms: int = 0
    queued_ms: int = 0


class Load(Message, tag=4):
    """Match, and hold what is ready until released or the deadline. `shards`: whose slots to tell. The rest
    as in `Match`. `wait_ms`: while something that `request` asked for before is on its way, the answer comes
    when that is over, or after so long. `first`: the client holds the blocks before this one itself: they are
    not read from disk, and `ready` counts them. Without `bring` nothing is read from disk."""

    space: int
    keys: bytes
    deadline_ms: int
    shards: Annotated[list[int], msgspec.Meta(max_length=LIMIT_SHARDS_TOLD)]
    request: int = 0
    within_ms: int = 0
    queued_ms: int = 0
    wait_ms: int = 0
    first: int = 0
    bring: bool = True


class Adopt(Message, tag=5):
    """Join a lease by its token: another process of the same engine reads under it."""

    token: bytes
    shards: Annotated[list[int], msgspec.Meta(max_length=LIMIT_SHARDS_TOLD)]


class Release(Message, tag=6):
    """The client has finished reading under this lease, and reports what it used: tokens by the tier that had
    them when they were first asked for, and bytes of all groups and shards. A prefix that the client had
    itself, or did not read, is not used."""

    lease: int
    warm_tokens: int = 0
    cold_tokens: int = 0
    nbytes: int = 0


class Reserve(Message, tag=7):
    """Slots to write the new ones among these keys into. `parent`: the key before the first, or empty."""

    space: int
    group: int
    shard: int
    parent: bytes
    keys: bytes


class Commit(Message, tag=8):
    """The granted blocks [first, first + count) are written. `checksums`: 16 bytes each, or none."""

    lease: int
    first: int
    count: int
    checksums: bytes = b""


class Abort(Message, tag=9):
    lease: int


class Prefetch(Message, tag=10):
    space: int
    keys: bytes


class Pin(Message, tag=11):
    space: int
    keys: bytes
    ttl_ms: int


class Hint(Message, tag=12):
    space: int
    keys: bytes
    importance: float


class Forget(Message, tag=13):
    space: int
    keys: bytes


class Stats(Message, tag=14):
    pass


class Record(Message, tag=22):
    """Write what is looked up and saved into a trace of so many bytes, or `stop`; neither: how is it?
    Answered with a Report, to who runs the daemon alone."""

    limit_bytes: int = 0
    stop: bool = False


class Ping(Message, tag=15):
    pass


class Watch(Message, tag=17):
    """Tell what comes and goes in this space, in memory and on disk, from the first time on: answered when
    there is something. One at a time; until the next one changes are kept, and beyond a limit forgotten."""

    space: int


class Bye(Message, tag=16):
    """The client closes and promises that nothing of it still touches a slot."""


class Cancel(Message, tag=18):
    """Nobody waits any more for what this session's request of that number asked for."""

    request: int


class Prefill(Message, tag=19):
    """What computing takes in this space: so long for each token, and so much more for each before it."""

    space: int
    token_s: float
    context_s: float


class Unpin(Message, tag=20):
    """End the pins that hold nothing but blocks of this prefix."""

    space: int
    keys: bytes


class Explain(Message, tag=21):
    """Why these keys, or those of the lookup of that number, are here or not; neither: the last lookups."""

    lookup: int = 0
    keys: bytes = b""


class Settings(Message, tag=23):
    """What the daemon runs with ("show"), what its configuration says otherwise by now ("diff"), have that
    put into force ("reload"), or the last lines of its log ("log"). Answered with a Report, to who runs the
    daemon alone."""

    order: str = "show"


class Tier(Message, tag=24):
    """Have the "warm" or the "cold" tier drained ("drain"), switched "off" or "on", or ask how that is
    ("status"). Answered at once with a Report, to who runs the daemon alone."""

    tier: str
    order: str = "status"


class Spaces(Message, tag=25):
    """Which spaces a tenant has, some at a time, from this number on; -1 for none, and who is connected
    alone. No tenant is the client's own. Answered with a Report."""

    tenant: str = ""
    first: int = 0


class List(Message, tag=26):
    """What there is, record by record: of one space its blocks, or how many each space has (-1). `first`
    is 0, or what the last answer said."""

    tenant: str = ""
    space: int = -1
    first: int = 0
    limit: int = LIMIT_LISTED


class Purge(Message, tag=27):
    """Forget some of a space, `first` as in `List`; or erase from some of the tenant's files on disk what no
    block owns (space -1), `first` as the answer before has it."""

    tenant: str = ""
    space: int = -1
    first: int = 0


class Monitor(Message, tag=28):
    """Tell what happens, of these kinds or of all: answered when something has. One at a time; until the next
    one events are kept, and beyond a limit forgotten, the oldest first."""

    kinds: list[str] = []


class Grow(Message, tag=29):
    """Tell when this tenant has more than `extents` extents, or when none is still to come; after
    `wait_ms` at the latest. Answered with a Grown. One at a time."""

    extents: int
    wait_ms: int


# --- what the daemon answers --------------------------------------------------------------------


class Welcome(Message, tag=32):
    """`token` names this session, `daemon` this run of the daemon: another run's slots are others."""

    version: str
    tenant: str
    token: bytes
    daemon: bytes


class Opened(Message, tag=33):
    space: int
    identity: bytes
    secret: bytes


class Matched(Message, tag=34):
    """`why` says why what is on disk is brought, or is not (see planning.WHY)."""

    ready: int
    coming: int
    eta_ms: float
    why: str = ""


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The slots of one group and shard: blocks first, first + 1, ... of the prefix."""

    group: int
    shard: int
    first: int
    slots: bytes


class Loaded(Message, tag=35):
    ready: int
    coming: int
    eta_ms: float
    lease: int
    token: bytes
    parts: list[Part]
    why: str = ""


class Reserved(Message, tag=36):
    """`outcomes` has a byte per key (see OUTCOMES); slots are those of the granted keys in order."""

    lease: int
    outcomes: bytes
    slots: bytes


class Done(Message, tag=37):
    pass


class Counted(Message, tag=38):
    blocks: int


class Report(Message, tag=39):
    stats: dict[str, msgspec.Raw]


class Failed(Message, tag=40):
    """`code` is for programs (see CODES), `text` for people. `fatal`: the daemon hangs up after it."""

    code: str
    text: str
    fatal: bool = False


class Changed(Message, tag=41):
    """`changes`: see CHANGE, the oldest first. Before them `missed` others were forgotten."""

    missed: int
    changes: bytes


class Events(Message, tag=42):
    """The oldest first. Before them `missed` others were forgotten."""

    missed: int
    events: list[msgspec.Raw]


class Listed(Message, tag=43):
    """`rows`: see TALLY and LISTED. `next` is where to go on, 0 at the end."""

    next: int
    rows: bytes


class Purged(Message, tag=44):
    """How many blocks of this piece were forgotten, or how many files were erased. `next` is where to go on,
    0 at the end."""

    next: int
    blocks: int


class Grown(Message, tag=45):
    """So many extents this tenant has; `growing`: more come by themselves."""

    extents: int
    growing: bool


# --- what the daemon says by itself -------------------------------------------------------------


class ExtentAdded(Message, tag=64):
    index: int
    bytes: int


class GoingDown(Message, tag=65):
    reason: str


Request = (
    Hello | Open | Match | Load | Adopt | Release | Reserve | Commit | Abort
    | Prefetch | Pin | Hint | Forget | Stats | Record | Ping | Watch | Bye | Cancel | Prefill
    | Unpin | Explain | Settings | Tier | Spaces | List | Purge | Monitor | Grow
)  # fmt: skip
Reply = (
    Welcome | Opened | Matched | Loaded | Reserved | Done | Counted | Report | Failed
    | Changed | Events | Listed | Purged | Grown | ExtentAdded | GoingDown
)  # fmt: skip

# What became of each key of a reserve, by the byte in Reserved.outcomes.
OUTCOMES = ("granted", "present", "in_progress", "leaving", "no_room", "growing")
GRANTED, PRESENT, IN_PROGRESS, LEAVING, NO_ROOM, GROWING = range(len(OUTCOMES))

CODES = (
    "bad_frame",       # not a message of this schema; fatal
    "wrong_schema",    # another version at the other end; fatal
    "no_tenant",       # the server's configuration gives this uid nothing
    "too_many",        # clients, spaces, leases
    "bad_spec",        # the space's description makes no sense
    "unknown_space",
    "unknown_lease",   # ended, or never this session's
    "bad_request",     # well-formed, but makes no sense
    "read_only",       # this session may not write
    "disk_failed",     # it holds in memory, and could not be made so on disk
    "internal",        # a bug of the daemon's; fatal
)  # fmt: skip

FIRST_REPLY_TAG = 32
_LARGE = frozenset(
    kind.__struct_config__.tag
    for kind in (Match, Load, Reserve, Commit, Prefetch, Pin, Hint, Forget, Unpin, Explain)
)
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Message) -> bytes:
    """One frame, length included."""
    body = _encoder.encode(message)
    if len(body) > LIMIT_REQUEST_BYTES and len(body) > (limit := limit_of(body)):
        raise ProtocolError(f"a message of {len(body)} bytes: at most {limit}")
    return LENGTH.pack(len(body)) + body


def decode_request(body: bytes | memoryview) -> Request:
    """The message in a frame's body; raises ProtocolError on anything that is none."""
    try:
        return _requests.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a request: {error}") from error


def decode_reply(body: bytes | memoryview) -> Reply:
    try:
        return _replies.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a reply: {error}") from error


def limit_of(body: bytes | bytearray | memoryview) -> int:
    """How long a message may be, by its tag: its first two bytes are all that is looked at."""
    tag = body[1] if body[0] & 0xF0 == 0x90 else 0
    return LIMIT_FRAME_BYTES if tag in _LARGE or tag >= FIRST_REPLY_TAG else LIMIT_REQUEST_BYTES


class Framer:
    """Cuts a byte stream into frames' bodies."""

    def __init__(self, limit: int = LIMIT_FRAME_BYTES) -> None:
        self.limit = limit
        self._pending = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """The bodies that are whole now. Raises as `take`."""
        self.push(data)
        while (body := self.take()) is not None:
            yield body

    def push(self, data: bytes | memoryview) -> None:
        self._pending += data

    def push_and_take(self, data: memoryview) -> bytes | memoryview | None:
        """Both, without a copy where the data is one short frame and nothing was held: then it is a view."""
        if not self._pending and len(data) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(data)
            is_short = length <= LIMIT_REQUEST_BYTES and length <= self.limit
            if is_short and length == len(data) - LENGTH.size:
                return data[LENGTH.size :]
        self.push(data)
        return self.take()

    def take(self) -> bytes | None:
        """The next body, or None while it is not whole. Raises ProtocolError at a length beyond the limit, at
        once and before its bytes are waited for."""
        pending = self._pending
        if len(pending) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(pending)
        if (length > LIMIT_REQUEST_BYTES or length > self.limit) and not self._may_be(length):
            return None
        end = LENGTH.size + length
        if end > len(pending):
            return None
        body = bytes(memoryview(pending)[LENGTH.size : end])
        del pending[:end]
        return body

    def _may_be(self, length: int) -> bool:
        """Whether so long a frame may come; False while the bytes that tell are not there."""
        limit, head = self.limit, self._pending[LENGTH.size : LENGTH.size + 2]
        if length <= limit and length > LIMIT_REQUEST_BYTES:
            if len(head) < 2:
                return False
            limit = limit_of(head)
        if length > limit:
            raise ProtocolError(f"a frame of {length} bytes: at most {limit}")
        return True

    @property
    def held_bytes(self) -> int:
        """What was pushed and not taken."""
        return len(self._pending)

    @property
    def missing_bytes(self) -> int:
        """What the next body lacks, as far as its length is known."""
        if len(self._pending) < LENGTH.size:
            return 0
        (length,) = LENGTH.unpack_from(self._pending)
        return max(0, LENGTH.size + int(length) - len(self._pending))


def schema_digest() -> bytes:
    """What both ends must agree on: every message's tag, fields and types, and the limits."""
    types: list[type[msgspec.Struct]] = [Part, Group, KvSpec]
    types += [kind for union in (Request, Reply) for kind in union.__args__]
    limits = (
        f"{LIMIT_FRAME_BYTES} {LIMIT_REQUEST_BYTES} {LIMIT_KEYS} {LIMIT_RESERVED} {LIMIT_LOOKS}"
    )
    limits += f" {LIMIT_TOLD_SLOTS}"
    lines = [
        f"{limits} {SLOT_BYTES} {DIGEST_BYTES} {OUTCOMES} {CHANGE.format} {TALLY.format} {LISTED.format}"
    ]
    for kind in types:
        hints = {
            name: text for base in reversed(kind.__mro__)
            for name, text in inspect.get_annotations(base).items()
        }  # fmt: skip
        fields = [f"{name}:{hints[name]}" for name in kind.__struct_fields__]
        lines.append(f"{kind.__name__} {kind.__struct_config__.tag} {' '.join(fields)}")
    return hashlib.sha256("\n".join(lines).encode()).digest()


SCHEMA = schema_digest()
