"""The process that has a directory's index open: `python -m kvtier_daemon.tiers.cold.index_child FD`.

LMDB maps its file, so a disk that fails ends the process that reads or writes it. That process is this one,
and the daemon starts another. It also takes the directory's lock, so that a disk that hangs when it is opened
keeps no thread of the daemon. It ends when the daemon's end of the socket is closed.

A message is a length of 4 bytes, little-endian, and that many bytes of msgpack; descriptors come with it.
"""

from __future__ import annotations

import array
import logging
import os
import resource
import select
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from kvtier.errors import TierError
from kvtier_daemon.claim import InUseError
from kvtier_daemon.notify import LogFormatter, to_journal
from kvtier_daemon.tiers.cold.directory_lock import claim, opened_path
from kvtier_daemon.tiers.cold.index import Entry, Index

LENGTH: Final = struct.Struct("<I")
FDS_MOST: Final = 2
ROWS: Final = 4096  # of a table, in one message


class LockIndex(msgspec.Struct, tag=True, frozen=True):
    """Take the lock of this directory for the daemon `pid`. The answer has two descriptors."""

    directory: str
    pid: int
    device: int | None  # that it has to be on, unless it is a mount point


class OpenIndex(msgspec.Struct, tag=True, frozen=True):
    """Open the index in this folder. With it come descriptors of the lock, to be held for as long as this
    process lives, and of the directory, in which the folder is opened."""

    folder: str
    limit_bytes: int


class ReadIndex(msgspec.Struct, tag=True, frozen=True):
    """Send all of a table, in several messages, the last one with fewer rows than `ROWS`."""

    table: bytes


class WriteIndex(msgspec.Struct, tag=True, frozen=True):
    """Write these changes, and answer when they are on disk with all before them, or can't be."""

    changes: list[Entry]


class CloseIndex(msgspec.Struct, tag=True, frozen=True):
    """Close the index, answer, and end."""


class IndexDone(msgspec.Struct, tag=True, frozen=True):
    """`failure` says what went wrong, if anything."""

    failure: str = ""
    holder: int = 0  # the process that has the directory
    name: bytes = b""  # of the directory


class IndexRows(msgspec.Struct, tag=True, frozen=True):
    rows: list[tuple[bytes, bytes]]


Request: TypeAlias = LockIndex | OpenIndex | ReadIndex | WriteIndex | CloseIndex
Reply: TypeAlias = IndexDone | IndexRows


class Channel:
    """One end of the socket. Raises EOFError where the other end is closed."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: Request | Reply, fds: tuple[int, ...] = ()) -> None:
        text = msgspec.msgpack.encode(message)
        try:
            socket.send_fds(self._end, [LENGTH.pack(len(text))], fds)
            self._end.sendall(text)
        except OSError as error:
            raise EOFError(f"the other process is gone: {error}") from error

    def receive(self) -> tuple[bytes, list[int]]:
        """The next message, to be decoded, and the descriptors that came with it."""
        room = socket.CMSG_LEN(FDS_MOST * array.array("i").itemsize)
        try:
            head, ancillary, _, _ = self._end.recvmsg(
                LENGTH.size, room, socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL
            )
            fds = array.array("i", b"".join(data for *_, data in ancillary))
            if len(head) < LENGTH.size:
                raise EOFError("the other process closed the connection")
            (left,) = LENGTH.unpack(head)
            text = bytearray()
            while len(text) < left:
                part = self._end.recv(min(left - len(text), 1 << 20))
                if not part:
                    raise EOFError("the other process closed the connection")
                text += part
        except OSError as error:
            raise EOFError(f"the other process is gone: {error}") from error
        return bytes(text), fds.tolist()

    def fileno(self) -> int:
        return self._end.fileno()

    def shut(self) -> None:
        """Both ends hear that it is over; who waits in `receive` too."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        self._end.close()


class Served:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._index: Index | None = None
        self._token = 0

    def run(self) -> None:
        while True:
            # Descriptors that came are not closed: the directory is in use until this process has ended.
            text, fds = self._channel.receive()
            request = msgspec.msgpack.decode(text, type=Request)
            match request:
                case LockIndex():
                    self._lock(request)
                case OpenIndex():
                    self._channel.send(self._open(request, fds[1]))
                case ReadIndex():
                    self._read(request.table)
                case WriteIndex():
                    self._channel.send(self._write(request.changes))
                case CloseIndex():
                    closed = self._index is None or self._index.close()
                    self._channel.send(
                        IndexDone("" if closed else "the index was not written in time")
                    )
                    return

    def _lock(self, request: LockIndex) -> None:
        try:
            *fds, name = claim(Path(request.directory), request.pid, request.device)
        except InUseError as error:
            self._channel.send(IndexDone(str(error), holder=error.holder))
            return
        except TierError as error:
            self._channel.send(IndexDone(str(error)))
            return
        self._channel.send(IndexDone(name=name), tuple(fds))
        os.close(fds[1])

    def _open(self, request: OpenIndex, directory_fd: int) -> IndexDone:
        folder = Path(request.folder)
        try:
            opened = opened_path(directory_fd) / folder.name
            self._index = Index(folder, request.limit_bytes, opened)
        except TierError as error:
            return IndexDone(str(error))
        return IndexDone("")

    def _read(self, table: bytes) -> None:
        assert self._index is not None
        rows = self._index.entries(table)
        for at in range(0, len(rows) + 1, ROWS):
            self._channel.send(IndexRows(rows[at : at + ROWS]))

    def _write(self, changes: list[Entry]) -> IndexDone:
        assert self._index is not None
        for table, key, value in changes:
            if value is None:
                self._index.drop(table, key)
            else:
                self._index.put(table, key, value)
        self._token += 1
        self._index.flush(self._token)
        while True:
            channel = self._channel.fileno()
            ready, _, _ = select.select([self._index.event_fd, channel], [], [])
            if channel in ready:
                raise EOFError(
                    "the daemon ended, or sent a request before the answer to its last one"
                )
            for token, failure in self._index.done():
                if token == self._token:
                    return IndexDone(failure)


def main() -> None:
    # The daemon says when it is over: what it was told last is still to be written.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(to_journal(2)))
    logging.basicConfig(handlers=[handler])
    try:
        Served(Channel(socket.socket(fileno=int(sys.argv[1])))).run()
    except EOFError:
        pass
    finally:
        os._exit(0)  # whatever thread still waits for the disk


if __name__ == "__main__":
    main()
