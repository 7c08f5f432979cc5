"""The messages between a client and the daemon, and their framing. No I/O.

    +----------------+---------------------------------------------+
    | length u32 LE  | body: msgpack array [tag, request id, ...]  |
    +----------------+---------------------------------------------+

A reply has the id of its request. A request with id 0 gets no reply, and messages that the daemon sends
without a request have id 0. Messages never contain block data: a slot is 24 bytes, extent u32, zero u32,
offset u64, generation u64. An `ExtentAdded` carries two file descriptors: the extent, then its generation
table (read-only); so does a `HotAdded`. A `HotGrant` carries one to the daemon. A `DirectReadFile` carries
one: a file that is only for reading."""

from __future__ import annotations

import hashlib
import inspect
import struct
from collections.abc import Iterator
from typing import Annotated

import msgspec

from kvtier.errors import ProtocolError
from kvtier.layout import Group, KvSpec

LIMIT_FRAME_BYTES = 4 << 20  # for a message with keys or checksums, and for every reply
LIMIT_REQUEST_BYTES = 64 << 10  # for any other request: larger than any description of a space
LIMIT_HELLO_BYTES = 16 << 10  # for a message before the handshake is complete
LIMIT_KEYS = 65_536
LIMIT_OTHERS = 16_384  # keys under other accepted secrets in one request
# Keys in one Reserve: about 1 ms, and several in memory that is used the first time.
LIMIT_RESERVED = 4096
LIMIT_COPIED = 16_384  # slots in one HotReserve
LIMIT_CHANGED = 4096  # keys in one Hint or Forget: about 0.7 ms
LIMIT_LOOKS = 1 << 20  # keys times places of one request: about 10 ms
LIMIT_USED = 1 << 50  # tokens or bytes that one Release may report
LIMIT_TOLD_SLOTS = 160_000  # in one reply: this many fit into a frame
LIMIT_SOCKET_PATH = 107  # bytes: sockaddr_un.sun_path less its zero byte
LIMIT_ENDED = 64  # tokens in one Hello
LIMIT_SHARDS_TOLD = 4096  # shards in a Load or Adopt: more are refused while decoding
# In one HotJoin: those of all clients of an engine are visited when one ends.
LIMIT_SHARDS_JOINED = 64
LIMIT_GPU_NAME = 64
SLOT = struct.Struct("<IIQQ")  # extent, reserved, offset, generation
SLOT_BYTES = SLOT.size
DIGEST_BYTES = 16
NO_DIGEST = bytes(DIGEST_BYTES)  # of a block that was saved without a checksum
CHANGE = struct.Struct("<BBHI32s")  # what, tier, group, shard, key
CAME, WENT = 0, 1
MEMORY, DISK = 0, 1
LIMIT_CHANGES = 512  # in one Changed: fits the buffer of a socket, so the daemon does not wait
# space, blocks in memory, on disk, neither, bytes in memory, on disk
TALLY = struct.Struct("<IIIIQQ")
# leading blocks in memory, after these on disk, after these in the store that hosts share
LOCATED = struct.Struct("<III")
# id, group, shard, payload bytes, leases, state, on disk, codec, rounds, key
LISTED = struct.Struct("<IIIIHBBBB2x32s")
LIMIT_LISTED = 4096  # in one Listed
LIMIT_LOCATED = 1024  # chains in one Locate
LIMIT_EVENTS = 256  # in one Events
# at, file, page, payload bytes, codec, header pages, epoch of the segment, digest of the payload
DIRECT_ROW = struct.Struct("<IIIIBB2xQ16s")
LIMIT_CALIBRATION_BYTES = 3 << 20  # of one DirectReadCalibrated
LIMIT_DIRECT_BLOCKS = 1024  # in one DirectReadGranted: some milliseconds
LIMIT_DIRECT_FILES = 256  # that a session has and did not close
LIMIT_RESIDENT = 4096  # keys in one Resident: about 2 ms
LENGTH = struct.Struct("<I")


def told_slots(verify: bool) -> int:
    """Return how many slots one reply may have."""
    each = SLOT_BYTES + DIGEST_BYTES * verify
    return LIMIT_TOLD_SLOTS * SLOT_BYTES // each


