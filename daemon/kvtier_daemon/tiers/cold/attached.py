"""The directories that the cold tier uses: each has its disk, a segment store for each tenant, and the
descriptions of spaces in its index. A disk that fails or hangs disables only what is on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvtier.errors import KvtierError, TierError
from kvtier.frame import pages
from kvtier.layout import KvSpec
from kvtier.units import format_bytes
from kvtier_daemon.tiers.cold.access_log import AccessLog
from kvtier_daemon.tiers.cold.directory import ColdDirectory, space_key
from kvtier_daemon.tiers.cold.disk import STAGED_BYTES, DirectoryDisk, anonymous
from kvtier_daemon.tiers.cold.encoder import decoders_here
from kvtier_daemon.tiers.cold.index import Change
from kvtier_daemon.tiers.cold.index_process import Child
from kvtier_daemon.tiers.cold.recovery import Recovered
from kvtier_daemon.tiers.cold.segment import TombstonePages
from kvtier_daemon.tiers.cold.segment_log import Segment
from kvtier_daemon.tiers.cold.segment_store import SegmentStore, SegmentTable
from kvtier_kernels import Mapping as MappedExtent

log = logging.getLogger(__name__)

LEAST_ALLOCATED = 8 << 20
LOCATION_S, LOCATION_FAILED_S = 10.0, 1.0
DETACH_S = 10.0
CANCELLED_S = 0.01
INDEX_S = 1.0  # least time for an index to be written and closed
FIND_S = 2.0  # longest time that requests wait for the scan of a directory

Restored = Callable[[str, Recovered, int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How each directory is divided among the tenants, and how its disk is used. `shares` and `secrets` are
    by tenant; `staged_bytes` is the memory of each disk for frames on their way to a decoder."""

    size_bytes: int  # of all directories
    segment_bytes: int
    shares: Mapping[str, float]
    engine: str = "auto"
    secrets: Mapping[str, bytes] = field(default_factory=dict)
    staged_bytes: int = STAGED_BYTES
    encrypted: bool = False  # all new frames are
    readers: Mapping[str, int | None] = field(default_factory=dict)  # groups, by tenant

    def segments_of(self, path: Path, segments_bytes: int) -> dict[str, int]:
        """Return each tenant's number of segments in a directory. Raises TierError if it is below three."""
        most = {
            tenant: int(segments_bytes * share) // self.segment_bytes
            for tenant, share in self.shares.items()
        }
        for tenant, segments in most.items():
            if segments < 3:
                text = (
                    f"tenant {tenant} would have {segments} segments of {self.segment_bytes} bytes"
                )
                raise TierError(f"cold: {path}: {text}, at least three are needed")
        return most


def open_directory(
    path: Path, size_bytes: int, child: Child | None = None, device: int | None = None,
    unwritten: Change | None = None, state: Path | None = None,
) -> ColdDirectory:  # fmt: skip
    """Open a directory as `ColdDirectory` does, and warn if its file system is too small. With the daemon's
    `state` folder, remove the segments of an older copy. Waits for the disk. Raises TierError."""
    try:
        directory = ColdDirectory(path, size_bytes, child, device, unwritten)
    except RuntimeError as error:
        raise TierError(f"cold: cannot start threads: {error}") from error
    if state is not None:
        try:
            directory.refuse_older(state)
        except BaseException:
            directory.close()
            raise
    with contextlib.suppress(OSError):
        if lacks := directory.lacks_bytes():
            log.warning(
                "cold: %s: its file system has %s less than its part of cold.size: using what "
                "is available, which files of others may reduce; lower cold.size or free space",
                path, format_bytes(lacks),
            )  # fmt: skip
    return directory


