"""The native module, typed; what each part does is said here."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypedDict, final

from typing_extensions import Buffer

class _Tensor(Protocol):
    """A tensor of any framework in the host's memory, by DLPack."""

    def __dlpack__(self) -> object: ...

_Memory: TypeAlias = Buffer | _Tensor
_Blocks: TypeAlias = Sequence[_Memory] | _Memory
_Integers: TypeAlias = Sequence[int] | _Memory

@final
class Mapping:
    """Maps the first `size` bytes of a file, shared. Unmaps when its last reference goes, those of
    memoryviews included; the caller may close `fd` at once. Never maps past the end of the file."""

    def __init__(self, fd: int, size: int, writable: bool) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def size(self) -> int: ...
    @property
    def writable(self) -> bool: ...
    @property
    def address(self) -> int: ...
    def guard(self) -> None:
        """Keeps the process alive when a page of the file is missing: the first access to one replaces
        the whole mapping by zeroed private memory, and `lost` is True from then on. Installs a handler
        of SIGBUS."""

    @property
    def lost(self) -> bool: ...
    def populate(self) -> bool:
        """Faults all pages in without the GIL; False where the kernel refuses."""

@final
class Prefaulter:
    """Gives files their memory one by one, in a native thread, and adds 1 to the eventfd after each
    that is done or has failed. Keeps its own duplicates of the descriptors."""

    def __init__(self, notify_fd: int, huge: bool = False) -> None:
        """`huge` asks the kernel for huge pages behind each step, and does without where it refuses."""

    def huge_bytes(self) -> int:
        """How many bytes have huge pages."""

    def add(self, fd: int, size: int, lock: bool = False) -> int:
        """Queues a file and returns its index in `progress()`. `lock` keeps it in memory (mlock) for as
        long as this object lives."""

    def progress(self) -> list[tuple[int, int]]:
        """For each file the bytes that are done, and the errno that ended it or 0."""

    def stop(self) -> None:
        """Joins the thread within one step of 64 MiB. What is queued stays undone."""