def split(slots: bytes, parts: int, nbytes: int) -> list[bytes]:
    """Return `parts` packed places of `nbytes` each for every slot, consecutive within the slot."""
    return [
        SLOT.pack(extent, reserved, offset + at * nbytes, generation)
        for extent, reserved, offset, generation in SLOT.iter_unpack(slots)
        for at in range(parts)
    ]


def moved(slots: bytes, nbytes: int) -> bytes:
    """Return the packed places that are `nbytes` after the begin of each slot."""
    return b"".join(
        SLOT.pack(extent, reserved, offset + nbytes, generation)
        for extent, reserved, offset, generation in SLOT.iter_unpack(slots)
    )


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    id: int


# --- requests -----------------------------------------------------------------------------------


class Hello(Message, tag=1):
    """The first message of every connection: both sides must use the same schema.

    `ended`: tokens of earlier sessions whose client could not send Bye, and which no longer access their
    slots. `engine`: a name that the processes of one engine share, so that they count as one engine; a client
    without a name counts as one engine. `verify`: answers with slots contain the checksums of the blocks.
    `resumes`: the token of the session that this one continues. If the daemon knows it, the new session has
    the same token and gets the slots that the other one writes to. `device`: a device writes to the slots,
    and may do so for a moment after the end of the process.
    """

    schema: bytes
    client: str
    read_only: bool = False
    ended: list[bytes] = []
    engine: str = ""
    verify: bool = False
    resumes: bytes = b""
    device: bool = False


class Open(Message, tag=2):
    spec: KvSpec


class MatchPrefix(Message, tag=3):
    """Look up how many leading blocks of a prefix are stored. Starts their promotion.

    `request`: the client's number for the waiting request, for later lookups and `Cancel`; 0: no number.
    `within_ms`: the longest time that the request waits, `queued_ms`: the time that it waits in the engine's
    queue in any case; 0: unknown. `others`: keys of the first `other_blocks` under each other accepted
    secret, one chain after the other: a store that hosts share may have blocks under these. `awaits`: blocks
    that a client is writing count as coming, for a while; needs `request`.
    """

    space: int
    keys: bytes
    request: int = 0
    within_ms: int = 0
    queued_ms: int = 0
    others: bytes = b""
    other_blocks: int = 0
    awaits: bool = False


class Load(Message, tag=4):
    """Match, and lease the ready blocks until `Release` or the deadline.

    `shards`: the shards whose slots the answer contains. `wait_ms`: while blocks of an earlier lookup of
    `request` are being read, or with `awaits` written, the answer is delayed until that ends, at most for
    this time; so is that of the first lookup, if it has started reads and no block is ready. `first`: the
    client has the blocks before this one itself: they are not read from disk, and `ready` counts them.
    Without `bring` nothing is read from disk. Other fields: see `MatchPrefix`.
    """

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
    others: bytes = b""
    other_blocks: int = 0
    awaits: bool = False


class Adopt(Message, tag=5):
    """Join the lease with this token, which another process of the engine took."""

    token: bytes
    shards: Annotated[list[int], msgspec.Meta(max_length=LIMIT_SHARDS_TOLD)]


class Release(Message, tag=6):
    """End a lease and report what was used: tokens by the tier that had them at the first lookup, and bytes
    of all groups and shards. Excludes the prefix that the client had itself, and blocks that it did not
    read."""

    lease: int
    warm_tokens: int = 0
    cold_tokens: int = 0
    nbytes: int = 0


class Reserve(Message, tag=7):
    """Get slots for those of these keys that are new. `parent`: the key before the first, or empty. `ttl_ms`:
    the blocks are kept only in memory, and are not found after this time; 0: no limit. `waits`: the client
    will ask again, so while the room would be that of blocks that are being written to disk, the new keys may
    be answered with `writing` and get no slots."""

    space: int
    group: int
    shard: int
    parent: bytes
    keys: bytes
    ttl_ms: int = 0
    waits: bool = False


class Commit(Message, tag=8):
    """Make the granted blocks [first, first + count) visible. `checksums`: 16 bytes each, or empty."""

    lease: int
    first: int
    count: int
    checksums: bytes = b""


class Abort(Message, tag=9):
    """Give back the slots of a lease that are not committed; with lease 0, those of the session that this one
    continues and that `Regain` did not ask for."""

    lease: int


