"""The memory of GPUs that holders offer to the daemon, one holder per GPU. The daemon passes on descriptors
of it; it never maps it and never calls the CUDA driver.

A holder's memory lasts as long as its session. It divides it as the configuration says, one piece for each
tenant. A new holder offers new memory, because clients of the last one may still write to that.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier import wire
from kvtier.errors import Refused, bad_request
from kvtier.units import format_bytes
from kvtier_daemon.catalog.hot import OUTCOMES, HotArena
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.base import summed
from kvtier_daemon.tiers.warm import generation_table

log = logging.getLogger(__name__)

LIMIT_GPUS = 64


@dataclass(slots=True)
class HotExtent:
    """A tenant's memory on one GPU, as clients of the tenant get it."""

    number: int
    gpu: str
    nbytes: int
    fd: int
    table_fd: int

    def handles(self, read_only: bool) -> tuple[int, int]:
        """Return new descriptors of the memory and of its table; the caller closes both."""
        assert not read_only, "the memory of a GPU has no read-only descriptor"
        fd = os.dup(self.fd)
        try:
            return fd, os.dup(self.table_fd)
        except OSError:
            os.close(fd)
            raise

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.table_fd)


@dataclass(slots=True)
class OfferedGpu:
    """The process that holds the memory of one GPU."""

    name: Hashable
    nbytes: int
    shares: dict[str, int]
    extents: dict[str, HotExtent] = field(default_factory=dict)  # by tenant


class HotTier:
    """The memory of all GPUs, of all tenants. `sizes` are those of the configuration, for each GPU."""

    def __init__(self, tenants: Mapping[str, Tenant], sizes: Mapping[str, int]) -> None:
        self._tenants = tenants
        self.sizes = sizes
        self._holders: dict[str, OfferedGpu] = {}  # by GPU

    def offer(self, name: Hashable, gpu: str, nbytes: int, unit_bytes: int) -> dict[str, int]:
        """A holder offers the memory of a GPU: return the tenants' shares. Raises Refused."""
        if not self.sizes:
            text = 'the configuration has no [hot]: add sizes = ["TENANT=8GiB"] there, and restart'
            raise bad_request(text)
        if not 0 < len(gpu) <= wire.LIMIT_GPU_NAME or nbytes < 1 or unit_bytes < 1:
            raise bad_request(f"not a GPU's memory: {gpu[:80]!r}, {nbytes} bytes")
        if gpu in self._holders:
            text = f"GPU {gpu} has a holder already, with {format_bytes(self._holders[gpu].nbytes)}"
            raise Refused("too_many", text)
        if len(self._holders) >= LIMIT_GPUS:
            raise Refused("too_many", f"{LIMIT_GPUS} GPUs have holders already")
        wanted = sum(self.sizes.values())
        if wanted > nbytes:
            text = (
                f"the holder of GPU {gpu} offers {format_bytes(nbytes)}, and [hot] sizes sum to "
                f"{format_bytes(wanted)}: give hold-gpu a larger --size, or the tenants less"
            )
            raise bad_request(text)
        shares = {name: size - size % unit_bytes for name, size in self.sizes.items()}
        shares = {name: size for name, size in shares.items() if size}
        self._holders[gpu] = OfferedGpu(name, nbytes, shares)
        log.info("GPU %s: a holder offers %s", gpu, format_bytes(nbytes))
        return dict(shares)

    def grant(self, name: Hashable, gpu: str, tenant: str, nbytes: int, fd: int) -> None:
        """The holder has allocated a tenant's share: use it for copies. Always takes the descriptor."""
        try:
            holder = self._holders.get(gpu)
            if holder is None or holder.name != name:
                raise bad_request(f"this client is not the holder of GPU {gpu}")
            if holder.shares.get(tenant) != nbytes or tenant in holder.extents:
                text = f"tenant {tenant}: {nbytes} bytes of GPU {gpu} were not asked for"
                raise bad_request(text)
            table, table_fd = generation_table(f"kvtier-{tenant}-hot", nbytes)
        except BaseException:
            os.close(fd)
            raise
        arena = self._tenants[tenant].catalog.hot.add(gpu, nbytes, table)
        holder.extents[tenant] = HotExtent(arena.number, gpu, nbytes, fd, table_fd)
        log.info("GPU %s: %s hold copies of tenant %s's blocks", gpu, format_bytes(nbytes), tenant)

    def lost(self, name: Hashable, why: str) -> None:
        """This holder's session has ended: forget the copies in its memory."""
        for gpu, holder in [*self._holders.items()]:
            if holder.name == name:
                del self._holders[gpu]
                for tenant, extent in holder.extents.items():
                    self._tenants[tenant].catalog.hot.remove(gpu)
                    extent.close()
                log.warning("GPU %s: its holder is gone (%s), forgetting its copies", gpu, why)

    def extent(self, tenant: str, gpu: str) -> HotExtent | None:
        """The tenant's memory on this GPU, if there is any now."""
        holder = self._holders.get(gpu)
        return holder.extents.get(tenant) if holder is not None else None

    def holders_for(self, tenant: str) -> list[Hashable]:
        """The holders of memory that clients of this tenant may have mapped."""
        return [holder.name for holder in self._holders.values() if tenant in holder.extents]

    def close(self) -> None:
        for name in [holder.name for holder in self._holders.values()]:
            self.lost(name, "the daemon ends")

    # --- observing -----------------------------------------------------------------------------

    def report(self, tenants: Collection[str]) -> dict[str, Any]:
        """The figures of these tenants' memory, by GPU."""
        gpus = {gpu: self._of_gpu(gpu, tenants) for gpu in self._holders}
        numbers = summed({key: one[key] for key in _ADDED} for one in gpus.values())
        counts = summed(one["counts"] for one in gpus.values())
        return {
            **dict.fromkeys(_ADDED, 0),
            **numbers,
            "counts": dict.fromkeys(OUTCOMES, 0) | counts,
            "gpus": gpus,
        }

    def _of_gpu(self, gpu: str, tenants: Collection[str]) -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        arenas: list[HotArena] = []
        for name in tenants:
            hot = self._tenants[name].catalog.hot
            if (arena := hot.arenas.get(gpu)) is not None:
                arenas.append(arena)
                counts = self._tenants[name].catalog.blocks.store.hot_counts(arena.number)
                found.append({
                    "capacity_bytes": arena.nbytes, "used_bytes": counts["used_bytes"],
                    "blocks": counts["blocks"], "writing": counts["writing"],
                    "quarantined": hot.quarantined_blocks(arena), "evicted": counts["evicted"],
                    "found": arena.found, "absent": arena.absent,
                })  # fmt: skip
        return {
            **dict.fromkeys(_ADDED, 0),
            **summed(found),
            "counts": dict.fromkeys(OUTCOMES, 0) | summed(_counts(arenas)),
        }


_ADDED = (
    "capacity_bytes", "used_bytes", "blocks", "writing", "quarantined", "evicted", "found", "absent",
)  # fmt: skip


def _counts(arenas: Iterable[HotArena]) -> Iterable[Mapping[str, int]]:
    return (arena.counts for arena in arenas)