class SpaceDescriptions:
    """The descriptions of spaces in the index of one directory. A start needs them for the frames in a
    segment without a footer. `on_disk` has the tenant and identity of each space that is described on
    disk. The scan drops descriptions without frames: none is written before `scanned`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, directory: ColdDirectory, disk: DirectoryDisk, tenants: int
    ) -> None:  # fmt: skip
        self.on_disk: set[tuple[str, bytes]] = set()
        self.scanned = False
        self._loop = loop
        self._directory = directory
        self._disk = disk
        self._tenants = tenants
        self._writing: dict[tuple[str, bytes], asyncio.Future[str]] = {}
        self._taken_bytes: Counter[str] = Counter()  # by tenant
        self._flushing: dict[int, asyncio.Future[str]] = {}
        self._last_token = 0
        loop.add_reader(directory.index.event_fd, self._flushed)

    def describe(self, tenant: str, space: bytes, spec: KvSpec) -> asyncio.Future[str] | None:
        """Start to write the description of a space that is not on disk yet; the future has the failure, or
        an empty text. None before the end of the scan, if the disk is off, or if the tenant's part of the
        index has no room for it."""
        name = tenant, space
        if name in self._writing:
            return self._writing[name]
        if not (self.scanned and self._disk.writes.is_on):
            return None
        nbytes = _description_bytes(space, spec)
        if self._taken_bytes[tenant] + nbytes > self._directory.index_bytes // 4 // self._tenants:
            log.error(
                "cold: %s: tenant %s has too many spaces for the index; blocks of new "
                "ones are not written there", self._directory.path, tenant,
            )  # fmt: skip
            return None
        self._taken_bytes[tenant] += nbytes
        index = self._directory.index
        index.put(b"spaces", space_key(tenant, space), msgspec.msgpack.encode(spec))

        def written(flushing: asyncio.Future[str]) -> None:
            del self._writing[name]
            if flushing.result():
                self._taken_bytes[tenant] -= nbytes
            else:
                self.on_disk.add(name)

        flushing = self._writing[name] = self.flush()
        flushing.add_done_callback(written)
        return flushing

    def note(self, tenant: str, space: bytes, spec: KvSpec) -> None:
        """Note a description that is on disk."""
        self._taken_bytes[tenant] += _description_bytes(space, spec)
        self.on_disk.add((tenant, space))

    def flush(self) -> asyncio.Future[str]:
        """Start to make all changes of the index durable; the future has the failure, or an empty text."""
        self._last_token += 1
        flushing = self._flushing[self._last_token] = self._loop.create_future()
        self._disk.writes.began()
        self._directory.index.flush(self._last_token)
        return flushing

    def _flushed(self) -> None:
        for token, failure in self._directory.index.done():
            self._disk.writes.ended()
            flushing = self._flushing.pop(token)
            if not flushing.done():
                flushing.set_result(failure)

    def close(self) -> None:
        """End all flushes in progress with a failure, before the index is closed."""
        self._loop.remove_reader(self._directory.index.event_fd)
        while self._flushing:
            _, flushing = self._flushing.popitem()
            if not flushing.done():
                flushing.set_result("the cold tier was closed before its index was written")


def _description_bytes(space: bytes, spec: KvSpec) -> int:
    return len(space) + len(msgspec.msgpack.encode(spec))


@dataclass(slots=True, eq=False)
class AttachedDirectory:
    """A directory in use. `stores` has a store for each tenant."""

    directory: ColdDirectory
    disk: DirectoryDisk
    descriptions: SpaceDescriptions
    stores: dict[str, SegmentStore]
    table: SegmentTable
    is_stopped: bool = False  # its disk uses no file and no memory

    def discard(self) -> None:
        """Stop the disk at once, without closing the directory."""
        self.descriptions.close()
        self.disk.stop(0)

    async def recover(self, restored: Restored) -> None:
        """Find the blocks in the files, oldest first; `restored` gets each file with its segment number."""
        disk, directory, stores = self.disk, self.directory, list(self.stores.values())
        try:
            await disk.files.run(directory.read_index)
            await self._remove_other_tenants()
            # Scan all stores before a file is created: files that one store removes make room for another.
            found = [(store, file) for store in stores for file in await store.files.scan()]
        except Exception as error:
            log.exception(
                "cold: internal error while reading %s: not using this directory", directory.path
            )
            disk.lose(f"cannot read the segments of {directory.path}: {error}")
            return
        found.sort(key=lambda pair: pair[1].head.sequence if pair[1].head else -1)
        for store, file in found:
            try:
                # Opening a file may wait for the disk.
                fd = await disk.files.run(store.files.open, file.path)
                segment = store.adopt(file, fd)
                if file.head is not None:
                    await restored(store.tenant, file, segment.number)
            except (KvtierError, OSError, ValueError, struct.error) as error:
                log.error("cold: cannot use %s: %s", file.path, error)
                store.files.lose_room(file.path)
        epochs = {file.head.epoch for _, file in found if file.head is not None}
        directory.access_log.keep_only(epochs)
        for store in stores:
            for identity, spec in store.files.described.items():
                self.descriptions.note(store.tenant, identity, spec)
            store.resume([file for owner, file in found if owner is store])
            store.ready = True
            store.prepare()
        self.descriptions.scanned = True

    async def _remove_other_tenants(self) -> None:
        directory, disk, stores = self.directory, self.disk, list(self.stores.values())
        for tenant in set(await disk.files.run(directory.tenants)) - set(self.stores):
            text = "cold: %s: removing data of tenant %s, which is no longer configured"
            log.warning(text, directory.path, tenant)
            left = await disk.files.run(directory.remove, tenant)
            # They take room and cannot be used.
            for at in range(left):
                stores[at % len(stores)].files.lose_room()

    async def check_location(self, recovery: RecoveryProgress) -> None:
        """Check whether the path of the directory still leads to it."""
        directory, disk = self.directory, self.disk
        try:
            elsewhere = await disk.files.run(directory.elsewhere)
        except OSError as error:
            disk.lose(f"{directory.path}: its file system has failed: {error.strerror}")
            recovery.complete.clear()  # later forgets are repeated after the next scan
            return
        if elsewhere and not disk.elsewhere:
            log.error("cold: %s", elsewhere)
        disk.elsewhere = elsewhere

    def seal(self) -> None:
        """Begin no more segments, and start to write the footers of the open ones."""
        for store in self.stores.values():
            store.closing = True
            if store.log.open is not None and self.disk.writes.is_on:
                store.seal()

    def close_files(self) -> None:
        """Close the segment files. May wait for the disk."""
        for store in self.stores.values():
            self.table.close_files(store)


class DiskMemory:
    """The memory that the disks read into and write from. Each extent has the same number with all disks."""

    def __init__(self, attached: Sequence[AttachedDirectory]) -> None:
        self.mappings: dict[int, MappedExtent] = {}
        self._attached = attached
        self._fixed: set[int] = set()  # numbers of extents that are registered with the kernel

    def register(self, mapping: MappedExtent, fixed: bool = True) -> int:
        """Register an extent with all disks; return its number. A `fixed` extent is registered with the
        kernel until the tier is closed."""
        number = len(self.mappings) + 1  # 0 is the disk's own page
        for one in self._attached:
            if one.disk.worker.register(mapping, fixed) != number:
                raise TierError("cold: the disks number extents differently")
        self.mappings[number] = mapping
        if fixed:
            self._fixed.add(number)
        return number

    def release(self, number: int) -> None:
        """Let the kernel keep the pages of this extent no longer."""
        self._fixed.discard(number)
        for one in self._attached:
            one.disk.worker.release(number)

    def register_with(self, disk: DirectoryDisk) -> None:
        """Register all extents with a new disk. Raises OSError."""
        for number, mapping in self.mappings.items():
            disk.worker.register(mapping, number in self._fixed)

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """Allocate at least this much memory outside the arena; return its number and size. It is never
        freed, so the size is doubled at each call."""
        nbytes = max(LEAST_ALLOCATED, 1 << (pages(nbytes) - 1).bit_length())
        return self.register(anonymous(nbytes), fixed=False), nbytes


class ReadMemory:
    """Memory outside the arena that one task reads blocks into."""

    def __init__(self, memory: DiskMemory) -> None:
        self._memory = memory
        self._held = (0, 0)

    def of(self, nbytes: int) -> int:
        """Return the number of memory with at least this size."""
        if self._held[1] < nbytes:
            self._held = self._memory.allocate(nbytes)
        return self._held[0]

    def leave(self) -> None:
        """Use other memory from now on: a disk may still write to this."""
        self._held = (0, 0)


class RecoveryProgress:
    """`complete` is set when the blocks of all directories are known. `is_awaited` is True while directories
    are scanned and requests may wait for the result: a scan that takes long is not waited for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.complete = asyncio.Event()
        self.is_awaited = False
        self.scanning = 0  # directories that are being scanned
        self._loop = loop
        self._calls: dict[Hashable, Callable[[], None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def began(self, directories: int = 1) -> None:
        """Note the start of the scans of this many directories."""
        self.scanning += directories
        self.is_awaited = self.scanning > 0
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(FIND_S, self._end_wait)

    def _end_wait(self) -> None:
        self.is_awaited = False

    def ended(self, is_all: bool, directories: int = 1) -> None:
        """Note the end of these scans; `is_all` says whether all directories can be used."""
        self.scanning -= directories
        if not self.scanning:
            self.is_awaited = False
            if is_all:
                self.complete.set()
            while self._calls:
                self._loop.call_soon(self._calls.popitem()[1])

    @property
    def is_complete(self) -> bool:
        return self.complete.is_set()

    def call_when_ended(self, name: Hashable, then: Callable[[], None]) -> None:
        self._calls[name] = then

    def cancel_calls(self, name: Hashable) -> None:
        self._calls.pop(name, None)


class AttachedDirectories:
    """Attaches and detaches directories. `attached` has those in use. `missing` has the others, and why they
    are not in use. `reclaim(store, segment)` is called when the oldest segment of a store is to be reused."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, options: StoreOptions, table: SegmentTable,
        reclaim: Callable[[SegmentStore, Segment], None], missing: Mapping[Path, str],
    ) -> None:  # fmt: skip
        self.attached: list[AttachedDirectory] = []
        self.missing = dict(missing)
        self.closing: dict[ColdDirectory, asyncio.Task[None]] = {}  # that were detached
        self.memory = DiskMemory(self.attached)
        self.recovery = RecoveryProgress(loop)
        self._loop = loop
        self._options = options
        self._table = table
        self._reclaim = reclaim
        self._earlier_faults = 0  # of disks that are closed
        self._checking: set[asyncio.Task[None]] = set()
        self._checks_at = time.monotonic() + LOCATION_S

    def add(self, directory: ColdDirectory) -> AttachedDirectory:
        """Start a disk, and a store for each tenant. Raises TierError, and never closes the directory."""
        for one in self.attached:
            # A copy may hold blocks that were forgotten in the other one.
            if one.directory.name == directory.name:
                raise TierError(
                    f"cold: {directory.path} is a copy of {one.directory.path}: remove one of them "
                    "from cold.directories, or empty it"
                )
        options, path = self._options, directory.path
        most = options.segments_of(path, directory.segments_bytes)
        with contextlib.ExitStack() as undo:
            try:
                disk = DirectoryDisk(
                    self._loop, str(path), options.engine, time.monotonic,
                    decoders_here(options.encrypted), options.staged_bytes,
                )  # fmt: skip
                undo.callback(disk.stop, 0)
                self.memory.register_with(disk)
            except (OSError, RuntimeError) as error:
                text = f"cold: {path}: cannot start an I/O worker ({options.engine}): {error}"
                raise TierError(text) from error
            undo.pop_all()
        stores = {
            tenant: SegmentStore(
                self._loop, tenant, directory, disk, self._table, options.segment_bytes, segments,
                self._reclaim, self.memory.mappings, options.secrets.get(tenant, b""),
                options.encrypted, options.readers.get(tenant),
            )
            for tenant, segments in most.items()
        }  # fmt: skip
        descriptions = SpaceDescriptions(self._loop, directory, disk, len(stores))
        self.attached.append(AttachedDirectory(directory, disk, descriptions, stores, self._table))
        return self.attached[-1]

    def stores(self) -> list[SegmentStore]:
        return [store for one in self.attached for store in one.stores.values()]

    # --- state -------------------------------------------------------------------------------

    @property
    def faults(self) -> int:
        """Faults of all disks since the start of the daemon, and files that cannot be used."""
        unreadable = sum(store.files.unreadable for store in self.stores())
        return unreadable + self._earlier_faults + sum(one.disk.faults for one in self.attached)

    def inherit(self, other: AttachedDirectories) -> None:
        """Continue the counter of an earlier tier."""
        faults = sum(one.disk.faults for one in other.attached)
        self._earlier_faults += other._earlier_faults + faults

    @property
    def unknown(self) -> str:
        """Why some blocks on the disks may be unknown, or an empty text."""
        given_up = [one.disk.failure for one in self.attached if one.disk.reads.given_up]
        if given_up or self.missing:
            return "; ".join([*self.missing.values(), *given_up])
        files = sum(store.files.unreadable for store in self.stores())
        return f"{files} files could not be read at the start" if files else ""

    def give_up(self, why: str) -> None:
        for one in self.attached:
            one.disk.give_up(why)

    @property
    def given_up(self) -> bool:
        """Whether part of the tier is disabled until a restart."""
        return any(one.disk.writes.given_up and not one.disk.lost for one in self.attached)

    def run_periodic(self) -> None:
        """Check the disks and the locations of the directories, and write tombstones that failed."""
        for one in self.attached:
            one.disk.check()
            for store in one.stores.values():
                store.tombstones.retry()
        if time.monotonic() >= self._checks_at:
            disks = [one.disk for one in self.attached]
            fails = any(disk.reads.failure or disk.writes.failure for disk in disks)
            self._checks_at = time.monotonic() + (LOCATION_FAILED_S if fails else LOCATION_S)
            self.check_locations()

    def check_locations(self) -> None:
        """Start to check whether the path of each directory still leads to it."""
        for one in self.attached:
            if not one.disk.files.is_busy and not one.disk.lost and not one.disk.is_over:
                checking = self._loop.create_task(one.check_location(self.recovery))
                self._checking.add(checking)
                checking.add_done_callback(self._checking.discard)

    # --- attaching and detaching -------------------------------------------------------------

    async def recover(self, restored: Restored) -> None:
        """Find the blocks in the files of all directories, each independently of the others."""
        scanned = list(self.attached)
        await asyncio.gather(*(one.recover(restored) for one in scanned))
        self._recovered(len(scanned))

    async def attach(self, directory: ColdDirectory, restored: Restored) -> None:
        """Start to use this directory, and find its blocks. Closes it if it raises TierError."""
        try:
            one = self.add(directory)
        except TierError:
            await asyncio.to_thread(directory.close)
            raise
        del self.missing[directory.path]
        self.recovery.began()
        try:
            await one.recover(restored)
        except BaseException:
            self.recovery.scanning -= 1
            self.recovery.is_awaited &= self.recovery.scanning > 0
            raise
        self._recovered(1)

    def _recovered(self, directories: int) -> None:
        lost = any(one.disk.lost for one in self.attached)
        self.recovery.ended(not (lost or self.missing), directories)

    def lost(self, path: Path) -> AttachedDirectory | None:
        """Return this directory if it has to be closed and opened again."""
        for one in self.attached:
            if one.directory.path == path and one.disk.lost:
                return one
        return None

    async def detach(
        self, one: AttachedDirectory, cancel_reads: Callable[[DirectoryDisk], None]
    ) -> list[tuple[str, int]]:
        """Stop to use a lost directory after its last operation has ended; return the tenants and numbers of
        its segments. `cancel_reads` cancels the reads that wait for a disk that is off. Then the directory is
        closed in the background: `closed` waits for that."""
        self.recovery.complete.clear()
        for store in one.stores.values():
            store.closing = True
        await one.disk.quiet()
        segments = [
            (store, segment)
            for segment, store in zip(self._table.segments, self._table.stores, strict=True)
            if store.disk is one.disk
        ]
        while any(segment.reading for _, segment in segments):
            cancel_reads(one.disk)
            await asyncio.sleep(CANCELLED_S)
        self.attached.remove(one)
        self.missing[one.directory.path] = one.disk.lost
        self._earlier_faults += one.disk.faults
        for store in one.stores.values():
            for releasing in store.releasing.values():
                releasing.cancel()
        for _, segment in segments:  # their numbers are not used again
            segment.tombstones = TombstonePages(0)
        self.closing[one.directory] = self._loop.create_task(self._close_detached(one))
        return [(store.tenant, segment.number) for store, segment in segments]

    async def _close_detached(self, one: AttachedDirectory) -> None:
        while not await one.disk.close(DETACH_S):
            await one.disk.quiet()
        one.descriptions.close()
        await asyncio.to_thread(one.close_files)
        await asyncio.to_thread(one.directory.close)
        one.directory.access_log = AccessLog(one.directory.index)

    async def closed(self, directory: ColdDirectory) -> None:
        await asyncio.shield(self.closing[directory])
        del self.closing[directory]

    async def stop_disks(self, timeout_s: float) -> bool:
        """Write footers, so that the next start is fast, then stop the disks; False if one hangs."""
        for one in self.attached:
            one.seal()
        ended = await asyncio.gather(*(one.disk.close(timeout_s) for one in self.attached))
        for one, is_stopped in zip(self.attached, ended, strict=True):
            one.is_stopped = is_stopped
        return all(ended)

    async def close(self, timeout_s: float) -> bool:
        """Close the files of stopped disks, and the indexes. False if an index is not closed in time."""
        for one in self.attached:
            if one.is_stopped:
                one.close_files()
            one.descriptions.close()
        timeout_s = max(INDEX_S, timeout_s)
        closing = [
            self._loop.create_task(asyncio.to_thread(one.directory.close, timeout_s))
            for one in self.attached
        ]
        waited = [*closing, *self.closing.values()]
        # Closing the files of an index may take longer than its last write.
        hang = (await asyncio.wait(waited, timeout=timeout_s + INDEX_S))[1] if waited else set()
        return not hang and all(task.result() for task in closing)