class Regain(Message, tag=31):
    """Get a lease on the slots that the session that this one continues had for these keys. Answered with a
    Reserved: `granted` and the same slots, `present`, or `no_room` for a slot that is lost. `ttl_ms`: what is
    left of that of `Reserve`."""

    space: int
    group: int
    shard: int
    keys: bytes
    ttl_ms: int = 0


class Prefetch(Message, tag=10):
    space: int
    keys: bytes
    others: bytes = b""
    other_blocks: int = 0


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
    others: bytes = b""
    other_blocks: int = 0


class Locate(Message, tag=97):
    """Find out how many leading blocks of each of several chains are in which tier. `keys` has the chains one
    after the other, `lengths` the number of keys of each in 4 bytes, little-endian. Starts no reads."""

    space: int
    keys: bytes
    lengths: bytes


class Stats(Message, tag=14):
    pass


class Record(Message, tag=22):
    """Record lookups and saves into a trace of at most `limit_bytes`, or `stop`; with neither, return the
    state. Answered with a Report. Only for root and the daemon's user."""

    limit_bytes: int = 0
    stop: bool = False


class Ping(Message, tag=15):
    pass


class Watch(Message, tag=17):
    """Get the changes of this space, in memory and on disk, since the first request. Answered when there are
    changes. One request at a time; until the next request changes are kept, up to a limit."""

    space: int


class Bye(Message, tag=16):
    """The client disconnects, and promises that it no longer accesses any slot."""


class Cancel(Message, tag=18):
    """Cancel the reads for this session's request with that number."""

    request: int


class Prefill(Message, tag=19):
    """The time to compute in this space: `token_s` per token, plus `context_s` for each token before it."""

    space: int
    token_s: float
    context_s: float


class Unpin(Message, tag=20):
    """End the pins that hold only blocks of this prefix."""

    space: int
    keys: bytes


class Explain(Message, tag=21):
    """Explain these keys, those of the lookup with that number, or, with neither, the last lookups."""

    lookup: int = 0
    keys: bytes = b""


class Settings(Message, tag=23):
    """Return the values in force ("show"), the differences to the configuration files ("diff"), or the last
    lines of the log ("log"); or apply the files ("reload"). Answered with a Report. Only for root and the
    daemon's user."""

    order: str = "show"


class Tier(Message, tag=24):
    """Drain the "warm", "cold" or "remote" tier ("drain"), switch it "off" or "on", or return its "status".
    Answered at once with a Report. Only for root and the daemon's user."""

    tier: str
    order: str = "status"


class Spaces(Message, tag=25):
    """List the spaces of a tenant in parts, from the number `first` on; -1: list only the clients. An empty
    tenant means the client's own. Answered with a Report."""

    tenant: str = ""
    first: int = 0


class List(Message, tag=26):
    """List the blocks of one space, or with space -1 the number of blocks of each space. `first` is 0, or
    `next` of the previous answer."""

    tenant: str = ""
    space: int = -1
    first: int = 0
    limit: int = LIMIT_LISTED


class Purge(Message, tag=27):
    """Forget a part of a space; or, with space -1, erase the bytes that belong to no block from some of the
    tenant's segment files. `first` is 0, or `next` of the previous answer."""

    tenant: str = ""
    space: int = -1
    first: int = 0


class Monitor(Message, tag=28):
    """Get events of these kinds, or of all kinds. Answered when there are events. One request at a time;
    until the next request events are kept, up to a limit; then the oldest are dropped."""

    kinds: list[str] = []


class Grow(Message, tag=29):
    """Wait until this tenant has more than `extents` extents or its memory is complete, at most for
    `wait_ms`. Answered with a Grown. One request at a time."""

    extents: int
    wait_ms: int


class Recheck(Message, tag=30):
    """Compare the blocks of this read lease with the checksums of their saves, and forget those that differ.
    Answered with a Counted: the number of forgotten blocks. While blocks of the tenant are being checked,
    another request checks nothing."""

    lease: int


class HotOffer(Message, tag=80):
    """The memory of a GPU, from its holder: `nbytes`, in pieces of multiples of `unit_bytes`. Answered with a
    HotShares. Only for root and the daemon's user."""

    gpu: str
    nbytes: int
    unit_bytes: int


class HotGrant(Message, tag=81):
    """A tenant's part of the memory of a GPU, from its holder. Carries a file descriptor of that memory."""

    gpu: str
    tenant: str
    nbytes: int


