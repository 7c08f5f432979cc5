"""What the next daemon needs to take over the arena: a manifest in shared memory, and stored descriptors.

The manifest says which extents belong to which tenant, what the spaces are whose numbers the notes of slots
contain, and which processes may still write to slots. It has two halves that are written in turn, so that a
daemon that is killed while it writes leaves the other one.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Mapping as Mapped
from typing import NamedTuple

import msgspec

from kvtier.layout import KvSpec
from kvtier.units import MIB, format_bytes
from kvtier_daemon.tiers.fd_store import FdStore, NoStore
from kvtier_kernels import Mapping, Store

log = logging.getLogger(__name__)

FORMAT = 2  # of the manifest, of the generations and of the notes of slots
MANIFEST = "kvtier-manifest"
HALF_BYTES = 64 * MIB  # sparse
HEAD = struct.Struct("<QQII")  # sequence, bytes, CRC-32 of the text, CRC-32 of the fields before
ID_BYTES = 8
PAGE = 4096
GENERATION_BYTES, NOTE_BYTES = 8, 128  # for each page
# No process may resize an extent, or seal it further. Not F_SEAL_FUTURE_WRITE: after it a restarted daemon
# could not map its own arena for writing, nor could a client that connects later. So a client can punch holes
# in its extents (measured on Linux 6.18: fallocate and MADV_REMOVE are refused under that seal alone).
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
ATTEMPTS = 2  # to take the same memory over
PARTS = ("data", "generations", "notes")


class KeptExtent(msgspec.Struct, frozen=True):
    id: str
    nbytes: int
    huge_pages: bool


class KeptTenant(msgspec.Struct):
    """`owner` changes with the tenant's users and its secret: then its memory is not taken over, because a
    user that left may have it mapped."""

    owner: bytes
    extents: list[KeptExtent] = []
    spaces: dict[int, tuple[bytes, KvSpec]] = {}  # by number: identity and description
    pins: list[tuple[int, bytes, float]] = []  # number of the space, keys, deadline


class KeptSession(msgspec.Struct, frozen=True):
    """A session that may write to slots. `pid` is a number in the namespace with this inode; `process` is the
    inode of the process's pidfd. `device`: a device writes to the slots."""

    tenant: str
    token: bytes
    pid: int
    pid_namespace: int
    process: int
    device: bool = False


class Format(msgspec.Struct):
    """The one field that every format of the manifest has."""

    format: object


class Manifest(msgspec.Struct):
    format: int = FORMAT
    attempts: int = 0  # to take it over
    tenants: dict[str, KeptTenant] = {}
    sessions: dict[int, KeptSession] = {}


class ExtentFiles(NamedTuple):
    """The descriptors of one extent: its data, its generations and the notes of its slots."""

    nbytes: int
    fd: int
    table_fd: int
    notes_fd: int


def head_of(sequence: int, text: bytes) -> bytes:
    head = HEAD.pack(sequence, len(text), zlib.crc32(text), 0)[:-4]
    return head + zlib.crc32(head).to_bytes(4, "little")


def owner_of(secret: bytes, uids: Iterable[int | str]) -> bytes:
    """Return what must stay the same for a tenant's memory to be taken over."""
    text = msgspec.msgpack.encode(sorted(map(str, uids)))
    return hashlib.blake2b(text, key=secret[:64], digest_size=16).digest()


