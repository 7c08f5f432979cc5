"""The types of the native module, and the effects of its functions."""

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
    """Maps the first `size` bytes of a file, shared. Unmaps them with its last reference;
    memoryviews count. The caller may close `fd` at once. Never maps beyond the end of the file."""

    def __init__(self, fd: int, size: int, writable: bool) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def size(self) -> int: ...
    @property
    def writable(self) -> bool: ...
    @property
    def address(self) -> int: ...
    def guard(self) -> None:
        """Keeps the process alive when a page of the file is missing: the first access to one
        replaces the whole mapping with zeroed private memory, and sets `lost`. Installs a SIGBUS
        handler."""

    @property
    def lost(self) -> bool: ...
    def populate(self) -> bool:
        """Faults all pages in without the GIL; returns False if the kernel refuses."""

@final
class Prefaulter:
    """Allocates the memory of files one by one, in a native thread, and adds 1 to the eventfd
    after each one that is done or has failed. Keeps its own duplicates of the descriptors."""

    def __init__(self, notify_fd: int, huge: bool = False) -> None:
        """`huge` requests huge pages after each step, and continues without them if refused."""

    def huge_bytes(self) -> int:
        """The number of bytes in huge pages."""

    def add(self, fd: int, size: int, lock: bool = False) -> int:
        """Queues a file and returns its index in `progress()`. `lock` locks it in memory (mlock)
        while this object exists."""

    def progress(self) -> list[tuple[int, int]]:
        """For each file the allocated bytes, and the errno that ended it or 0."""

    def stop(self) -> None:
        """Joins the thread within one step of 64 MiB. Queued files stay unallocated."""