class HotJoin(Message, tag=82):
    """This client copies blocks of these shards from and to this GPU. From then on the answers to its engine
    contain the slots of their copies there, and a `HotAdded` comes before an answer if the tenant has memory
    on that GPU."""

    gpu: Annotated[str, msgspec.Meta(max_length=LIMIT_GPU_NAME)]
    shards: Annotated[list[int], msgspec.Meta(max_length=LIMIT_SHARDS_JOINED)]


class HotReserve(Message, tag=83):
    """Get slots in the memory of the joined GPU for copies of the blocks in these slots of the arena.
    `again`: the blocks were loaded, not saved; then copies of other blocks are dropped if there is no room.
    Answered with a Reserved; LEAVING for a slot that has another block now."""

    slots: bytes
    again: bool


class HotEnd(Message, tag=84):
    """End a lease of `HotReserve`: the copies are complete, or with `good` false they will not be."""

    lease: int
    good: bool


class DirectRead(Message, tag=112):
    """Get the places of blocks on disk, to read their frames without the daemon, and a lease on them until
    DirectReadEnd or the deadline. Answered with a DirectReadGranted. Only for tenants whose configuration
    permits it.

    Granted are blocks of this group and shard that a load of `keys` needs, that are only on disk, and whose
    codec is one of `codecs`: the first `most` of them from the key `first` on. `closed`: the numbers of
    files that the client has closed. With a `deadline_ms` of 0 there is no lease."""

    space: int
    group: int
    shard: int
    keys: bytes
    codecs: bytes
    deadline_ms: int
    first: int = 0
    most: int = LIMIT_DIRECT_BLOCKS
    closed: Annotated[list[int], msgspec.Meta(max_length=LIMIT_DIRECT_FILES)] = []


class DirectReadEnd(Message, tag=113):
    """End such a lease. `failed` has a byte for each granted block, 1 if its frame was not that block. The
    daemon only counts it: a Prefetch lets the daemon verify the frame, and drop it if it is damaged. Of each
    block, at most `tokens` and `nbytes` count as used. Answered with a DirectReadChecked."""

    lease: int
    failed: bytes
    tokens: Annotated[int, msgspec.Meta(ge=0)] = LIMIT_USED
    nbytes: Annotated[int, msgspec.Meta(ge=0)] = LIMIT_USED


class DirectReadUsed(Message, tag=115):
    """Count frames that were read without a lease: `good` ones, of which each counts with at most `tokens`
    and `nbytes` as used, and `bad` ones, which were not the blocks. Not answered."""

    space: int
    group: int
    shard: int
    good: Annotated[int, msgspec.Meta(ge=0, le=LIMIT_DIRECT_BLOCKS)]
    bad: Annotated[int, msgspec.Meta(ge=0, le=LIMIT_DIRECT_BLOCKS)]
    tokens: Annotated[int, msgspec.Meta(ge=0)] = LIMIT_USED
    nbytes: Annotated[int, msgspec.Meta(ge=0)] = LIMIT_USED


class Resident(Message, tag=96):
    """The client's engine holds the blocks `entered` of this group in its own cache from now on, and has
    dropped those in `left`. `reset`: before that, it held no blocks. At most LIMIT_RESIDENT keys in all. Only
    for a daemon whose status has `hot`: others do not know this message."""

    space: int
    group: int
    entered: bytes = b""
    left: bytes = b""
    reset: bool = False


class DirectReadCodec(Message, tag=114):
    """Get the calibration of a group and shard, if any. Answered with a DirectReadCalibrated."""

    space: int
    group: int
    shard: int


# --- replies ------------------------------------------------------------------------------------


class Welcome(Message, tag=32):
    """`token` identifies this session, `daemon` this run of the daemon. Slots of another run differ. `hot`:
    this tenant can have memory of GPUs."""

    version: str
    tenant: str
    token: bytes
    daemon: bytes
    hot: bool = False


class Opened(Message, tag=33):
    """`accepted`: while the tenant's secret is being replaced, the secrets of this space that other hosts may
    have used, for `others` of lookups."""

    space: int
    identity: bytes
    secret: bytes
    accepted: list[bytes] = []


class Locations(Message, tag=51):
    """A row of LOCATED for each chain."""

    rows: bytes