def noted_pages(notes_fd: int, note_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of pages, as first and number, that were ever written and so may have notes."""
    at, end = 0, os.fstat(notes_fd).st_size
    while at < end:
        try:
            at = os.lseek(notes_fd, at, os.SEEK_DATA)
        except OSError:  # no more data
            return
        hole = os.lseek(notes_fd, at, os.SEEK_HOLE)
        yield at // note_bytes, -(-(hole - at) // note_bytes)
        at = hole


class KeptArena:
    """The arena of an earlier daemon, as far as it fits, and the manifest of this one's."""

    def __init__(self, store: FdStore, owners: Mapped[str, bytes], huge_pages: bool) -> None:
        self._store = store
        self._huge_pages = huge_pages
        self._fds = dict(store.take())
        self._sequence = 0
        self._fd = self._fds.pop(MANIFEST, -1)
        if self._fd >= 0 and not _is_memory(self._fd, 2 * HALF_BYTES):
            os.close(self._fd)
            self._fd = -1
        if self._fd >= 0 and (lock := _locked(self._fd)) < 0:
            log.error(
                "warm: another daemon uses the memory of the earlier one: this one begins with empty "
                "memory, which does not survive its end"
            )
            self._store = store = NoStore()
            for fd in (self._fd, *self._fds.values()):
                os.close(fd)
            self._fds, self._fd = {}, -1
        before = None
        try:
            before = self._read() if self._fd >= 0 else None
        except ValueError as error:
            log.error("warm: the memory of the earlier daemon is not used: %s", error)
        if self._fd < 0:
            self._fd = os.memfd_create(MANIFEST, os.MFD_CLOEXEC)
            os.fchmod(self._fd, 0o600)
            os.ftruncate(self._fd, 2 * HALF_BYTES)
            lock = _locked(self._fd)
            store.put(MANIFEST, self._fd)
        self._lock = lock
        if before is not None and before.attempts >= ATTEMPTS:
            log.error(
                "warm: the memory of the earlier daemon could not be taken over: it is not used"
            )
            before = None
        if before is not None:
            before.attempts += 1
            self._write(before)
        self._before = before or Manifest()
        self._now = Manifest(tenants={name: KeptTenant(owner) for name, owner in owners.items()})
        self.earlier_sessions = self._before.sessions
        self._now.sessions = dict(self.earlier_sessions)
        self.next_session = max(self._before.sessions, default=0) + 1

    # --- what an earlier daemon left ---------------------------------------------------------

    def take(self, tenant: str, quota_bytes: int) -> list[ExtentFiles]:
        """Return the extents of this tenant that can be taken over, at most its quota; the caller closes the
        descriptors. They stay in the manifest."""
        kept, now = self._before.tenants.get(tenant), self._now.tenants[tenant]
        if kept is None:
            return []
        if kept.owner != now.owner:
            log.warning(
                "warm: the users or the secret of tenant %s have changed: its %d extents from before the "
                "restart are not used", tenant, len(kept.extents),
            )  # fmt: skip
            return []
        taken: list[ExtentFiles] = []
        for extent in kept.extents:
            files = self._files(extent)
            if files is None:
                continue
            if sum(one.nbytes for one in taken) + extent.nbytes > quota_bytes:
                _close(files)
                continue
            taken.append(files)
            now.extents.append(extent)
        now.spaces, now.pins = dict(kept.spaces), kept.pins
        return taken

    def spaces(self, tenant: str) -> Mapped[int, tuple[bytes, KvSpec]]:
        """Return the tenant's spaces by number, as the notes of its slots call them."""
        return self._now.tenants[tenant].spaces

    def pins(self, tenant: str) -> Sequence[tuple[int, bytes, float]]:
        """Return the tenant's pins: the number of the space, the keys, and the deadline of each."""
        return self._now.tenants[tenant].pins

    def settle(self) -> None:
        """Hold only what was taken over, and write the manifest of this daemon."""
        held = set(self._names())
        for name, fd in self._fds.items():
            os.close(fd)
            if name not in held:
                self._store.remove(name)
        self._fds.clear()
        self._write()

    def _files(self, extent: KeptExtent) -> ExtentFiles | None:
        """Return the files of this extent if all are there and have the right size."""
        fds = [self._fds.get(f"{extent.id}-{part}", -1) for part in PARTS]
        if min(fds) < 0 or extent.huge_pages != self._huge_pages:
            return None
        sizes = part_bytes(extent.nbytes)
        if not all(map(_is_sealed, fds, sizes)):
            return None
        if damaged := _damaged_notes(fds[2], sizes[2]):
            log.error("warm: %d notes are damaged: their extent is not used", damaged)
            return None
        return ExtentFiles(extent.nbytes, *map(os.dup, fds))

    def _read(self) -> Manifest | None:
        """Return the newest half; None if it has another format, or if none was written. Raises ValueError if
        it is damaged.

        The text of a half is written before its head. So at a kill only the text of the older half can differ
        from its head. In any other case the older half is no substitute: it may lack processes that write."""
        halves = []
        for half in (0, HALF_BYTES):
            raw = os.pread(self._fd, HEAD.size, half)
            sequence, nbytes, crc, own = HEAD.unpack(raw) if len(raw) == HEAD.size else (0, 0, 0, 1)
            if any(raw) and zlib.crc32(raw[:-4]) != own:
                raise ValueError("its manifest is damaged")
            text = os.pread(self._fd, nbytes, half + HEAD.size) if nbytes <= HALF_BYTES else b""
            halves.append((sequence, zlib.crc32(text) == crc, text))
        (older, _, _), (self._sequence, is_whole, text) = sorted(halves)
        if not self._sequence:
            return None
        if not is_whole or self._sequence != older + 1:
            raise ValueError("its manifest is damaged")
        try:
            found = msgspec.msgpack.decode(text, type=Format).format
            if found == FORMAT:
                return msgspec.msgpack.decode(text, type=Manifest)
        except msgspec.DecodeError as error:
            found = str(error)
        log.warning(
            "warm: the arena of the earlier daemon has format %s, not %s: its blocks are not used", found,
            FORMAT,
        )  # fmt: skip
        return None

    # --- what this daemon leaves -------------------------------------------------------------

    def keep(self, tenant: str, files: ExtentFiles) -> None:
        """Hold a new extent."""
        extent = KeptExtent(f"kvtier-{secrets.token_hex(ID_BYTES)}", files.nbytes, self._huge_pages)
        for part, fd in zip(PARTS, files[1:], strict=True):
            self._store.put(f"{extent.id}-{part}", fd)
        self._now.tenants[tenant].extents.append(extent)
        self._write()

    def retire(self, tenant: str) -> None:
        """Hold the present extents of this tenant no longer."""
        now = self._now.tenants[tenant]
        for name in _names(now):
            self._store.remove(name)
        now.extents = []
        self._write()

    def keep_owners(self, owners: Mapped[str, bytes]) -> None:
        """Note the tenants' present users."""
        for tenant, owner in owners.items():
            self._now.tenants[tenant].owner = owner
        self._write()

    def keep_spaces(self, tenant: str, spaces: Mapped[int, tuple[bytes, KvSpec]]) -> None:
        """Note the tenant's spaces; before a slot is given to a block of a new one."""
        self._now.tenants[tenant].spaces = dict(spaces)
        self._write()

    def keep_pins(self, tenant: str, pins: Sequence[tuple[int, bytes, float]]) -> None:
        """Note the tenant's pins."""
        self._now.tenants[tenant].pins = list(pins)
        self._write()

    def session_began(self, number: int, session: KeptSession) -> None:
        """Note a session before it can write."""
        self._now.sessions[number] = session
        self._write()

    def session_ended(self, number: int) -> None:
        """The session no longer writes, or its process has ended."""
        if self._now.sessions.pop(number, None) is not None:
            self._write()

    def forget_sessions(self, numbers: Iterable[int]) -> None:
        """The same for several; the next write of the manifest is without them."""
        for number in numbers:
            self._now.sessions.pop(number, None)

    def drop(self) -> None:
        """Hold nothing, and store nothing more: the memory ends with the daemon."""
        for name in (MANIFEST, *self._names()):
            self._store.remove(name)
        self._store.close()
        self._store = NoStore()

    def close(self) -> None:
        self._store.close()
        os.close(self._fd)
        os.close(self._lock)

    @property
    def kept_bytes(self) -> int:
        return sum(one.nbytes for each in self._now.tenants.values() for one in each.extents)

    def _names(self) -> Iterator[str]:
        """Yield the names of the stored descriptors of all extents."""
        for tenant in self._now.tenants.values():
            yield from _names(tenant)

    def _write(self, manifest: Manifest | None = None) -> None:
        text = msgspec.msgpack.encode(manifest or self._now)
        if HEAD.size + len(text) > HALF_BYTES:  # pins of many tenants
            for tenant in self._now.tenants.values():
                tenant.pins = []
            text = msgspec.msgpack.encode(manifest or self._now)
        self._sequence += 1
        head = head_of(self._sequence, text)
        half = self._sequence % 2 * HALF_BYTES
        written = 0
        if len(head) + len(text) <= HALF_BYTES:
            written = os.pwrite(self._fd, text, half + len(head))
        if written == len(text):
            os.pwrite(self._fd, head, half)
        else:
            # An older manifest lacks sessions that may write, and spaces.
            for at in (0, HALF_BYTES):
                os.pwrite(self._fd, bytes(HEAD.size), at)
            log.error(
                "warm: cannot write a manifest of %s: the next daemon does not take over any block",
                format_bytes(len(text)),
            )


def part_bytes(extent_bytes: int) -> tuple[int, int, int]:
    """Return the sizes of an extent's data, generations and notes: one of each for a page."""
    pages = -(-extent_bytes // PAGE)
    return extent_bytes, pages * GENERATION_BYTES, extent_bytes // PAGE * NOTE_BYTES


def _damaged_notes(fd: int, nbytes: int) -> int:
    with memoryview(Mapping(fd, nbytes, False)) as notes:
        return sum(
            Store.damaged_notes(notes[first * NOTE_BYTES : (first + count) * NOTE_BYTES])
            for first, count in noted_pages(fd, NOTE_BYTES)
        )


def _is_memory(fd: int, nbytes: int) -> bool:
    found = os.fstat(fd)
    return stat.S_ISREG(found.st_mode) and found.st_size == nbytes


def _is_sealed(fd: int, nbytes: int) -> bool:
    """Whether this is memory of this size that no process can resize."""
    try:
        return _is_memory(fd, nbytes) and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:  # an ordinary file
        return False


def _locked(fd: int) -> int:
    """Lock a manifest for the life of this process; return the descriptor that has the lock, or -1 if another
    process has it. The stored descriptors share their lock, so the file is opened again."""
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(own)
        return -1
    return own


def clear(store: FdStore) -> None:
    """Let this store hold nothing of earlier daemons."""
    for name, fd in store.take().items():
        os.close(fd)
        store.remove(name)
    store.close()


def _names(tenant: KeptTenant) -> Iterator[str]:
    for extent in tenant.extents:
        yield from (f"{extent.id}-{part}" for part in PARTS)


def _close(files: ExtentFiles) -> None:
    for fd in files[1:]:
        os.close(fd)
