"""What the daemon and the process of the remote tier say to each other.

A message is a length of 4 bytes, little-endian, and that many bytes of msgpack. Contents of objects lie in
the buffer, memory that both have mapped; messages contain places in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import struct
from typing import Final, TypeAlias

import msgspec

LENGTH: Final = struct.Struct("<I")
LIMIT_BYTES: Final = 16 << 20
# Outcomes of a request. BROKEN: the object began to arrive, and its end did not. LOST: the store works, and
# the host that has the object does not answer.
DONE, ABSENT, TOO_LARGE, BROKEN, FAILED = "", "absent", "too_large", "broken", "failed"
LOST: Final = "lost"
CONNECT_S: Final = 3.0
STATUS: Final = re.compile(r"status code: (\d+ [A-Za-z ]+?)(?::|$)", re.MULTILINE)
CODE: Final = re.compile(r"<Code>([A-Za-z]+)</Code>")
TIMED_OUT: Final = "timed out"
WORDS: Final = (TIMED_OUT, "dns error", "certificate", "Connection refused", "Connection reset")


class StoreFailedError(Exception):
    """A request to the store failed; the text is the reason."""


def be_nice(by: int) -> None:
    """Let other threads go before this one, where the service's system call filter allows it."""
    with contextlib.suppress(OSError):
        os.nice(by)


def short_reason(error: Exception) -> str:
    """Return a short reason: the libraries' texts have many lines."""
    text = str(error)
    if isinstance(error, StoreFailedError):
        return text
    found = [*STATUS.findall(text)[:1], *CODE.findall(text)[:1]]
    if found:
        return ": ".join(found)
    for word in WORDS:
        if word.lower() in text.lower():
            return word
    first = text.splitlines()[0][:200] if text else type(error).__name__
    return first.partition(" - ")[2] or first


class OpenBucket(msgspec.Struct, tag=True, frozen=True):
    """Open this bucket, and list one object to check it. `secrets` has the credentials: their names and
    values as obstore calls them; without any, it looks for those of the environment and of the machine."""

    bucket: str
    prefix: str
    endpoint: str
    region: str
    secrets: dict[str, str]
    timeout_s: float


class OpenPool(msgspec.Struct, tag=True, frozen=True):
    """Join the Mooncake Store of this master, and lend it this much memory."""

    master: str  # HOST:PORT
    prefix: str
    metadata: str
    protocol: str
    devices: str
    host: str  # the address at which other hosts reach this one; empty: on the way to the master
    segment_bytes: int
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


OpenStore: TypeAlias = OpenBucket | OpenPool
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