class Matched(Message, tag=34):
    """`why` is the planner's reason to read the blocks on disk or not (see planning.WHY)."""

    ready: int
    coming: int
    eta_ms: float
    why: str = ""


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The slots of one group and shard: blocks first, first + 1, ... of the prefix. `digests`: for a session
    that verifies, the checksums of their saves, NO_DIGEST for a block without one. `hot`: the slots of their
    copies on the engine's GPU, zeros for a block without one; empty if no block has one."""

    group: int
    shard: int
    first: int
    slots: bytes
    digests: bytes = b""
    hot: bytes = b""


class Loaded(Message, tag=35):
    ready: int
    coming: int
    eta_ms: float
    lease: int
    token: bytes
    parts: list[Part]
    why: str = ""


class Reserved(Message, tag=36):
    """`outcomes` has a byte per key (see OUTCOMES); `slots` has the slots of the granted keys in order."""

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
    """`code` is for programs (see CODES), `text` for people. `fatal`: the daemon then disconnects."""

    code: str
    text: str
    fatal: bool = False


class Changed(Message, tag=41):
    """`changes`: see CHANGE, the oldest first. Before them `missed` others were dropped."""

    missed: int
    changes: bytes


class Events(Message, tag=42):
    """Events, the oldest first. Before them `missed` others were dropped."""

    missed: int
    events: list[msgspec.Raw]


class Listed(Message, tag=43):
    """`rows`: see TALLY and LISTED. `next` is `first` of the next request, 0 at the end."""

    next: int
    rows: bytes


class Purged(Message, tag=44):
    """The number of blocks that were forgotten, or of files that were erased. `next` is `first` of the next
    request, 0 at the end."""

    next: int
    blocks: int


class Grown(Message, tag=45):
    """The number of extents of this tenant; `growing`: more will be added."""

    extents: int
    growing: bool


class HotShares(Message, tag=90):
    """How many bytes of a GPU each tenant gets. The holder answers with a HotGrant for each."""

    shares: dict[str, int]


class DirectReadGranted(Message, tag=48):
    """`rows`: see DIRECT_ROW; `at` is the place of the block's key in the request. The files were sent
    before. Without a block there is no lease (id 0), nor if none was requested. `forgets`: the number in the
    file 0, which changes when a block of the tenant is forgotten."""

    lease: int
    rows: bytes
    forgets: int = 0


class DirectReadChecked(Message, tag=49):
    """A byte for each granted block, 1 if it was still stored at its place when the lease ended. All are 0 if
    the lease had ended before. Use no other block, whatever its bytes are: it may have been forgotten."""

    valid: bytes


class DirectReadCalibrated(Message, tag=50):
    """The calibration of a codec, or codec 0. `profile` is its name in frames. The other fields are the
    arguments of `kvtier_kernels.Calibration`; `numbers` has the place in `parts` of a layer's part."""

    codec: int = 0
    level: int = 0
    group_tokens: int = 0
    heads_first: bool = False
    profile: bytes = b""
    ropes: list[tuple[bytes, bool]] = []
    parts: list[tuple[int, int, int, int, bytes, bytes, bytes, bytes]] = []
    numbers: list[tuple[int, int, int]] = []


# --- messages without a request -----------------------------------------------------------------


class ExtentAdded(Message, tag=64):
    index: int
    bytes: int


class DirectReadFile(Message, tag=68):
    """A file of the tenant's blocks, with a descriptor that is only for reading. File 0 is memory whose
    first 8 bytes are a number that changes when a block of the tenant is forgotten."""

    file: int
    bytes: int


class GoingDown(Message, tag=65):
    reason: str


class HotAdded(Message, tag=91):
    """Memory of the joined GPU: slots name it `index`. Carries two file descriptors: of the memory, for the
    CUDA driver, and of its generation table (read-only)."""

    index: int
    gpu: str
    bytes: int


class HotGone(Message, tag=92):
    """The memory with this index has no copies from now on: unmap it."""

    index: int


