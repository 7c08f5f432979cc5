"""The figures of the daemon: what `kvtier status --json` prints, and the source of all other reports."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

import kvtier
from kvtier.units import format_bytes
from kvtier_daemon.catalog import Catalog
from kvtier_daemon.config.current import CurrentConfig
from kvtier_daemon.observing.hints import Hints
from kvtier_daemon.observing.loop_lag import LoopLag
from kvtier_daemon.observing.metrics import COMPRESSED_EVENTS, WARM_STATES
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.base import LowerTier, summed
from kvtier_daemon.tiers.hot import HotTier
from kvtier_daemon.tiers.remote.tier import RemoteTier
from kvtier_daemon.tiers.warm import WarmTier

COMPRESSED = ("used_bytes", "spare_bytes", "block_bytes", "blocks", *COMPRESSED_EVENTS)

if TYPE_CHECKING:
    from kvtier_daemon.serving.context import Report
    from kvtier_daemon.serving.server import Server
    from kvtier_kernels._native import Counts


class StatusFigures:
    """The figures of a daemon that has just started. Only reads what it reports."""

    def __init__(
        self,
        settings: CurrentConfig,
        tenants: Mapping[str, Tenant],
        warm: WarmTier,
        lower: LowerTier,
        remote: RemoteTier,
        hot: HotTier,
        shown_at: str,
    ) -> None:
        self.stopping = False
        self.hints = Hints()
        self._started_at = time.monotonic()
        self._began_s = round(time.time(), 3)
        self._settings = settings
        self._tenants = tenants
        self._warm = warm
        self._lower = lower
        self._remote = remote
        self._hot = hot
        self._shown_at = shown_at
        self._server: Server | None = None
        self._lag: LoopLag | None = None

    def serving(self, server: Server, lag: LoopLag) -> None:
        """Report on clients and the event loop from now on."""
        self._server, self._lag = server, lag

    def packed(self, tenant: Tenant | None) -> Report:
        """Return the figures, encoded."""
        body = self.of(tenant)
        return {name: msgspec.Raw(msgspec.msgpack.encode(value)) for name, value in body.items()}

    def line(self) -> str:
        """Return a summary for `systemctl status`."""
        assert self._server is not None
        counts = [tenant.catalog.counts() for tenant in self._tenants.values()]
        used = sum(count["bytes"]["ready"] for count in counts)
        parts = [f"warm {format_bytes(used)} of {format_bytes(self._warm.capacity_bytes)}"]
        if not self._warm.complete:
            parts[0] += f" ({format_bytes(self._warm.allocated_bytes)} allocated so far)"
        if (tier := self._lower.tier) is not None:
            framed = sum(count["framed_bytes"] for count in counts)
            name, size = self._lower.name, format_bytes(tier.size_bytes)
            state = self._lower.state(name)
            parts.append(f"{name} {format_bytes(framed)} of {size}")
            if state != "on":
                parts[-1] += f" ({state})"
            if tier.failure:
                parts.append(tier.failure)
        if remote := self._remote.summary():
            parts.append(remote)
        parts.append(f"clients {sum(session.greeted for session in self._server.sessions)}")
        return ", ".join(parts)

    def of(self, tenant: Tenant | None) -> dict[str, Any]:
        """Return the figures of one tenant, or of all."""
        assert self._server is not None and self._lag is not None
        tenants = list(self._tenants.values()) if tenant is None else [tenant]
        sessions, waiting, coming = Counter[str](), Counter[str](), Counter[str]()
        shared, awaited = Counter[str](), Counter[str]()
        names = set()
        connections = Counter(one.tenant.name for one in self._server.sessions if one.tenant)
        for session in self._server.sessions:
            if session.tenant:
                name, lookups = session.tenant.name, session.requests.lookups.counted
                waiting[name] += lookups.waiting
                coming[name] += lookups.coming_tokens
                shared[name] += lookups.pending_shared_tokens
                awaited[name] += lookups.awaited_tokens
                if session.requests.spaces.opened:
                    sessions[name] += 1
                    names.add((name, session.engine))
        engines = Counter(name for name, _ in names)
        counts = [each.catalog.counts() for each in tenants]
        catalogs = [each.catalog for each in tenants]
        have = sum(count["capacity_bytes"] for count in counts)
        allocated = self._warm.allocated_bytes if tenant is None else have
        body: dict[str, Any] = {
            "version": kvtier.__version__,
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._started_at, 3),
            "started_at_s": self._began_s,
            "stopping": self.stopping,
            "tiers": {"warm": self._warm_tier(tenants, counts, allocated)},
            "hot": {"resident": summed(catalog.blocks.residency.report() for catalog in catalogs)},
            "lookup_tokens": sum(catalog.usage.lookup_tokens for catalog in catalogs),
            "hit_tokens": self._hits(catalogs),
            "miss_tokens": summed(catalog.usage.miss_tokens for catalog in catalogs),
            "used_tokens": summed(catalog.usage.used_tokens for catalog in catalogs),
            "coming_tokens": sum(coming[each.name] for each in tenants),
            "coming_remote_tokens": sum(shared[each.name] for each in tenants),
            "awaited_tokens": sum(awaited[each.name] for each in tenants),
            "waiting_lookups": sum(waiting[each.name] for each in tenants),
            "recompute_avoided_s": sum(catalog.usage.avoided_s for catalog in catalogs),
            "saved_tokens": sum(catalog.usage.saved_tokens for catalog in catalogs),
            "refused_tokens": summed(catalog.usage.refused_tokens for catalog in catalogs),
            "evicted_blocks": summed(catalog.blocks.evicted for catalog in catalogs),
            "bytes": {
                "saved": sum(catalog.usage.saved_bytes for catalog in catalogs),
                "loaded": sum(catalog.usage.loaded_bytes for catalog in catalogs),
            },
            "notes_bytes": sum(catalog.blocks.notes_bytes for catalog in catalogs)
            + sum(each.tier.stats().notes_bytes for each in tenants),
            "catalog_bytes": sum(catalog.blocks.memory_bytes() for catalog in catalogs),
            "sessions": sum(sessions[each.name] for each in tenants),
            "engines": sum(engines[each.name] for each in tenants),
            "failures": dict(self._server.failures) if tenant is None else {},
            "audit": {"lost_entries": self._server.audit.lost},
            "loop": self._lag.report(),
            "tenants": {
                each.name: {
                    "capacity_bytes": each.quota_bytes,
                    "used_bytes": count["bytes"]["ready"],
                    "blocks": count["blocks"]["ready"],
                    "spaces": len(each.catalog.spaces),
                    "sessions": sessions[each.name],
                    "engines": engines[each.name],
                    "leases": len(each.catalog.leases),
                    "pinned_bytes": each.catalog.pins.nbytes,
                    "spoilt_blocks": each.spoilt_blocks,
                    "lookup_tokens": each.catalog.usage.lookup_tokens,
                    "hit_tokens": each.catalog.usage.hit_tokens.total(),
                    "used_tokens": each.catalog.usage.used_tokens.total(),
                    "coming_tokens": coming[each.name],
                    "connections": connections[each.name],
                    "max_clients": self._server.clients_of(each),
                    **self._server.share_of(each).report(),
                }
                for each, count in zip(tenants, counts, strict=True)
            },
        }
        if self._hot.sizes:
            body["hot"]["arena"] = self._hot.report([each.name for each in tenants])
        if self._lower.tier is not None:
            reported = [each.name for each in tenants]
            body["tiers"][self._lower.name] = lower = self._lower.report(reported)
            if tenant is not None:
                lower["failure"] = tenant.may_see(lower["failure"])
        if self._remote.is_configured:
            body["tiers"]["remote"] = self._remote.report([each.name for each in tenants])
        if tenant is None:
            body |= {
                "connections": len(self._server.sessions),
                "latencies": self._server.latencies.report(),
                "cpu_s": round(time.process_time(), 3),
                "http": self._shown_at,
            }
            body["hints"] = self.hints.of(body)
        return body

    def _hits(self, catalogs: Iterable[Catalog]) -> dict[str, int]:
        hits = summed(catalog.usage.hit_tokens for catalog in catalogs)
        if self._lower.tier is None:
            del hits["cold"]
        if not self._remote.is_configured:
            del hits["remote"]
        return hits

    def _warm_tier(
        self, tenants: Sequence[Tenant], counts: Sequence[Counts], allocated_bytes: int
    ) -> dict[str, Any]:
        used_bytes = sum(count["bytes"]["ready"] for count in counts)
        return {
            "capacity_bytes": sum(each.quota_bytes for each in tenants),
            "allocated_bytes": allocated_bytes,
            "used_bytes": used_bytes,
            "compressed": self._compressed(tenants, used_bytes),
            "blocks": sum(count["blocks"]["ready"] for count in counts),
            "policy": self._settings.config.warm.policy,
            "state": self._lower.state("warm"),
            "states": {
                state: sum(count["blocks"][state] for count in counts)
                for state in ("writing", "ready", "doomed", "quarantined")
            },
            "state_bytes": {
                state: sum(count["bytes"][state] for count in counts) for state in WARM_STATES
            },
            "failure": self._warm.failure,
        }

    def _compressed(self, tenants: Sequence[Tenant], slots_bytes: int) -> dict[str, Any]:
        """The figures of compressed memory. `effective` is how many bytes of blocks are in a byte of memory.
        A block with a slot and a frame counts once; spare frames, which leave first, do not count as used."""
        warm = self._settings.config.warm
        share = sum(each.quota_bytes for each in tenants) / warm.size_bytes
        found = Counter(summed(each.tier.stats().compressed for each in tenants))
        blocks_bytes = slots_bytes + found["block_bytes"]
        used_bytes = slots_bytes + found["used_bytes"] - found["spare_bytes"]
        return {
            "capacity_bytes": int(warm.compressed_bytes * share),
            **{name: found[name] for name in COMPRESSED},
            "effective": round(blocks_bytes / used_bytes, 4) if used_bytes else 1.0,
        }