@final
class Disk:
    """Moves blocks between files and mappings in native threads, and writes to the eventfd when
    `done()` has results: read the descriptor first, then call it. Only `stop` blocks. Keeps the
    mappings; the caller keeps each descriptor open, and each slot unchanged, until its operations
    complete.

    Operations are packed, 64 bytes each, little endian: token u64, fd i32, flags u32, file offset
    u64, nbytes u64, extent u32, deadline in ms from now u32 (0 means none), memory offset u64, and
    then a digest of 16 bytes (reads) or the position of a header in `headers`, u64, and its size,
    u64 (writes). Offsets are multiples of pages of 4 KiB; nbytes is rounded up to whole pages on
    disk and in memory.

    A queued operation whose deadline passes ends with ETIMEDOUT and moves nothing. An operation in
    the kernel cannot be cancelled; `overdue()` counts those. Operations have no order, except a
    sync and the writes before it.
    """

    def __init__(
        self,
        notify_fd: int,
        engine: str = "auto",
        depth: int = 8,
        threads: int = 1,
        decoders: int = 1,
        staged_bytes: int = ...,
    ) -> None:
        """`engine` is "io_uring", with a ring for each of `threads`; "threads", one for each
        operation of the depth, at most 64; or "auto": io_uring if the kernel allows it. OSError if
        a requested engine is refused. `depth` is the maximum number of operations in the kernel:
        all of it for urgent reads, an eighth less for others, half for writes. One write follows
        after 16 non-urgent reads. `decoders` threads decode frames of `read_frames` while others
        are read; no frame is read while `staged_bytes` of frames, by default 128 MiB, wait for
        them."""

    def register(self, mapping: Mapping, fixed: bool = True) -> int:
        """Adds a mapping and returns its index, `extent` in operations. A `fixed` one is
        registered with the kernel in the background, piece by piece, and used without registration
        if that is refused."""

    def release(self, extent: int) -> None:
        """Lets the kernel keep the pages of a mapping no longer; it stays usable."""

    def read(self, ops: Buffer) -> None:
        """Queues reads; all of them or, with an IndexError or a ValueError, none. Flag 1 means
        urgent: before all others. Flag 2 verifies: EBADMSG unless the xxh3-128 of the bytes equals
        the digest. ENODATA if the file ends before. After an error the memory is undefined."""

    def read_frames(
        self, ops: Buffer, lossy: Sequence[Recipe] = (), keys: Sequence[FrameKeys] = ()
    ) -> None:
        """Queues reads of encoded or encrypted frames, like `read`, and decodes them into their
        slots. The file offset is that of the frame, the digest is that of the payload, and nbytes
        is that of the block. The operation is followed by the size of the payload u64, that of the
        header u32, the type of the elements u16, the number of the recipe that the frame may have
        u16, that of the keys of an encrypted frame u32, both from 1, 0 means none, and the identity
        of an encrypted frame, 68 bytes. EBADMSG if the frame is damaged, ENOKEY if its key is not
        one of these. After any error the slot is undefined."""

    def moved(self) -> tuple[int, float, dict[tuple[int, int], tuple[int, float]]]:
        """Since the start: bytes of blocks and frames that were read while the kernel had on
        average 2.5 reads over 0.1 s, and the seconds for them; and by codec and type of elements
        the decoded bytes of blocks, and the sum of the seconds of all decoders."""

    def write(self, ops: Buffer, headers: Buffer = b"") -> None:
        """Queues writes, like `read`: the header, copied now and padded with zeros to whole pages,
        and after it the payload, as one record. With flag 2, `done` returns the payload's
        xxh3-128. Flag 4 seals the header like `seal_frame`; EINVAL if that fails."""

    def sync(self, token: int, fd: int, deadline_ms: int = 0) -> None:
        """Queues an fdatasync that starts when every earlier write to `fd` has ended. Ends with
        the error of the first of those writes that failed, unless an earlier sync reported it."""

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
        """Queues a read of at most 64 MiB, aligned or not; `done` returns its bytes. If `staged`,
        it returns a read-only view of the worker's memory, which counts towards `staged_bytes`
        until the view is released."""

    def done(self) -> list[tuple[int, int, Any]]:
        """The operations that ended since the last call: token, errno or 0, and the bytes, the
        view or the digest."""

    def forget(self, fd: int) -> None:
        """Clears the record of failed writes to `fd`, for a descriptor that is closed without a
        sync. ValueError while it has writes or syncs in progress."""

    def stop(self, timeout_s: float = 5.0) -> int:
        """Ends queued operations with ECANCELED, and joins the threads when the kernel has
        completed the others. Returns how many remain in the kernel after the timeout; then it can
        be called again. A destructor with operations left waits for a second and keeps their
        memory mapped."""

    def overdue(self) -> int:
        """The number of operations in the kernel whose deadline has passed."""

    @property
    def queued(self) -> tuple[int, int, int]:
        """The numbers of queued urgent reads, other reads, and writes with syncs."""

    @property
    def in_flight(self) -> int:
        """The number of operations in the kernel."""

    @property
    def engine(self) -> str: ...
    @property
    def why(self) -> str:
        """The reason for this engine."""

    @property
    def depth(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def registered_bytes(self) -> int:
        """The memory registered with the kernel, per ring."""

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the threads, without the kernel's own workers."""

def views(
    mappings: Sequence[Mapping | None], slots: Buffer, nbytes: int, writable: bool
) -> list[memoryview]:
    """Returns a view of each slot's memory. IndexError outside its extent, ValueError if that is
    read-only."""

def release_views(views: list[memoryview]) -> int:
    """Releases each view, except those that a slice or an array still uses; returns how many those
    are."""

def fresh(tables: Sequence[Mapping | None], slots: Buffer) -> int:
    """Counts the leading slots whose generation equals that in their extent's table."""

@final
class Buffers:
    """The blocks [first, first + count) of `nbytes` each, in a list of buffers or in one buffer
    for all; `exact` forbids further bytes. Checks all sizes now, and keeps the memory."""

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
    def write(self, number: int, data: _Memory) -> None:
        """Copies the content of one buffer, as many bytes as it has."""

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
    """Copies each source into its slot, bypassing the caches; with `at`, source `at[i]` into slot
    i. Returns the xxh3-128 digests, 16 bytes each, if requested. Checks all bounds before a byte
    moves."""

def copy_out(
    mappings: Sequence[Mapping | None],
    slots: Buffer,
    targets: Buffers,
    threads: int = 1,
    checksum: bool = False,
) -> bytes:
    """Copies each slot into its target: the reverse of `copy_in`."""

def copy_parts(
    mappings: Sequence[Mapping | None],
    slots: Buffer,
    starts: Sequence[int],
    each: int,
    targets: Buffers,
    threads: int = 1,
) -> None:
    """Copies, of each slot, `each` bytes from each of `starts`, one after another into its target.
    Checks all bounds before a byte moves."""

def copy_tokens(
    mappings: Sequence[Mapping | None],
    slots: Buffer,
    starts: Sequence[int],
    each: int,
    tokens: _Integers,
    block_tokens: int,
    first: int,
    targets: Buffers,
    threads: int = 1,
) -> bool:
    """Copies tokens of `each` bytes, one after another; there is a target for each of `starts`, where
    the tokens of every slot begin. The first slot contains the tokens from `first` on. Returns
    False, and copies nothing, if a token is in none of the slots."""

def seal_frame(header: bytearray, payload: Buffer) -> bytes:
    """Fills in a frame header's digests (see kvtier_daemon/codec/frame.py), and returns the
    payload's. ValueError if the header is invalid, or describes a payload of another size."""

def encode_frame(codec: int, element: int, header: _Memory, block: _Memory, into: _Memory) -> int:
    """Encodes a block as its unsealed header describes it, like `encode_parts`, and updates the
    header: codec, lengths, entries, and the block's digest if there is none. Lossless codecs only.
    Returns the size of the payload; if no part shrinks, it is the size of the block, and the
    header is unchanged. ValueError if the header does not describe this block."""

def encode_lossy_frame(
    by: Recipe,
    element: int,
    header: _Memory,
    block: _Memory,
    into: _Memory,
    grids: Sequence[tuple[int, int, int, bool]],
    position: int,
) -> int:
    """Encodes with a lossy codec; there are grids for all parts or for none. The frame describes
    the decoded block, so this decodes it too, and the block's digest is that of the result. Also
    returns the size of the block if it does not match the digest in its header."""

def decode_frame(
    element: int,
    header: _Memory,
    payload: _Memory,
    digest: bytes | None,
    into: _Memory,
    lossy: Recipe | None = None,
    arrived: Sequence[int] = (),
    keys: FrameKeys | None = None,
    identity: bytes = b"",
) -> bool:
    """Writes the block of an encoded frame to `into`, which has its size; `digest` is the
    payload's. Returns False if a bit of header, payload or block is wrong, or if the codec is a
    lossy one other than `lossy`; then `into` is undefined. Without a digest the frame may be in
    `planes`, and its payload is right if it decodes to the block. `arrived` are ascending amounts
    of the payload that have arrived: decodes after each, like a disk worker during a read. With
    `keys` the frame must be an encrypted one of this identity; the payload, which must be
    writable, is then undefined."""

@final
class FrameBatch:
    """Frames that were never on a disk: of each its element, its header without the zeros at its
    end, the bytes that it has with them, its payload, and memory for its block. Several threads may
    decode them."""

    def __init__(self, frames: Sequence[tuple[int, bytes, int, _Memory, _Memory]]) -> None: ...
    def run(self) -> None:
        """Decodes frames that no other thread decodes, as `decode_frame` without a digest, until
        none is left. Other threads run meanwhile."""

    def ends(self) -> bytes:
        """A byte for each frame: 1 if its block is right, 2 if it is wrong, 0 if no `run` has
        ended that decoded it."""

def read_frame_parts(
    frames: Sequence[tuple[int, int, int, int, int, int, bytes, bytes]],
    element: int,
    block_bytes: int,
    starts: Sequence[int],
    each: int,
    into: _Memory,
    threads: int = 1,
    layer_bytes: int = 0,
) -> bytes:
    """Reads, of the block of each frame, `each` bytes from each of `starts`, one after another into
    `into`. A frame is a descriptor, its place, the bytes of header and payload, codec, epoch,
    digest of the payload and identity. Reads the pages of the header, and of the entries that
    contain these bytes, and compares their digests. Returns a byte for each frame: 0 if it is
    damaged or another one, or a read failed; then its part of `into` is undefined. With
    `layer_bytes`, the bytes of a layer in a raw block, headers and layers of a few raw frames are
    read at the same time, by io_uring if the kernel permits it."""

@final
class FrameKeys:
    """The keys of one tenant for AES-256-GCM, by OpenSSL's libcrypto, without the GIL. Python code
    cannot read them. RuntimeError if there is no libcrypto.

    An identity is space, key, group u16 and shard u16, 68 bytes."""

    def __init__(self, keys: Sequence[tuple[bytes, bytes]]) -> None:
        """The ids, 8 bytes each, and the keys, 32 bytes each. The first one encrypts."""

    def encrypt(self, header: bytearray, payload: Buffer, into: _Memory, nonce: bytes) -> None:
        """Encrypts the payload of this unsealed header to `into`, which may be the payload, and
        updates the header: codec, key id, nonce, tag, and the block's digest, which is encrypted
        too; `seal_frame` must follow. A nonce of 12 bytes must never be used twice for one block.
        ValueError if the header does not describe the payload, or is encrypted already."""

    def decrypt(
        self, header: Buffer, payload: Buffer, identity: bytes, into: _Memory
    ) -> tuple[int, bytes]:
        """Decrypts the payload to `into`. Returns 0 and the block's digest; ENOKEY if the frame's
        key is not one of these, EBADMSG if the frame is damaged or of another identity: then `into`
        is undefined. Does not compare digests."""

def encode_parts(
    codec: int,
    element: int,
    block: _Memory,
    sizes: Sequence[int],
    into: _Memory,
    grids: Sequence[tuple[int, int, int, bool]] = ...,
) -> list[tuple[int, int]]:
    """Encodes consecutive parts of a block, without the GIL: 0 raw, 1 fix4, 2 r32, 4 q8, 5 q4, 6
    q2, 9 fp8, 10 e5m2, 11 nvfp4, 12 mxfp4, of bf16 (0), fp16, fp32, e4m3 or e5m2 (4). From q8 on,
    codecs need a grid for each part (rows, channels, channels of a head, by token), and store parts
    with another layout raw. Returns each part's codec and size; they are contiguous in `into`, which
    must have room for all unencoded parts: a part that does not shrink is stored raw. Writes the
    same bytes on every processor."""

def decode_parts(
    element: int, payload: _Memory, places: Sequence[tuple[int, int, int, int]], into: _Memory
) -> int:
    """Decodes parts, given by codec, offset, size and decoded size, one after another into `into`,
    without the GIL. Returns their number, or the index of a damaged one; then `into` is undefined.
    Never accesses memory outside of the payload and of `into`."""

@final
class Recipe:
    """The parameters for whole frames of one lossy codec. Thread-safe."""

    @staticmethod
    def by_grids(codec: int) -> Recipe:
        """For a codec that needs no profile."""

    @staticmethod
    def by_calibration(
        by: Calibration, profile: bytes, heads_first: bool, numbers: Sequence[tuple[int, int, int]]
    ) -> Recipe:
        """For a calibrated codec; `numbers` contains layer, part, and the number of the part in
        the calibration. Other parts stay raw. `profile` is the id of the profile, 16 bytes."""

    def of_pages(self, parts: int, heads: bytes, tokens: bytes, dims: bytes) -> Recipe:
        """The same for blocks of pages; a page is the parts of a layer in this order, as in
        `reorder_pages`."""

@final
class Calibration:
    """One level of ecsq (7) or cachegen (8) for some parts. A rope is its turns, 8 bytes per pair
    of channels, and whether the channels of a pair are adjacent. A part is its heads, their
    channels, how many of those are exact, its rope or -1, means (float32), the exponents of
    anchors, exponents, and the table. ValueError if they are inconsistent."""

    def __init__(
        self,
        codec: int,
        level: int,
        group_tokens: int,
        ropes: Sequence[tuple[bytes, bool]],
        parts: Sequence[tuple[int, int, int, int, bytes, bytes, bytes, bytes]],
    ) -> None: ...

@final
class DeviceBatch:
    """What all parts of a batch for a device's codec have in common. `known` are the parts of a
    calibration (KNOWN_PART of kvtier_kernels.cuda.codecs). The methods write the tables of a batch
    to `nbytes` bytes at this address, or as many of them as there is room for, and return the
    number of units and of payloads; the places of results, of payloads and of owners; the size of
    the tables, and that of the scratch memory on the device. ValueError if a part can not be
    processed."""

    def __init__(
        self,
        codec: int,
        element: int,
        heads_first: bool,
        position: int,
        known: _Memory,
        group_tokens: int,
    ) -> None: ...
    def to_decode(self, parts: _Memory, address: int, nbytes: int) -> tuple[int, ...]:
        """Of parts to decode (ENCODED_PART)."""

    def to_encode(
        self, parts: _Memory, payloads: _Memory, address: int, nbytes: int, scratch: int
    ) -> tuple[int, ...]:
        """Of parts to encode (RAW_PART) into payloads (PAYLOAD); the scratch memory has this
        address."""

def placed_blocks(
    block_ids: _Integers,
    blocks: int,
    mappings: Sequence[Mapping | None],
    slots: Buffer,
    nbytes: int,
    writable: bool,
    registered: Sequence[int],
) -> tuple[bytes, bytes, bytes | None]:
    """Returns the ids as 32-bit numbers, the addresses of the slots as 64-bit numbers, and a byte
    per slot that is 1 in these extents, or None if it is for all. IndexError for a block from
    `blocks` on and for a slot outside of its extent, ValueError if that is read-only and must not
    be."""

def encode_calibrated(
    by: Calibration,
    element: int,
    block: _Memory,
    sizes: Sequence[tuple[int, int]],
    heads_first: bool,
    position: int,
    into: _Memory,
) -> list[tuple[int, int]]:
    """Like `encode_parts`, for parts given by their number in the calibration, or -1, and their
    size; `position` is that of the first token. With `heads_first` the tokens of a head are
    contiguous, otherwise the heads of a token. A part with another layout or without a number is
    stored raw."""

def decode_calibrated(
    by: Calibration,
    element: int,
    payload: _Memory,
    places: Sequence[tuple[int, int, int, int, int]],
    heads_first: bool,
    into: _Memory,
) -> int:
    """Like `decode_parts`, for parts given by their number in the calibration, or -1, codec,
    offset, size and decoded size."""

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
    """Orders the elements of pages, of 2 or 4 bytes, by part, token and head; or `back`. The
    position of an element in a page is the sum of the positions of its head, token and dim, 4
    bytes each, those of the first part first. Without the GIL. Never accesses memory outside."""

def split_planes(width: int, src: _Memory, dst: _Memory) -> None:
    """Rotates elements of 1, 2 or 4 bytes left by a bit and groups bytes of equal weight, the
    lowest first. Without the GIL."""

def join_planes(width: int, src: _Memory, dst: _Memory) -> None:
    """The reverse of `split_planes`."""

@final
class Pieces:
    """The positions of the pieces of an engine's paged blocks: piece j of block b has
    `piece_bytes[j]` bytes at `offsets[j] + b * strides[j]` in the memory of `arrays[j]`. Keeps the
    arrays."""

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
        """The number of blocks that fit into every array."""

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
    """Copies the pieces of each engine block, one after another, into its slot. Returns the
    digests of the slots' bytes if requested. Checks all bounds before a byte moves. With `nice`,
    threads with that nice value copy."""

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
    """Copies a buffer, bypassing the caches. Returns its digest if requested; then it uses one
    thread."""

def copy_runs(
    dst: _Memory,
    src: _Memory,
    count: int,
    nbytes: int,
    dst_at: int,
    dst_step: int,
    src_at: int,
    src_step: int,
) -> None:
    """Copies `count` runs of bytes: where the first one is, and how far it is to the next one. The
    buffers must not overlap. Without the GIL. Never accesses memory outside."""

def nt_loops(dsts: Sequence[_Memory], srcs: Sequence[_Memory]) -> None:
    """Copies ranges with the plain streaming loop: a baseline."""

def memcpy(dst: _Memory, src: _Memory) -> None:
    """Copies with the C library's memcpy: a baseline."""

def xxh3_128(data: _Memory, seed: int = 0) -> bytes:
    """Returns the 16 bytes of XXH3-128 in canonical order."""

def blake3(data: _Memory, key: Buffer | None = None) -> bytes:
    """Returns the 32 bytes of BLAKE3; with a key, of keyed BLAKE3."""

def chain_keys(
    secret: Buffer, parent: Buffer, tokens: _Integers, block_tokens: int, extras: Buffer = b""
) -> bytes:
    """The keys of whole blocks: a key is BLAKE3 keyed with `secret` over (parent, byte 0, tokens
    as u32 little endian, extras), and each key is the next one's parent. ValueError outside
    0..2^32-1."""

def chain_hashes(
    secret: Buffer,
    parent: Buffer,
    hashes: Sequence[bytes],
    extras: Buffer = b"",
    alone: bool = False,
) -> bytes:
    """The keys of blocks from an engine's own hashes of 16 to 64 bytes: like `chain_keys`, with
    (the length of the hash as one byte, hash) in the place of (byte 0, tokens). With `alone`, `parent` is
    the parent of each key."""

def cpu_features() -> dict[str, bool | str]:
    """The features of the processor, and the level that is used."""

def implementations(kind: str) -> list[str]:
    """The implementations of "copy", "xxh3", "codec" or "blake3" that run on this machine, the
    default first."""

def force(kind: str, impl: str) -> None:
    """Selects an implementation for this process; "auto" is the default."""

def trim_heaps() -> None:
    """Gives the free pages of the C library's heaps to the system. Takes milliseconds, without the GIL."""

class Counts(TypedDict):
    blocks: dict[str, int]
    bytes: dict[str, int]
    below: list[int]  # the READY blocks that are only in tier 1, 2, ...
    framed_blocks: int  # with a frame, in memory or not
    framed_bytes: int
    nodes: int
    ghosts: int
    capacity_bytes: int
    free_bytes: int

class Policy:
    """The interface of every native policy; `kvtier_daemon.catalog.policy` describes it."""

    def now(self, seconds: float) -> None: ...
    def added(self, ids: bytes, names: bytes = b"", parents: bytes = b"") -> None: ...
    def wanted(self, ids: bytes, names: bytes = b"") -> None: ...
    def refreshed(self, ids: bytes) -> None: ...
    def held(self, ids: bytes) -> None: ...
    def freed(self, ids: bytes) -> None: ...
    def left(self, ids: bytes) -> None: ...
    def gone(self, ids: bytes) -> None: ...
    def demoted(self, ids: bytes) -> None: ...
    def hinted(self, ids: bytes, importance: float, names: bytes = b"") -> None: ...
    def victims(self, n: int) -> bytes: ...
    def __len__(self) -> int: ...
    def memory_bytes(self) -> int: ...

POLICIES: tuple[str, ...]

def make_policy(name: str) -> Policy: ...
def value_policy(
    *,
    to_leave: float = ...,
    back: float = ...,
    fading: float = ...,
    judgements: float = ...,
    few: float = ...,
    memory: int = ...,
    more_seen: int = ...,
) -> Policy:
    """The value policy with other constants, for measurements."""

class Notes:
    """The last note about blocks, by 64 bits of their keys, in memory of fixed size: 16 bytes per
    note. A new note replaces the oldest of a full set."""

    def __init__(self, nbytes: int) -> None: ...
    def note(self, keys: bytes, code: int, now: int, before: bytes = b"", also: int = 0) -> None:
        """Stores `code`, 1 to 255, for each key. If the last note of a key is one of the codes in
        `before`, keeps that code and adds the bits `also`."""

    def codes(self, keys: bytes) -> bytes:
        """The last note of each key; 0 if there is no note."""

    def of(self, key: bytes) -> tuple[int, int]:
        """The last note of one key, and its time."""

    def __len__(self) -> int: ...
    def memory_bytes(self) -> int: ...

class Store:
    def __init__(self, ghosts: int = 65536) -> None: ...
    def add_extent(self, nbytes: int, generations: Buffer, notes: Buffer | None = None) -> int: ...
    def add_space(
        self, groups: Sequence[tuple[int, int, int]], shards: Sequence[int], name: int = 0
    ) -> int: ...
    def drop_space(self, space: int) -> bool: ...
    def slot_bytes(self, space: int, group: int) -> int: ...
    def match(
        self, space: int, keys: bytes
    ) -> tuple[int, int, list[tuple[int, int, int, bytes]]]: ...
    def missing(
        self, space: int, keys: bytes, prefix: int
    ) -> list[tuple[int, int, bytes, bytes]]: ...
    def resident(self, space: int, keys: bytes) -> bytes: ...
    def states(self, space: int, key: bytes) -> bytes: ...
    def probe(
        self, space: int, group: int, shard: int, keys: bytes, live: bool = False
    ) -> bytes: ...
    def present(self, space: int, group: int, shard: int, keys: bytes) -> bytes: ...
    def ancestors(self, space: int, group: int, shard: int, key: bytes, limit: int) -> bytes: ...
    def names(self, ids: bytes) -> bytes: ...
    @staticmethod
    def damaged_notes(notes: Buffer) -> int: ...
    @staticmethod
    def names_of_keys(keys: bytes, at: int) -> bytes: ...
    def parents(self, ids: bytes) -> bytes: ...
    def room(self, space: int, group: int, n: int) -> int: ...
    def make_room(
        self, space: int, group: int, n: int, victims: bytes
    ) -> tuple[bytes, bytes, bytes]: ...
    def retire(self, extent: int) -> None: ...
    def retired_bytes(self, extent: int) -> int: ...
    def ready_in_retired(self) -> bytes: ...
    def leave_retired(self, unframed: bool, limit: int) -> tuple[bytes, bytes, bytes]: ...
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
        owner: int = 0,
        expires_ms: int = 0,
    ) -> tuple[bytes, bytes]: ...
    def adopt(
        self, pages: Sequence[tuple[int, int, int]], spaces: Sequence[tuple[int, int]]
    ) -> tuple[bytes, list[int], bytes, list[int], int]: ...
    def commit(self, ids: bytes, checksums: bytes) -> None: ...
    def abort(self, ids: bytes) -> None: ...
    def quarantine(self, ids: bytes) -> None: ...
    def gone(self, ids: bytes) -> None: ...
    def own(self, ids: bytes, owner: int) -> None: ...
    def regain(self, ids: bytes) -> None: ...
    def evict(self, ids: bytes) -> bytes: ...
    def forget(self, ids: bytes) -> tuple[bytes, bytes, bytes]: ...
    def lease(self, ids: bytes) -> None: ...
    def unlease(self, ids: bytes) -> tuple[bytes, bytes]: ...
    def framed(self, tier: int, ids: bytes, frames: bytes, checksums: bytes) -> bytes: ...
    def moved(self, ids: bytes, before: bytes, frames: bytes) -> bytes: ...
    def promote(self, ids: bytes) -> tuple[bytes, bytes]: ...
    def promoted(self, ids: bytes, checksums: bytes = b"") -> tuple[bytes, bytes]: ...
    def unpromoted(self, ids: bytes) -> tuple[bytes, bytes]: ...
    def spoilt(self, ids: bytes) -> tuple[bytes, bytes, bytes]: ...
    def damaged(self, ids: bytes, frames: bytes) -> tuple[bytes, bytes, bytes]: ...
    def frames(self, ids: bytes) -> tuple[bytes, bytes]: ...
    def dirty(self, ids: bytes) -> bytes: ...
    def clean(self, ids: bytes, in_memory: bool) -> bytes:
        """The READY blocks of these that have a frame: those in memory, or those only below."""

    def lossy(self, ids: bytes) -> bytes: ...
    def depths(self, ids: bytes) -> bytes: ...
    def coldest(self, ids: bytes, within_bytes: int, limit_bytes: int) -> tuple[bytes, bool]: ...
    def in_segment(self, segment: int, look: bool = False) -> tuple[bytes, bytes]: ...
    def still(self, ids: bytes, segment: int) -> bytes: ...
    def take_used(self, limit: int) -> bytes: ...
    def drop_segment(self, segment: int) -> tuple[bytes, bytes]: ...
    def restore(
        self, tier: int, space: int, rows: bytes, segment: int, used: bytes = b""
    ) -> tuple[int, int, bytes]: ...
    def identities(self, ids: bytes) -> bytes: ...
    def ready(self, ids: bytes) -> int: ...
    def slots(self, ids: bytes) -> bytes: ...
    def checksums(self, ids: bytes) -> tuple[bytes, bytes]: ...
    def keys_of(self, ids: bytes) -> bytes: ...
    def add_hot(self, nbytes: int, generations: Buffer) -> int: ...
    def drop_hot(self, number: int) -> None: ...
    def reserve_copies(self, number: int, ids: bytes, evict: bool) -> tuple[bytes, bytes]: ...
    def end_copies(self, number: int, ids: bytes, good: bool) -> None: ...
    def copies(self, number: int, ids: bytes, use: bool) -> bytes: ...
    def at(self, slots: bytes) -> bytes: ...
    def hot_counts(self, number: int) -> dict[str, int]: ...
    def tally(self, first: int, look: int) -> tuple[int, bytes]: ...
    def listed(self, space: int, first: int, look: int, limit: int) -> tuple[int, bytes]: ...
    def counts(self) -> Counts: ...
    def id_limit(self) -> int:
        """All ids that were ever used are below this."""

    def memory_bytes(self) -> int: ...
    def check(self) -> None: ...

