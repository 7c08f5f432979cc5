"""An object: the frame of one block, as on disk, without the padding of the payload.

     header pages │ payload

Its name is `v1/SPACE/KEY-GROUP-SHARD` in hexadecimal and decimal digits, so two hosts that put the same block
put the same object. The bucket is not trusted: what an object says is checked against the block that was
asked for, and its bytes against the digests of the frame. These detect damage and mistakes, not intent:
whoever can write to the bucket can write a frame with correct digests. A tag of an encrypted frame also
detects that, so a tier that encrypts accepts no other frames.

The memory of an object is shared with the process that talks to the store. The block of an encrypted object
is only in other memory, and of its header a copy is read, so that the process sees and changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvtier import frame
from kvtier.errors import FrameError
from kvtier.frame import ELEMENTS, ENCRYPTED, HEADER, RAW, Entry, Identity, Template
from kvtier.layout import KvSpec
from kvtier_daemon.codec import framing
from kvtier_daemon.codec.base import Codec
from kvtier_daemon.codec.block_parts import entries
from kvtier_daemon.codec.encryption import FrameCipher, UnknownKeyError
from kvtier_daemon.codec.table import BY_NUMBER
from kvtier_kernels import copy, decode_frame, seal_frame, xxh3_128

VERSION = "v1"
KEY_DIGITS = 64
ANY_KEY = "0" * KEY_DIGITS
HEXADECIMAL = re.compile(r"[0-9a-f]*")


def object_name(of: Identity) -> str:
    return f"{folder_of(of.space)}{of.key.hex()}-{of.group}-{of.shard}"


def folder_of(space: bytes) -> str:
    return f"{VERSION}/{space.hex()}/"


def identity_of(name: str) -> Identity | None:
    """Return the block of an object with this name; None if it is no name of a block."""
    try:
        version, space, last = name.split("/")[-3:]
        key, group, shard = last.split("-")
        one = Identity(bytes.fromhex(space), int(group), int(shard), bytes.fromhex(key))
    except ValueError:
        return None
    is_name = version == VERSION and len(one.space) == len(one.key) == 32
    return one if is_name and max(one.group, one.shard) < 256 else None


def keys_of(space: bytes, names: Iterable[str]) -> dict[tuple[int, int], bytes]:
    """Return the keys of those of these objects that are blocks of this space, by group and shard."""
    folder, hexadecimal = folder_of(space)[:-1], dict[str, list[str]]()
    for name in names:
        head, _, last = name.rpartition("/")
        if head == folder or head.endswith(f"/{folder}"):
            hexadecimal.setdefault(last[KEY_DIGITS:], []).append(last[:KEY_DIGITS])
    found: dict[tuple[int, int], bytes] = {}
    for place, keys in hexadecimal.items():
        digits = "".join(keys)
        if HEXADECIMAL.fullmatch(digits) is None:
            digits = "".join(one for one in keys if HEXADECIMAL.fullmatch(one) is not None)
        of = identity_of(f"{folder}/{ANY_KEY}{place}")
        if of is not None and digits:
            at = of.group, of.shard
            found[at] = found.get(at, b"") + bytes.fromhex(digits)
    return found


class Headers:
    """The headers of the frames of one place of a space. `parts`: of frames that contain no blocks."""

    def __init__(
        self, spec: KvSpec, space: bytes, group: int, shard: int, parts: tuple[Entry, ...] = ()
    ) -> None:  # fmt: skip
        self.template = Template(space, group, shard, RAW, parts or entries(spec, group))
        self.dtype = spec.dtype

    @property
    def most_bytes(self) -> int:
        """The size of the largest object."""
        return self.template.header_bytes + self.template.raw_bytes


def encode(
    headers: Headers, codec: Codec, cipher: FrameCipher | None, key: bytes, parent: bytes, digest: bytes,
    block: memoryview, into: memoryview,
) -> int:  # fmt: skip
    """Write the object of a block to `into`; return its size, or 0 if the block is not the one that was
    saved. Encrypts if the cipher does."""
    template = headers.template
    size = template.header_bytes
    payload, nbytes, header = into[size : size + len(block)], len(block), template.blank(digest)
    encrypts = cipher is not None and cipher.encrypts
    encoded = memoryview(bytearray(nbytes)) if encrypts else payload
    if codec.number != RAW and framing.suits(codec, headers.dtype):
        nbytes = framing.encode(codec, headers.dtype, header, block, encoded)
    if nbytes >= len(block):
        nbytes, header = len(block), template.blank(digest)
        if copy(encoded, block, checksum=True) != digest and digest:
            return 0
    elif digest and xxh3_128(block) != digest:
        return 0
    frame.stamp(header, key, parent, 0, 0)
    if cipher is not None and encrypts:
        cipher.encrypt(header, encoded[:nbytes], payload)
    seal_frame(header, payload[:nbytes])
    into[:size] = header
    return size + nbytes


def decode(
    of: Identity, dtype: str, cipher: FrameCipher | None, text: memoryview, into: memoryview
) -> bytes:
    """Write the block of an object to `into`; return the block's digest. Raises FrameError if the object is
    not a good frame of that block, or not encrypted although the cipher encrypts, and UnknownKeyError;
    `into` is then undefined."""
    header = bytes(text[: frame.peek(bytes(text[: HEADER.size]))])
    one = frame.decode(header)
    payload = text[len(header) :]
    if one.identity != of or one.lossy_generation:
        raise FrameError("the object contains another block")
    if one.payload_bytes != len(payload) or one.raw_bytes != len(into):
        raise FrameError(f"{len(payload)} bytes of a payload of {one.payload_bytes}")
    codec = BY_NUMBER.get(one.codec & ~ENCRYPTED)
    if codec is None or codec.lossy:
        raise FrameError(f"the frame has codec {one.codec}")
    if one.codec & ENCRYPTED:
        if cipher is None:
            raise UnknownKeyError("the object is encrypted, and no key is configured")
        decrypted = bytearray(len(payload))
        digest = cipher.decrypt(header, payload, of, decrypted)
        codec.decode(decrypted, one.entries, dtype, into)
        if xxh3_128(into) != digest:
            raise FrameError("block digest mismatch after decoding")
        return digest
    if cipher is not None and cipher.encrypts:
        raise FrameError("the object is not encrypted")
    if codec.number == RAW:
        is_good = copy(into, payload, checksum=True) == one.payload_digest == one.raw_digest
    elif codec.native and dtype in ELEMENTS:
        is_good = decode_frame(
            ELEMENTS[dtype], bytearray(header), payload, one.payload_digest, into
        )
    else:
        framing.decode(text, len(header), one.payload_digest, dtype, into)
        is_good = True
    if not is_good:
        raise FrameError("the payload is damaged")
    return one.raw_digest