@final
class Disk:
    """Moves blocks between files and mappings in native threads, and writes to the eventfd when there is
    something in `done()`: read the descriptor first, then ask. Never blocks but in `stop`. Keeps the
    mappings; the caller keeps each descriptor open, and each slot, until its operations are over.

    Operations are packed, 64 bytes each, little endian: token u64, fd i32, flags u32, file offset u64,
    nbytes u64, extent u32, deadline in ms from now u32 (0 is none), memory offset u64, and then a
    digest of 16 bytes (reads) or where in `headers` a header lies, u64, and its bytes, u64 (writes).
    Offsets are whole pages of 4 KiB; nbytes is rounded up to whole pages on disk and in memory.

    What is past its deadline while it is queued ends with ETIMEDOUT and touches nothing; what the kernel
    has by then can't be called back, and `overdue()` counts it. There is no order between operations,
    but for a sync and the writes before it."""

    def __init__(
        self,
        notify_fd: int,
        engine: str = "auto",
        depth: int = 8,
        threads: int = 1,
        decoders: int = 1,
        staged_bytes: int = ...,
    ) -> None:
        """`engine` is "io_uring", with a ring for each of `threads`; "threads", one for each operation of
        the depth, 64 at most; or "auto": the first if the kernel allows it. OSError where it was asked
        for and is refused. `depth` is how much the kernel has at most: all of it for urgent reads, an
        eighth less for others, half for writes. One write goes after 16 reads, urgent ones aside.
        `decoders` threads decode what `read_frames` has read while more is read; no frame
        is read while `staged_bytes` of others, 128 MiB if nobody says, wait for them."""

    def register(self, mapping: Mapping, fixed: bool = True) -> int:
        """Makes a mapping known and returns its index, `extent` in operations. A `fixed` one is
        registered with the kernel, soon and piece by piece, and used without where that is refused."""

    def read(self, ops: Buffer) -> None:
        """Queues reads; all of them or, with an IndexError or a ValueError, none. Flag 1 is urgent: before
        all others. Flag 2 verifies: EBADMSG unless the xxh3-128 of the bytes is the digest. ENODATA
        where the file ends before. After an error the memory holds anything."""

    def read_frames(self, ops: Buffer, lossy: Sequence[Recipe] = ()) -> None:
        """Queues reads of encoded frames, as `read` does, that are decoded into their slots. The operation
        says where the frame begins, its digest is that of the payload, and nbytes are the block's; it is
        followed by the payload's bytes u64, those of the header u32, the type of the elements u16, and
        which of the recipes the frame may be of u16, from 1; 0 is none.
        EBADMSG where anything of it is not what was written. After any error the slot holds anything."""

    def moved(self) -> tuple[int, float, dict[tuple[int, int], tuple[int, float]]]:
        """Since the start: bytes of blocks and frames that were read while the kernel had 2.5 of them on
        average, over 0.1 s, and in how many seconds; and by codec and type of elements what was decoded:
        the blocks' bytes, and seconds of all decoders together."""

    def write(self, ops: Buffer, headers: Buffer = b"") -> None:
        """Queues writes, as `read` does: the header, copied here and filled up with zeros to whole pages,
        and after it the payload, as one record. With flag 2, `done` has the payload's xxh3-128. Flag 4
        seals the header as `seal_frame` does before it goes; EINVAL where that can't be done."""

    def sync(self, token: int, fd: int, deadline_ms: int = 0) -> None:
        """Queues an fdatasync for when every write to `fd` so far is over. Ends with the error of the
        first of those writes that did not succeed, if no sync has told of it yet."""

    def read_bytes(
        self,
        token: int,
        fd: int,
        offset: int,
        nbytes: int,
        urgent: bool = False,
        deadline_ms: int = 0,
        staged: bool = False,
    ) -> None:
        """Queues a read of at most 64 MiB, aligned or not, that `done` has the bytes of. If `staged`, it has
        a view of the worker's own memory, read-only: what is in use of that counts with what waits to be
        decoded, of which there is `staged_bytes` at most before another read begins."""

    def done(self) -> list[tuple[int, int, Any]]:
        """What is over since the last call: token, errno or 0, and the bytes, the view or the digest."""

    def forget(self, fd: int) -> None:
        """Forgets that writes to `fd` failed: for a descriptor that is closed without a sync. ValueError
        while writes or syncs of it are under way."""

    def stop(self, timeout_s: float = 5.0) -> int:
        """Ends what is queued with ECANCELED and joins the threads once the kernel has given back what it
        has. Returns how many operations it still has when the time is up: it can be called again. An
        object that goes with some of them left waits for a second and keeps their memory for good."""

    def overdue(self) -> int:
        """How many operations the kernel has that are past their deadline."""

    @property
    def queued(self) -> tuple[int, int, int]:
        """Urgent reads, reads, and writes and syncs that have not begun."""

    @property
    def in_flight(self) -> int:
        """How many operations the kernel has."""

    @property
    def engine(self) -> str: ...
    @property
    def why(self) -> str:
        """Why it is this engine."""

    @property
    def depth(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def registered_bytes(self) -> int:
        """How much memory is registered with the kernel, of each ring."""

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the threads; the kernel's own workers are not among them."""

def views(
    mappings: Sequence[Mapping | None], slots: Buffer, nbytes: int, writable: bool
) -> list[memoryview]:
    """Shows each slot's memory. IndexError outside its extent, ValueError if that is read-only."""

def release_views(views: list[memoryview]) -> int:
    """Releases each view and returns how many were left alone, as a slice of them or an array over
    them is still alive."""

def fresh(tables: Sequence[Mapping | None], slots: Buffer) -> int:
    """Counts the leading slots whose generation still stands in their extent's table."""

@final
class Buffers:
    """Blocks [first, first + count) of `nbytes` each, of a list of buffers or of one buffer for all; an
    `exact` one has nothing beyond them. Checks every size here, and keeps the memory."""

    def __init__(
        self,
        memory: _Blocks,
        first: int,
        count: int,
        nbytes: int,
        writable: bool = False,
        exact: bool = True,
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def copy_in(
    mappings: Sequence[Mapping | None],
    slots: Buffer,
    sources: Buffers,
    threads: int = 1,
    checksum: bool = False,
    at: _Integers | None = None,
) -> bytes:
    """Copies each source into its slot past the caches; with `at`, source `at[i]` into slot i. Returns
    the xxh3-128 digests, 16 bytes each, if asked for. Checks all bounds before it moves a byte."""

def copy_out(
    mappings: Sequence[Mapping | None],
    slots: Buffer,
    targets: Buffers,
    threads: int = 1,
    checksum: bool = False,
) -> bytes:
    """Copies each slot into its target: the reverse of `copy_in`."""

def seal_frame(header: bytearray, payload: Buffer) -> bytes:
    """Fills in a frame header's digests, as kvtier/codec/frame.py has them, and returns the payload's.
    ValueError where the header is none, or not of so many bytes."""

def encode_frame(codec: int, element: int, header: _Memory, block: _Memory, into: _Memory) -> int:
    """Encodes a block by its header that is still to be sealed, as `encode_parts` does, and fills in what
    that changes: codec, lengths, entries, and the block's digest if there is none. Lossless codecs only.
    Returns the payload's bytes; where no part shrinks they are the block's, and the header is as before.
    ValueError where the header is none of this block."""

def encode_lossy_frame(
    by: Recipe,
    element: int,
    header: _Memory,
    block: _Memory,
    into: _Memory,
    grids: Sequence[tuple[int, int, int, bool]],
    position: int,
) -> int:
    """The same by a lossy codec; there are grids for all parts or for none. The frame is of what comes back:
    decoding it is part of this, and the block's digest that of the outcome. Returns the block's bytes, too,
    where the block is not what its header's digest says."""

def decode_frame(
    element: int,
    header: _Memory,
    payload: _Memory,
    digest: bytes,
    into: _Memory,
    lossy: Recipe | None = None,
    come: Sequence[int] = (),
) -> bool:
    """Writes the block of an encoded frame to `into`, which has its size; `digest` is the payload's. False
    where a bit of header, payload or block is not what it should be, or the codec is a lossy one other than
    that which is given; then `into` holds anything. `come` are bytes of the payload that there are before
    all of it is: what they hold is decoded then, as a disk worker does while it reads."""

def encode_parts(
    codec: int,
    element: int,
    block: _Memory,
    sizes: Sequence[int],
    into: _Memory,
    grids: Sequence[tuple[int, int, int, bool]] = ...,
) -> list[tuple[int, int]]:
    """Encodes the parts of a block, which follow one another, without the GIL: 0 raw, 1 fix4, 2 r32, 4 q8,
    5 q4, 6 q2, of bf16 (0), fp16, fp32, e4m3 or e5m2 (4). The last three codecs want a grid for each part
    (rows, channels, channels of a head, by token) and leave raw what is not made up so. Returns each part's
    codec and bytes; they follow one another in `into` too, which must have room for all of the parts: one
    that does not shrink is kept raw. Writes the same bytes on every processor."""

def decode_parts(
    element: int, payload: _Memory, places: Sequence[tuple[int, int, int, int]], into: _Memory
) -> int:
    """Decodes parts, given by codec, offset, bytes and raw bytes, one after the other into `into`, without
    the GIL. Returns how many there are, or the number of one that is damaged; then what lies in `into`
    means nothing. Never reads outside of the payload or writes outside of `into`."""

@final
class Recipe:
    """How whole frames of one lossy codec are made and read. Any thread may use it."""

    @staticmethod
    def by_grids(codec: int) -> Recipe:
        """Of a codec that needs no profile."""

    @staticmethod
    def by_calibration(
        by: Calibration, profile: bytes, heads_first: bool, numbers: Sequence[tuple[int, int, int]]
    ) -> Recipe:
        """Of a calibrated one; `numbers` are of layers and parts, and which part of the calibration each
        is. What is not among them stays raw. `profile` is its name, 16 bytes."""

    def of_pages(self, parts: int, heads: bytes, tokens: bytes, dims: bytes) -> Recipe:
        """The same for blocks of pages, each a layer's parts in this order, as `reorder_pages` has it."""

@final
class Calibration:
    """One level of ecsq (7) or cachegen (8) for some parts. A rope is its turns, 8 bytes a pair of channels,
    and whether pairs are neighbours; a part is its heads, their channels, how many of those are exact, its
    rope or -1, means (float32), anchors' exponents, exponents and table. ValueError where they don't fit
    together."""

    def __init__(
        self,
        codec: int,
        level: int,
        group_tokens: int,
        ropes: Sequence[tuple[bytes, bool]],
        parts: Sequence[tuple[int, int, int, int, bytes, bytes, bytes, bytes]],
    ) -> None: ...

def encode_calibrated(
    by: Calibration,
    element: int,
    block: _Memory,
    sizes: Sequence[tuple[int, int]],
    heads_first: bool,
    position: int,
    into: _Memory,
) -> list[tuple[int, int]]:
    """As `encode_parts`, of parts given by their number in the calibration, or -1, and their bytes;
    `position` is that of the first token. With `heads_first` each head's tokens follow one another, else each
    token's heads. A part that is not made up so is kept raw, and so is one without a number."""

def decode_calibrated(
    by: Calibration,
    element: int,
    payload: _Memory,
    places: Sequence[tuple[int, int, int, int, int]],
    heads_first: bool,
    into: _Memory,
) -> int:
    """As `decode_parts`, of parts given by their number in the calibration, or -1, codec, offset, bytes and
    raw bytes."""

def reorder_pages(
    width: int,
    parts: int,
    heads: bytes,
    tokens: bytes,
    dims: bytes,
    src: _Memory,
    dst: _Memory,
    back: bool,
) -> None:
    """Writes the elements of pages, of 2 or 4 bytes, part by part, token by token, head by head; or `back`.
    A page has an element at the sum of its head's, token's and dim's places, 4 bytes each, those of the
    first part before those of the next. Without the GIL. Never reads or writes outside."""

def split_planes(width: int, src: _Memory, dst: _Memory) -> None:
    """Rotates elements of 1, 2 or 4 bytes left by a bit and puts bytes of like weight together, without the
    GIL, the lowest first."""

def join_planes(width: int, src: _Memory, dst: _Memory) -> None:
    """And back."""

@final
class Pieces:
    """Says where the pieces of an engine's paged blocks lie: piece j of block b is `piece_bytes[j]`
    long, at `offsets[j] + b * strides[j]` in the memory of `arrays[j]`. Keeps the arrays."""

    def __init__(
        self,
        arrays: Sequence[_Memory],
        offsets: Sequence[int],
        strides: Sequence[int],
        piece_bytes: Sequence[int],
    ) -> None: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def blocks(self) -> int:
        """How many blocks fit into every array."""

    @property
    def writable(self) -> bool: ...

def gather(
    pieces: Pieces,
    block_ids: _Integers,
    mappings: Sequence[Mapping | None],
    slots: Buffer,
    threads: int = 1,
    checksum: bool = False,
    nice: int = 0,
) -> bytes:
    """Copies the pieces of each engine block, one after the other, into its slot. Returns the
    digests of the slots' bytes if asked for. Checks all bounds before it moves a byte. With `nice`
    threads of that priority do it: others that want the cores go first."""

def scatter(
    pieces: Pieces,
    block_ids: _Integers,
    mappings: Sequence[Mapping | None],
    slots: Buffer,
    threads: int = 1,
    checksum: bool = False,
    nice: int = 0,
) -> bytes:
    """Copies each slot into the pieces of its engine block: the reverse of `gather`."""

def copy(dst: _Memory, src: _Memory, checksum: bool = False, threads: int = 1) -> bytes:
    """Copies a buffer past the caches. Returns its digest if asked for; then one thread does it."""

def nt_loop(dst: _Memory, src: _Memory) -> None:
    """Copies by the plain streaming loop: a baseline."""

def nt_loops(dsts: Sequence[_Memory], srcs: Sequence[_Memory]) -> None:
    """The same for many ranges in one call."""

def memcpy(dst: _Memory, src: _Memory) -> None:
    """Copies by the C library's memcpy: a baseline."""

def xxh3_128(data: _Memory, seed: int = 0) -> bytes:
    """Returns the 16 bytes of XXH3-128 in canonical order."""

def blake3(data: _Memory, key: Buffer | None = None) -> bytes:
    """Returns the 32 bytes of BLAKE3, keyed if there is a key."""

def chain_keys(
    secret: Buffer, parent: Buffer, tokens: _Integers, block_tokens: int, extras: Buffer = b""
) -> bytes:
    """Names whole blocks: key = BLAKE3 keyed with `secret` over (parent, byte 0, tokens as u32
    little endian, extras), and each key is the next one's parent. ValueError outside 0..2^32-1."""

def chain_hashes(
    secret: Buffer, parent: Buffer, hashes: Sequence[bytes], extras: Buffer = b""
) -> bytes:
    """Names blocks by an engine's own hashes of 16 to 64 bytes: as `chain_keys`, with (the hash's
    length as one byte, hash) in the place of (byte 0, tokens)."""

def cpu_features() -> dict[str, bool | str]:
    """Says what the processor has, and the level that is used of it."""

def implementations(kind: str) -> list[str]:
    """Names the implementations of "copy", "xxh3" or "blake3" that run here, the one taken by
    itself first."""

def force(kind: str, impl: str) -> None:
    """Makes this implementation run, in this process; "auto" is the first one."""

class Counts(TypedDict):
    blocks: dict[str, int]
    bytes: dict[str, int]
    framed_blocks: int  # that have a frame on disk, in memory or not
    framed_bytes: int
    nodes: int
    ghosts: int
    capacity_bytes: int
    free_bytes: int

class Policy:
    """What every native policy does; `kvtier.policy.base` says what."""

    def now(self, seconds: float) -> None: ...
    def added(self, ids: bytes, names: bytes = b"", parents: bytes = b"") -> None: ...
    def wanted(self, ids: bytes, names: bytes = b"") -> None: ...
    def refreshed(self, ids: bytes) -> None: ...
    def held(self, ids: bytes) -> None: ...
    def freed(self, ids: bytes) -> None: ...
    def left(self, ids: bytes) -> None: ...
    def gone(self, ids: bytes) -> None: ...
    def demoted(self, ids: bytes) -> None: ...
    def hinted(self, ids: bytes, importance: float) -> None: ...
    def victims(self, n: int) -> bytes: ...
    def __len__(self) -> int: ...
    def memory_bytes(self) -> int: ...

class Lru(Policy):
    def __init__(self) -> None: ...

class Lfu(Policy):
    def __init__(self) -> None: ...

class Arc(Policy):
    def __init__(self) -> None: ...

class S3Fifo(Policy):
    def __init__(self) -> None: ...

class Prefix(Policy):
    def __init__(self) -> None: ...

class Attention(Policy):
    def __init__(self) -> None: ...

class Value(Policy):
    def __init__(self) -> None: ...
    @staticmethod
    def with_constants(
        *,
        to_leave: float = ...,
        back: float = ...,
        fading: float = ...,
        judgements: float = ...,
        few: float = ...,
        memory: int = ...,
        more_seen: int = ...,
    ) -> Value:
        """For measurements: other constants than its own."""

class Notes:
    """What was last noted of blocks, by 64 bits of their keys, in memory of a fixed size: 16 bytes a note.
    Where there is no room, an older one of a few goes."""

    def __init__(self, nbytes: int) -> None: ...
    def note(self, keys: bytes, code: int, now: int, before: bytes = b"", also: int = 0) -> None:
        """Notes `code`, 1 to 255, of each key; where the last note was one of the codes in `before`, that
        code with the bits `also` instead."""

    def codes(self, keys: bytes) -> bytes:
        """The last note of each key; 0 for none."""

    def of(self, key: bytes) -> tuple[int, int]:
        """The last note of one key, and when it was made."""

    def __len__(self) -> int: ...
    def memory_bytes(self) -> int: ...

class Store:
    def __init__(self, ghosts: int = 65536) -> None: ...
    def add_extent(self, nbytes: int, generations: Buffer) -> int: ...
    def add_space(self, groups: Sequence[tuple[int, int, int]], shards: Sequence[int]) -> int: ...
    def drop_space(self, space: int) -> bool: ...
    def slot_bytes(self, space: int, group: int) -> int: ...
    def match(
        self, space: int, keys: bytes
    ) -> tuple[int, int, list[tuple[int, int, int, bytes]]]: ...
    def cold(self, space: int, keys: bytes, prefix: int) -> list[tuple[int, int, bytes, bytes]]: ...
    def resident(self, space: int, keys: bytes) -> bytes: ...
    def states(self, space: int, key: bytes) -> bytes: ...
    def probe(self, space: int, group: int, shard: int, keys: bytes) -> bytes: ...
    def present(self, space: int, group: int, shard: int, keys: bytes) -> bytes: ...
    def ancestors(self, space: int, group: int, shard: int, key: bytes, limit: int) -> bytes: ...
    def names(self, ids: bytes) -> bytes: ...
    @staticmethod
    def names_of_keys(keys: bytes, at: int) -> bytes: ...
    def parents(self, ids: bytes) -> bytes: ...
    def room(self, space: int, group: int, n: int) -> int: ...
    def make_room(
        self, space: int, group: int, n: int, victims: bytes
    ) -> tuple[bytes, bytes, bytes]: ...
    def note_evicted(self, on: bool) -> None: ...
    def take_evicted(self) -> bytes: ...
    def reserve(
        self,
        space: int,
        group: int,
        shard: int,
        parent: bytes | None,
        keys: bytes,
        statuses: bytes,
    ) -> tuple[bytes, bytes]: ...
    def commit(self, ids: bytes, checksums: bytes) -> None: ...
    def abort(self, ids: bytes) -> None: ...
    def quarantine(self, ids: bytes) -> None: ...
    def gone(self, ids: bytes) -> None: ...
    def evict(self, ids: bytes) -> bytes: ...
    def forget(self, ids: bytes) -> tuple[bytes, bytes, bytes]: ...
    def lease(self, ids: bytes) -> None: ...
    def unlease(self, ids: bytes) -> tuple[bytes, bytes]: ...
    def framed(self, ids: bytes, frames: bytes, checksums: bytes) -> bytes: ...
    def moved(self, ids: bytes, before: bytes, frames: bytes) -> bytes: ...
    def promote(self, ids: bytes) -> tuple[bytes, bytes]: ...
    def promoted(self, ids: bytes) -> tuple[bytes, bytes]: ...
    def unpromoted(self, ids: bytes) -> tuple[bytes, bytes]: ...
    def spoilt(self, ids: bytes) -> tuple[bytes, bytes, bytes]: ...
    def damaged(self, ids: bytes, frames: bytes) -> tuple[bytes, bytes, bytes]: ...
    def frames(self, ids: bytes) -> tuple[bytes, bytes]: ...
    def dirty(self, ids: bytes) -> bytes: ...
    def lossy(self, ids: bytes) -> bytes: ...
    def depths(self, ids: bytes) -> bytes: ...
    def coldest(self, ids: bytes, within_bytes: int, limit_bytes: int) -> tuple[bytes, bool]: ...
    def in_segment(self, segment: int, look: bool = False) -> tuple[bytes, bytes]: ...
    def still(self, ids: bytes, segment: int) -> bytes: ...
    def take_used(self, limit: int) -> bytes: ...
    def drop_segment(self, segment: int) -> tuple[bytes, bytes]: ...
    def restore(
        self, space: int, rows: bytes, segment: int, used: bytes = b""
    ) -> tuple[int, int, bytes]: ...
    def identities(self, ids: bytes) -> bytes: ...
    def ready(self, ids: bytes) -> int: ...
    def slots(self, ids: bytes) -> bytes: ...
    def checksums(self, ids: bytes) -> tuple[bytes, bytes]: ...
    def keys_of(self, ids: bytes) -> bytes: ...
    def tally(self, first: int, look: int) -> tuple[int, bytes]: ...
    def listed(self, space: int, first: int, look: int, limit: int) -> tuple[int, bytes]: ...
    def counts(self) -> Counts: ...
    def memory_bytes(self) -> int: ...
    def check(self) -> None: ...

def lifecycle() -> dict[tuple[str, str], str]: ...

@final
class Trace:
    """Requests that share prefixes, their blocks numbered by first sight. `names` are 8 bytes a block, those
    of a request one after the other; `lengths` u32 and `seconds` f64 are one for each request."""

    def __init__(self, names: bytes, lengths: bytes, seconds: bytes) -> None: ...
    @property
    def requests(self) -> int: ...
    @property
    def accesses(self) -> int: ...
    @property
    def unique(self) -> int: ...
    @property
    def repeats(self) -> int | None:
        """The first request that has a block twice."""

    def nodes(self) -> bytes:
        """The number of each block in turn, 4 bytes each."""

@final
class Replay:
    """One tier of so many blocks under an empty policy, which it fills."""

    def __init__(self, trace: Trace, policy: Policy, blocks: int) -> None: ...
    def run(self, requests: int) -> bytes:
        """Plays the next so many, without the GIL: how many blocks of each hit, 4 bytes each."""

@final
class Optimum:
    """One tier of so many blocks that knows the future: no policy hits more."""

    def __init__(self, trace: Trace, blocks: int) -> None: ...
    def run(self, requests: int) -> bytes: ...