@final
class Trace:
    """Requests that share prefixes; their blocks are numbered in the order of their first use.
    `names` has 8 bytes per block, in the order of the requests; `lengths` u32 and `seconds` f64
    have one item per request. So has `hints`, if it is not empty: the importance of these blocks, or -1
    if they were looked up or saved."""

    def __init__(
        self, names: bytes, lengths: bytes, seconds: bytes, hints: bytes = b""
    ) -> None: ...
    @property
    def requests(self) -> int: ...
    @property
    def accesses(self) -> int: ...
    @property
    def unique(self) -> int: ...
    @property
    def repeats(self) -> int | None:
        """The first request that contains a block twice."""

    def nodes(self) -> bytes:
        """The number of each block in order, 4 bytes each."""

@final
class Replay:
    """A tier of `blocks` blocks that starts empty, under an empty policy."""

    def __init__(self, trace: Trace, policy: Policy, blocks: int) -> None: ...
    def run(self, requests: int) -> bytes:
        """Replays the next `requests` requests without the GIL; returns the hits of each, 4 bytes
        each."""

@final
class Optimum:
    """A tier of `blocks` blocks with knowledge of the future: no policy has more hits."""

    def __init__(self, trace: Trace, blocks: int) -> None: ...
    def run(self, requests: int) -> bytes: ...
