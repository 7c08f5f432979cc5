"""What the daemon and the process of the remote tier say to each other.

A message is a length of 4 bytes, little-endian, and that many bytes of msgpack. Contents of objects lie in
the buffer, memory that both have mapped; messages contain places in it.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Final, TypeAlias

import msgspec

LENGTH: Final = struct.Struct("<I")
LIMIT_BYTES: Final = 16 << 20
# Outcomes of a request. BROKEN: the object began to arrive, and its end did not.
DONE, ABSENT, TOO_LARGE, BROKEN, FAILED = "", "absent", "too_large", "broken", "failed"


class OpenStore(msgspec.Struct, tag=True, frozen=True):
    """Open this bucket, and list one object to check it. `secrets` has the credentials: their names and
    values as obstore calls them; without any, it looks for those of the environment and of the machine."""

    bucket: str
    prefix: str
    endpoint: str
    region: str
    secrets: dict[str, str]
    timeout_s: float


class PutObject(msgspec.Struct, tag=True, frozen=True):
    id: int
    name: str
    at: int
    nbytes: int


class GetObject(msgspec.Struct, tag=True, frozen=True):
    """Read an object of at most `room` bytes to this place."""

    id: int
    name: str
    at: int
    room: int


class HeadObjects(msgspec.Struct, tag=True, frozen=True):
    """Find out which of these objects exist."""

    id: int
    names: list[str]


class ListObjects(msgspec.Struct, tag=True, frozen=True):
    """Name the objects below this prefix, at most `most`, in several answers; the last one has no names."""

    id: int
    prefix: str
    most: int


class DeleteObjects(msgspec.Struct, tag=True, frozen=True):
    id: int
    names: list[str]


class Answer(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """The outcome of a request. `found` has a byte for each object of a HeadObjects."""

    id: int
    outcome: str = DONE
    text: str = ""  # why it failed
    nbytes: int = 0  # of the object
    first_s: float = 0.0  # until its first byte arrived
    found: bytes = b""
    names: list[str] = []


Request: TypeAlias = OpenStore | PutObject | GetObject | HeadObjects | ListObjects | DeleteObjects


def packed(message: Request | Answer) -> bytes:
    text = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(text)) + text


async def received(reader: asyncio.StreamReader) -> bytes:
    """Return the next message. Raises EOFError if there is none."""
    try:
        (nbytes,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if nbytes > LIMIT_BYTES:
            raise EOFError(f"a message of {nbytes} bytes")
        return await reader.readexactly(nbytes)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise EOFError("the other process is gone") from error