Request = (
    Hello | Open | MatchPrefix | Load | Adopt | Release | Reserve | Commit | Abort
    | Prefetch | Pin | Hint | Forget | Stats | Record | Ping | Watch | Bye | Cancel | Prefill
    | Unpin | Explain | Settings | Tier | Spaces | List | Purge | Monitor | Grow | Recheck | Regain
    | HotOffer | HotGrant | HotJoin | HotReserve | HotEnd
    | DirectRead | DirectReadEnd | DirectReadUsed | DirectReadCodec | Resident | Locate
)  # fmt: skip
Reply = (
    Welcome | Opened | Matched | Loaded | Reserved | Done | Counted | Report | Failed
    | Changed | Events | Listed | Purged | Grown | ExtentAdded | GoingDown
    | HotShares | HotAdded | HotGone | Locations
    | DirectReadGranted | DirectReadChecked | DirectReadCalibrated | DirectReadFile
)  # fmt: skip

# Requests that a client sends only if the daemon's status says that it knows them: they are no part of what
# both sides must agree on.
OPTIONAL = frozenset({Resident})

# The outcome of each key of a reserve: the byte in Reserved.outcomes is an index.
OUTCOMES = ("granted", "present", "in_progress", "leaving", "no_room", "growing", "writing")
GRANTED, PRESENT, IN_PROGRESS, LEAVING, NO_ROOM, GROWING, WRITING = range(len(OUTCOMES))

CODES = (
    "bad_frame",       # not a message of this schema; fatal
    "wrong_schema",    # the other side has another version; fatal
    "no_tenant",       # the daemon's configuration has no tenant for this uid
    "too_many",        # clients, spaces, leases
    "bad_spec",        # the space's description is invalid
    "unknown_space",
    "unknown_lease",   # it has ended, or never belonged to this session
    "bad_request",     # well-formed, but invalid
    "read_only",       # this session, or this user, may not write
    "not_admin",       # this user's role is not enough
    "disk_failed",     # done in memory, but could not be made durable on disk
    "internal",        # a bug in the daemon; fatal
)  # fmt: skip

FIRST_REPLY_TAG, LAST_REPLY_TAG = 32, 95
_LARGE = frozenset(
    kind.__struct_config__.tag
    for kind in (
        MatchPrefix,
        Load,
        Reserve,
        Regain,
        Commit,
        Prefetch,
        Pin,
        Hint,
        Forget,
        Unpin,
        Explain,
        DirectRead,
        Resident,
        Locate,
    )
)
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Message) -> bytes:
    """Return one frame, including its length."""
    body = _encoder.encode(message)
    if len(body) > LIMIT_REQUEST_BYTES and len(body) > (limit := limit_of(body)):
        raise ProtocolError(f"message has {len(body)} bytes, at most {limit} are possible")
    return LENGTH.pack(len(body)) + body


def encode_into(message: Message, frame: bytearray) -> None:
    """Replace the content of a buffer, which has LENGTH.size bytes or more, with one frame, including its
    length. Avoids the copies of `encode`."""
    _encoder.encode_into(message, frame, LENGTH.size)
    length = len(frame) - LENGTH.size
    if length > LIMIT_REQUEST_BYTES:
        with memoryview(frame) as whole, whole[LENGTH.size :] as body:
            limit = limit_of(body)
        if length > limit:
            raise ProtocolError(f"a message of {length} bytes: at most {limit}")
    LENGTH.pack_into(frame, 0, length)


def is_plain(message: Message) -> bool:
    """Return whether all fields are numbers, texts, bytes or shards of exactly their declared type. Such a
    request can always be decoded."""
    kind, fields = type(message), msgspec.structs.astuple(message)
    if _PLAIN.get(kind) != tuple(map(type, fields)):
        return False
    if kind not in _SHARDS:
        return True
    shards = fields[_SHARDS[kind]]
    return len(shards) <= LIMIT_SHARDS_TOLD and {int}.issuperset(map(type, shards))


def decode_request(body: bytes | memoryview) -> Request:
    """Return the message in a frame's body. Raises ProtocolError if the body is not a valid message."""
    try:
        return _requests.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"invalid request: {error}") from error


def decode_reply(body: bytes | memoryview) -> Reply:
    try:
        return _replies.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"invalid reply: {error}") from error


def limit_of(body: bytes | bytearray | memoryview) -> int:
    """Return the size limit of a message by its tag. Reads only the first two bytes."""
    tag = body[1] if body[0] & 0xF0 == 0x90 else 0
    return (
        LIMIT_FRAME_BYTES
        if tag in _LARGE or FIRST_REPLY_TAG <= tag <= LAST_REPLY_TAG
        else LIMIT_REQUEST_BYTES
    )


