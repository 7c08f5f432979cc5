"""A third tier, for tests only: it keeps blocks in host memory, and has the faults that a test plants.

It is written against `tiers/base.py` alone, and is given to the daemon as `App(..., lower=HostMemory)`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

from kvtier.errors import TierError
from kvtier.wire import DIGEST_BYTES, SLOT
from kvtier_daemon.catalog import KnownSpace
from kvtier_daemon.catalog.demotion import Demotion
from kvtier_daemon.catalog.frames import FRAME, PLACE_BYTES
from kvtier_daemon.catalog.holds import Request
from kvtier_daemon.config.current import CurrentConfig
from kvtier_daemon.config.schema import Config
from kvtier_daemon.internal_errors import InternalErrors
from kvtier_daemon.planning import PATIENCE_S
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.base import Outlook, TierStats
from kvtier_daemon.tiers.warm import Extent, WarmTier
from kvtier_kernels import Mapping as MappedExtent

READERS = 4
LIMIT_READING = 1024
SWEEP_BLOCKS = 256
GROUP_BLOCKS = 4  # that are dropped together; the catalog calls such a group a segment
FAILS, DAMAGED, HANGS = "fails", "damaged", "hangs"


def digest_of(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


@dataclass
class Kept:
    """A block of the tier: its key, its bytes, and the digest of the bytes that were saved."""

    key: bytes
    data: bytes
    digest: bytes


@dataclass
class Waiting:
    """A request that waits for reads."""

    ids: set[int] = field(default_factory=set)
    then: Callable[[], None] | None = None


class HostTier:
    """One tenant's blocks: all parts of a `TenantTier`."""

    is_awaited = False
    is_complete = True

    def __init__(self, tenant: Tenant, host: HostMemory) -> None:
        self.recovery = self.reads = self.pending = self.writes = self.forgets = self.drain = self
        self.counts = Counter(written=0, read=0, spoilt=0, not_read=0)
        self.memory: list[MappedExtent] = []  # the tenant's extents
        self.groups: OrderedDict[int, dict[int, Kept]] = OrderedDict()  # by number and page
        self.is_draining = False
        self._catalog = tenant.catalog
        self._host = host
        self._last_group = 0
        self._waiting: dict[Request, Waiting] = {}

    @property
    def is_on(self) -> bool:
        return self._host.is_on

    @property
    def used_bytes(self) -> int:
        return sum(len(one.data) for group in self.groups.values() for one in group.values())

    def stats(self) -> TierStats:
        return TierStats(self.counts)

    # --- writes ------------------------------------------------------------------------------

    def saved(self, ids: bytes) -> None:
        self.write(self._catalog.demotions.plan_write_through(ids))

    def write(self, plan: Demotion) -> None:
        """Keep the blocks of the plan, unless the tier is off."""
        if not self.is_on:
            self._catalog.demotions.not_demoted(plan.ids)
            return
        for number, block in zip(array("I", plan.ids), plan.blocks, strict=True):
            nbytes = block.space.spec.group_block_bytes(block.identity.group)
            self._make_room(nbytes)
            kept = Kept(block.identity.key, bytes(self._slot(block.slot, nbytes)), b"")
            kept.digest = digest_of(kept.data)
            if not self.groups or len(self.groups[self._last_group]) == GROUP_BLOCKS:
                self._last_group += 1
                self.groups[self._last_group] = {}
            group = self.groups[self._last_group]
            page = max(group, default=-1) + 1
            group[page] = kept
            frame = FRAME.pack(self._last_group, page, nbytes, 0, 0, 0)
            self._catalog.demotions.demoted(array("I", [number]).tobytes(), frame, kept.digest)
            self.counts["written"] += 1
        self.drop_dead()

    def _make_room(self, nbytes: int) -> None:
        while self.groups and self.used_bytes + nbytes > self._host.size_bytes:
            number, _ = self.groups.popitem(last=False)
            self._catalog.segments.drop_segment(number)

    def _slot(self, slot: bytes, nbytes: int) -> memoryview:
        extent, _, offset, _ = SLOT.unpack(slot)
        return memoryview(self.memory[extent])[offset : offset + nbytes]

    @property
    def is_done(self) -> bool:
        return self.is_draining and not self._catalog.demotions.in_memory_alone

    @property
    def left_blocks(self) -> int:
        return self._catalog.demotions.in_memory_alone if self.is_draining else 0

    @property
    def unfit(self) -> tuple[int, ...]:
        return ()

    def begin(self) -> None:
        self.is_draining, at = True, 0
        while True:
            plan, at, _ = self._catalog.demotions.sweep(at, SWEEP_BLOCKS)
            self.write(plan)
            if not at:
                return

    def end(self) -> None:
        self.is_draining = False

    def release(self, number: int) -> None:
        pass

    # --- forgets -----------------------------------------------------------------------------

    def forget(
        self, space: KnownSpace, keys: bytes, done: Callable[[str], None] | None, patient: bool = False
    ) -> bool:  # fmt: skip
        self.drop_dead()
        if done is not None:
            asyncio.get_running_loop().call_soon(done, "")
        return True

    def erase(self, first: int, done: Callable[[str, int, int], None]) -> bool:
        self.drop_dead()
        return False

    def drop_dead(self) -> None:
        """Free the blocks that the catalog does not use any longer."""
        dead = self._catalog.segments.take_dead_frames()
        for at in range(0, len(dead), PLACE_BYTES):
            number, page = array("I", dead[at : at + PLACE_BYTES])
            self.groups.get(number, {}).pop(page, None)

    # --- reads -------------------------------------------------------------------------------

    def promote(
        self, space: KnownSpace, keys: bytes, coming: int, *, request: Request | None = None,
        urgent: bool = True, within_s: float = PATIENCE_S, recompute_s: float = float("inf"),
    ) -> Outlook:  # fmt: skip
        if not self.is_on:
            return 0, 0.0, "off"
        promotions = self._catalog.promotions
        plan = promotions.plan(space, keys, promotions.reading + LIMIT_READING)
        if not plan.ids and not plan.joined:
            return 0, 0.0, "not_read"
        waiting = self._waiting.setdefault(request or (0, keys), Waiting())
        waiting.ids |= {*array("I", plan.ids), *array("I", plan.joined)}
        loop = asyncio.get_running_loop()
        for at, number in enumerate(array("I", plan.ids)):
            group, page, nbytes, *_ = FRAME.unpack_from(plan.frames, at * FRAME.size)
            slot = self._slot(plan.slots[at * SLOT.size : (at + 1) * SLOT.size], nbytes)
            kept = self.groups.get(group, {}).get(page)
            copying = loop.run_in_executor(self._host.readers, self._host.copy, kept, slot)
            copying.add_done_callback(partial(self._read, number))
        return min(coming, plan.coming), 1.0, "faster"

    def _read(self, number: int, copying: asyncio.Future[str]) -> None:
        """Tell the catalog the outcome of a read, and the requests that wait for it."""
        code, ids = copying.result(), array("I", [number]).tobytes()
        names = [name for name, one in self._waiting.items() if number in one.ids]
        if not code:
            self._catalog.promotions.promoted(ids, names, time.monotonic())
            self.counts["read"] += 1
        elif code == "EBADMSG":
            self._catalog.promotions.spoilt(ids, code)
            self.counts["spoilt"] += 1
        else:
            self._catalog.promotions.unpromoted(ids, code)
            self.counts["not_read"] += 1
        self.drop_dead()
        for name in names:
            self._waiting[name].ids.discard(number)
            if not self._waiting[name].ids and (then := self._waiting.pop(name).then) is not None:
                then()

    def recomputes(
        self, session: int, space: KnownSpace, keys: bytes, ready: int, coming: int
    ) -> None:
        pass

    def bring_back(self, space: KnownSpace, ids: bytes) -> None:
        self._catalog.blocks.residency.stay_below(array("I", ids))

    def probe(self, session: int, space: KnownSpace, keys: bytes, ready: int, coming: int) -> None:
        pass

    def cancel(self, request: Request) -> None:
        self._waiting.pop(request, None)

    def end_reads(self, request: Request) -> None:
        self.cancel(request)

    def released(self, request: Request) -> None:
        self._waiting.pop(request, None)

    def session_ended(self, session: int) -> None:
        for request in [one for one in self._waiting if one[0] == session]:
            del self._waiting[request]

    def call_when_read(self, request: Request, then: Callable[[], None]) -> bool:
        if request not in self._waiting:
            return False
        self._waiting[request].then = then
        return True

    def call_when_ended(self, request: Request, then: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(then)

    def cancel_calls(self, request: Request) -> None:
        if request in self._waiting:
            self._waiting[request].then = None


class HostMemory:
    """The `LowerTier`. `fault_of` has the planted faults by key; hanging reads continue at `goes_on`."""

    name = "host"
    hangs = False
    failure = ""
    faults = 0

    def __init__(
        self,
        settings: CurrentConfig,
        tenants: Mapping[str, Tenant],
        warm: WarmTier,
        unforeseen: InternalErrors,
        size_bytes: int = 64 << 20,
    ) -> None:
        self.tier = self
        self.size_bytes = size_bytes
        self.is_on = True
        self.fault_of: dict[bytes, str] = {}
        self.hanging = 0
        self.goes_on = threading.Event()
        self.readers = ThreadPoolExecutor(READERS, "host-read")
        self.of: dict[str, HostTier] = {}
        self._tenants = tenants

    async def open(self, loop: asyncio.AbstractEventLoop) -> None:
        for name, tenant in self._tenants.items():
            tenant.tier = self.of[name] = HostTier(tenant, self)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        pass

    def map(self, extent: Extent) -> None:
        self.of[extent.tenant].memory.append(MappedExtent(extent.fd, extent.nbytes, True))

    def run_periodic(self) -> None:
        for one in self.of.values():
            one.drop_dead()

    def probe(self) -> None:
        pass

    def reconfigure(self, config: Config) -> None:
        pass

    def order(self, tier: str, order: str) -> dict[str, Any]:
        if tier == "warm" and order == "off":
            raise TierError("warm: cannot be switched off")
        if tier == self.name and order in ("on", "off"):
            self.is_on = order == "on"
        for one in self.of.values() if tier == "warm" else ():
            if order == "drain":
                one.begin()
            elif order == "on":
                one.end()
        left = sum(one.left_blocks for one in self.of.values())
        return {"tier": tier, "state": self.state(tier), "left_blocks": left, "failure": ""}

    def state(self, tier: str) -> str:
        if tier == self.name:
            return "on" if self.is_on else "off"
        return "drained" if all(one.is_done for one in self.of.values()) else "on"

    def report(self, tenants: Collection[str]) -> dict[str, Any]:
        parts = [self.of[name] for name in tenants]
        return {
            "capacity_bytes": self.size_bytes,
            "used_bytes": sum(one.used_bytes for one in parts),
            "blocks": sum(len(group) for one in parts for group in one.groups.values()),
            "state": self.state(self.name),
        }

    async def end_moving(self, told: Callable[[str], None]) -> None:
        for one in self.of.values():
            one.begin()
        self.goes_on.set()

    async def close(self) -> bool:
        await asyncio.to_thread(self.readers.shutdown)
        return True

    def mappings(self) -> list[MappedExtent]:
        return [mapping for one in self.of.values() for mapping in one.memory]

    def copy(self, kept: Kept | None, slot: memoryview) -> str:
        """Read a block into its slot, in a thread. Return an error code, or an empty text."""
        if kept is None:
            return "ENOENT"
        fault = self.fault_of.get(kept.key, "")
        if fault == HANGS:
            self.hanging += 1
            assert self.goes_on.wait(60)
        if fault == FAILS:
            return "EIO"
        data = bytearray(kept.data)
        if fault == DAMAGED:
            data[len(data) // 2] ^= 1
        slot[:] = data
        return "" if digest_of(data) == kept.digest else "EBADMSG"
