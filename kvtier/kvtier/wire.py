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

import msgspec

from kvtier.errors import ProtocolError
from kvtier.layout import Group, KvSpec

LIMIT_FRAME_BYTES = 4 << 20
LIMIT_KEYS = 65_536
LIMIT_LOOKS = 1 << 20  # keys times places of one request: some 10 ms
LIMIT_TOLD_SLOTS = 160_000  # in one reply: what fits into a frame
LIMIT_SOCKET_PATH = 107  # bytes: sockaddr_un.sun_path less its zero byte
LIMIT_ENDED = 64  # tokens in one Hello
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
    of them touches a slot any more.
    """

    schema: bytes
    client: str
    read_only: bool = False
    ended: list[bytes] = []


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
    shards: list[int]
    request: int = 0
    within_ms: int = 0
    queued_ms: int = 0
    wait_ms: int = 0
    first: int = 0
    bring: bool = True


class Adopt(Message, tag=5):
    """Join a lease by its token: another process of the same engine reads under it."""

    token: bytes
    shards: list[int]


class Release(Message, tag=6):
    lease: int


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
    """What the daemon runs with ("show"), what its configuration says otherwise by now ("diff"), or have
    that put into force ("reload"). Answered with a Report, to who runs the daemon alone."""

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
    """Forget some of a space, `first` as in `List`; or have all that was forgotten be so after a start, too
    (space -1)."""

    tenant: str = ""
    space: int = -1
    first: int = 0


class Monitor(Message, tag=28):
    """Tell what happens, of these kinds or of all: answered when something has. One at a time; until the next
    one events are kept, and beyond a limit forgotten, the oldest first."""

    kinds: list[str] = []


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
    """So many blocks of this piece match no more. `next` is where to go on, 0 at the end."""

    next: int
    blocks: int


# --- what the daemon says by itself -------------------------------------------------------------


class ExtentAdded(Message, tag=64):
    index: int
    bytes: int


class GoingDown(Message, tag=65):
    reason: str


Request = (
    Hello | Open | Match | Load | Adopt | Release | Reserve | Commit | Abort
    | Prefetch | Pin | Hint | Forget | Stats | Record | Ping | Watch | Bye | Cancel | Prefill
    | Unpin | Explain | Settings | Tier | Spaces | List | Purge | Monitor
)  # fmt: skip
Reply = (
    Welcome | Opened | Matched | Loaded | Reserved | Done | Counted | Report | Failed
    | Changed | Events | Listed | Purged | ExtentAdded | GoingDown
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

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Message) -> bytes:
    """One frame, length included."""
    body = _encoder.encode(message)
    if len(body) > LIMIT_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes: at most {LIMIT_FRAME_BYTES}")
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


class Framer:
    """Cuts a byte stream into frames' bodies. Holds at most one unfinished frame."""

    def __init__(self, limit: int = LIMIT_FRAME_BYTES) -> None:
        self._limit = limit
        self._pending = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """The bodies that are whole now. Raises ProtocolError at a length beyond the limit, at once
        and before its bytes are waited for."""
        pending = self._pending
        pending += data
        at = 0
        try:
            while len(pending) - at >= LENGTH.size:
                (length,) = LENGTH.unpack_from(pending, at)
                if length > self._limit:
                    raise ProtocolError(f"a frame of {length} bytes: at most {self._limit}")
                end = at + LENGTH.size + length
                if end > len(pending):
                    break
                body = bytes(memoryview(pending)[at + LENGTH.size : end])
                at = end
                yield body
        finally:
            del pending[:at]


def schema_digest() -> bytes:
    """What both ends must agree on: every message's tag, fields and types, and the limits."""
    types: list[type[msgspec.Struct]] = [Part, Group, KvSpec]
    types += [kind for union in (Request, Reply) for kind in union.__args__]
    limits = f"{LIMIT_FRAME_BYTES} {LIMIT_KEYS} {LIMIT_LOOKS} {LIMIT_TOLD_SLOTS}"
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