class Framer:
    """Splits a byte stream into the bodies of frames."""

    def __init__(self, limit: int = LIMIT_FRAME_BYTES) -> None:
        self.limit = limit
        self._pending = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Add data and yield the bodies that are complete. Raises as `take` does."""
        self.push(data)
        while (body := self.take()) is not None:
            yield body

    def push(self, data: bytes | memoryview) -> None:
        self._pending += data

    def push_and_take(self, data: memoryview) -> bytes | memoryview | None:
        """`push` and `take`. If the data is one short frame alone, returns a view without a copy."""
        if not self._pending and len(data) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(data)
            is_short = length <= LIMIT_REQUEST_BYTES and length <= self.limit
            if is_short and length == len(data) - LENGTH.size:
                return data[LENGTH.size :]
        self.push(data)
        return self.take()

    def take(self) -> bytes | None:
        """Return the next body, or None while it is incomplete. Raises ProtocolError for a length above the
        limit at once, before the rest of the frame arrives."""
        pending = self._pending
        if len(pending) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(pending)
        if (length > LIMIT_REQUEST_BYTES or length > self.limit) and not self._allows(length):
            return None
        end = LENGTH.size + length
        if end > len(pending):
            return None
        body = bytes(memoryview(pending)[LENGTH.size : end])
        del pending[:end]
        return body

    def _allows(self, length: int) -> bool:
        """Return True if a frame may have this length, False while its tag has not arrived."""
        limit, head = self.limit, self._pending[LENGTH.size : LENGTH.size + 2]
        if length <= limit and length > LIMIT_REQUEST_BYTES:
            if len(head) < 2:
                return False
            limit = limit_of(head)
        if length > limit:
            raise ProtocolError(f"frame has {length} bytes, at most {limit} are possible")
        return True

    @property
    def held_bytes(self) -> int:
        """Bytes that were pushed and not taken."""
        return len(self._pending)

    @property
    def missing_bytes(self) -> int:
        """Bytes that the next frame still lacks; 0 while its length is unknown."""
        if len(self._pending) < LENGTH.size:
            return 0
        (length,) = LENGTH.unpack_from(self._pending)
        return max(0, LENGTH.size + int(length) - len(self._pending))


def _hints(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the declared type of each field, as source text."""
    return {
        name: text for base in reversed(kind.__mro__)
        for name, text in inspect.get_annotations(base).items()
    }  # fmt: skip


_NAMED_TYPES = {
    "int": int, "float": float, "bool": bool, "str": str, "bytes": bytes,
    inspect.get_annotations(Load)["shards"]: list,
}  # fmt: skip
_PLAIN = {
    kind: tuple(_NAMED_TYPES[hints[name]] for name in kind.__struct_fields__)
    for kind in Request.__args__
    if _NAMED_TYPES.keys() >= set((hints := _hints(kind)).values())
}
_SHARDS = {kind: types.index(list) for kind, types in _PLAIN.items() if list in types}


def schema_digest() -> bytes:
    """Return a digest of what both sides must agree on: the messages' tags, fields, types, limits."""
    types: list[type[msgspec.Struct]] = [Part, Group, KvSpec]
    types += [kind for union in (Request, Reply) for kind in union.__args__ if kind not in OPTIONAL]
    limits = (
        f"{LIMIT_FRAME_BYTES} {LIMIT_REQUEST_BYTES} {LIMIT_KEYS} {LIMIT_RESERVED} {LIMIT_COPIED}"
        f" {LIMIT_CHANGED} {LIMIT_LOOKS}"
    )
    limits += f" {LIMIT_OTHERS} {LIMIT_LOCATED} {LOCATED.format}"
    limits += f" {LIMIT_TOLD_SLOTS} {DIRECT_ROW.format} {LIMIT_DIRECT_BLOCKS} {LIMIT_DIRECT_FILES}"
    lines = [
        f"{limits} {SLOT_BYTES} {DIGEST_BYTES} {OUTCOMES} {CHANGE.format} {TALLY.format} {LISTED.format}"
    ]
    for kind in types:
        hints = _hints(kind)
        fields = [f"{name}:{hints[name]}" for name in kind.__struct_fields__]
        lines.append(f"{kind.__name__} {kind.__struct_config__.tag} {' '.join(fields)}")
    return hashlib.sha256("\n".join(lines).encode()).digest()


SCHEMA = schema_digest()
