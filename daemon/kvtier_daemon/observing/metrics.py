"""All metrics: their names, their meanings, and where in the daemon's figures they are.

The figures are what `kvtier status --json` prints, so both always agree, with one exception: a lookup counts
tokens that are being read from disk as hits at once, and corrects that if the read fails. For Prometheus a
counter that falls is a restart, so these metrics count such tokens when the outcome is known.

The values of labels are fixed, so that every series exists from the start; only tenants are configured. A
counter with an unknown name is counted as "other", so that a name that is missing here never breaks a
scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier.wire import CODES, OUTCOMES
from kvtier_daemon.catalog import WHY_MISSED
from kvtier_daemon.catalog.blocks import TIERS, WHY_EVICTED
from kvtier_daemon.catalog.hot import OUTCOMES as COPY_OUTCOMES
from kvtier_daemon.catalog.miss_log import UNWRITTEN
from kvtier_daemon.observing.exposition import Family, Kind, Labels, Sample
from kvtier_daemon.observing.loop_lag import KEPT_S
from kvtier_daemon.planning import WHY

Figures = Mapping[str, Any]
Read = Callable[[Figures], Any]

WARM_STATES: Final = ("ready", "writing", "promoting", "doomed", "quarantined")
ROUTES: Final = ("save", "load", "cold_write", "cold_read", "cold_rewrite", "cold_scrub")
FRAMES: Final = (
    "written", "written_again", "read", "loaded", "not_read", "spoilt", "unknown_key", "direct", "not_direct",
)  # fmt: skip
COMPRESSED_EVENTS: Final = ("compressed", "read", "spoilt", "dropped", "not_worth")
RESIDENT_MOVES = ("entered", "left", "refused", "evicted", "returned")
HIT_TIERS: Final = (*TIERS, "remote")
OBJECTS: Final = (
    "written", "not_written", "dropped", "archived", "not_archived", "read", "absent", "spoilt",
    "unknown_key", "not_read", "cancelled", "resharded", "not_resharded",
)  # fmt: skip
COPY_STATES: Final = {"ready": "blocks", "writing": "writing", "quarantined": "quarantined"}
COPY_LOADS: Final = ("found", "absent")
OTHER: Final = "other"  # a test fails if a daemon reports it


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. `values` are the values of its label; without a label `read` returns a number or a
    histogram, otherwise one number per value. `open` means that the values of the label are configured."""

    name: str
    kind: Kind
    help: str
    read: Read
    label: str = ""
    values: tuple[str, ...] = ()
    open: bool = False

    def family(self, figures: Figures) -> Family:
        return Family(self.name, self.kind, self.help, list(self._samples(figures)))

    def _samples(self, figures: Figures) -> Iterator[Sample]:
        found = self.read(figures)
        if not self.label:
            yield Sample((), found)
        elif self.open:
            for name, value in found.items():
                yield Sample(((self.label, name),), value)
        else:
            for name in self.values:
                yield Sample(((self.label, name),), found.get(name, 0))
            if unknown := found.keys() - set(self.values):
                yield Sample(((self.label, OTHER),), sum(found[name] for name in unknown))


class Split(Metric):
    """A metric with two labels: `read` returns (tier, state) and a number."""

    __slots__ = ()

    def _samples(self, figures: Figures) -> Iterator[Sample]:
        for (tier, state), value in self.read(figures).items():
            labels: Labels = (("tier", tier), ("state", state))
            yield Sample(labels, value)


def families(figures: Figures) -> Iterable[Family]:
    """Return all metrics with the values of these figures."""
    return (series.family(figures) for series in SERIES)


# --- where they are -------------------------------------------------------------------------------


def _part(*path: str) -> Callable[[Figures], Figures]:
    """Read the figures of a part of the daemon; empty without it, so that its metrics are zero."""

    def read(figures: Figures) -> Figures:
        for name in path:
            figures = figures.get(name) or {}
        return figures

    return read


_warm = _part("tiers", "warm")
_compressed = _part("tiers", "warm", "compressed")
_cold = _part("tiers", "cold")
_coding = _part("tiers", "cold", "coding")
_scrub = _part("tiers", "cold", "scrub")
_remote = _part("tiers", "remote")
_resident = _part("hot", "resident")  # of the blocks that engines hold in their own caches
_copies = _part("hot", "arena")  # of the copies in the memory of GPUs


def _of(part: Callable[[Figures], Figures], name: str) -> Read:
    return lambda figures: part(figures).get(name, 0)


def lookups(figures: Figures) -> int:
    return int(figures["lookup_tokens"] - figures["coming_tokens"])


def hits(figures: Figures) -> dict[str, int]:
    hits = dict(figures["hit_tokens"])
    shared, awaited = figures["coming_remote_tokens"], figures["awaited_tokens"]
    hits["warm"] = hits.get("warm", 0) - awaited
    hits["cold"] = hits.get("cold", 0) - (figures["coming_tokens"] - shared - awaited)
    hits["remote"] = hits.get("remote", 0) - shared
    return hits


def _bytes_by_state(figures: Figures) -> dict[tuple[str, str], int]:
    warm, cold = _warm(figures), _cold(figures)
    states = {("warm", state): warm["state_bytes"][state] for state in WARM_STATES}
    states["warm", "free"] = warm["allocated_bytes"] - sum(states.values())
    used = cold.get("used_bytes", 0)
    return states | {
        ("cold", "ready"): used,
        ("cold", "free"): cold.get("capacity_bytes", 0) - used,
    }


def routes(figures: Figures) -> dict[str, int]:
    moved = _cold(figures).get("bytes", {})
    return {
        "save": figures["bytes"]["saved"],
        "load": figures["bytes"]["loaded"],
        "cold_write": moved.get("written", 0),
        "cold_read": moved.get("read", 0),
        "cold_rewrite": moved.get("written_again", 0),
        "cold_scrub": _scrub(figures).get("bytes", 0),
    }


def _of_tenants(name: str) -> Read:
    def read(figures: Figures) -> dict[str, int]:
        return {tenant: of[name] for tenant, of in figures["tenants"].items()}

    return read


# --- what they are --------------------------------------------------------------------------------

SERIES: Final[tuple[Metric, ...]] = (
    Metric("kvtier_build", "info", "The version of the daemon; always 1.",
           lambda f: {f["version"]: 1}, "version", open=True),
    Metric("kvtier_start_time_seconds", "gauge", "Start time of the daemon, in Unix time.",
           lambda f: f["started_at_s"]),
    Metric("kvtier_cpu_seconds", "counter", "CPU time used by all threads of the daemon.",
           lambda f: f["cpu_s"]),
    # Hits, misses and saves.
    Metric("kvtier_lookup_tokens", "counter", "Tokens looked up: the sum of all hits and misses.", lookups),
    Metric("kvtier_hit_tokens", "counter", "Tokens found, by the tier that held them.",
           hits, "tier", HIT_TIERS),
    Metric("kvtier_used_tokens", "counter", "Found tokens that clients reported as used, by the tier "
           "that held them. An engine does not load what its own cache holds.",
           lambda f: f["used_tokens"], "tier", TIERS),
    Metric("kvtier_miss_tokens", "counter", "Tokens not found, by reason.",
           lambda f: f["miss_tokens"], "reason", WHY_MISSED),
    Metric("kvtier_coming_tokens", "gauge", "Tokens that lookups expect from disk, or that other "
           "clients are writing. They are counted as a hit or a miss when that has ended.",
           lambda f: f["coming_tokens"]),
    Metric("kvtier_saved_tokens", "counter", "Tokens saved; a block counts once for each group and shard.",
           lambda f: f["saved_tokens"]),
    Metric("kvtier_refused_tokens", "counter", "Tokens offered and not stored, by reason; present means"
           " that the block is already stored, writing that the client offers the tokens again.",
           lambda f: f["refused_tokens"], "reason", OUTCOMES[1:]),
    Metric("kvtier_recompute_seconds_avoided", "counter", "Time that computing the found tokens would "
           "have taken, at the speed that clients reported; 0 for clients that reported none.",
           lambda f: f["recompute_avoided_s"]),
    # Contents.
    Metric("kvtier_tier_capacity_bytes", "gauge", "Configured size of a tier; 0 if it does not exist.",
           lambda f: {"warm": _warm(f)["capacity_bytes"], "cold": _cold(f).get("capacity_bytes", 0)},
           "tier", TIERS),
    Split("kvtier_tier_bytes", "gauge", "Size of a tier by state. The states of the warm tier add up to"
           " the allocated memory.", _bytes_by_state),
    Metric("kvtier_tier_blocks", "gauge", "Blocks available in a tier; a block can be in both tiers.",
           lambda f: {"warm": _warm(f)["blocks"], "cold": _cold(f).get("blocks", 0)}, "tier", TIERS),
    Metric("kvtier_evicted_blocks", "counter", "Blocks that were removed from memory or dropped, by "
           "reason; demoted blocks are on disk.", lambda f: f["evicted_blocks"], "reason", WHY_EVICTED),
    # Compressed memory.
    Metric("kvtier_compressed_capacity_bytes", "gauge", "Configured size of compressed memory.",
           _of(_compressed, "capacity_bytes")),
    Metric("kvtier_compressed_bytes", "gauge", "Compressed memory in use.", _of(_compressed, "used_bytes")),
    Metric("kvtier_compressed_block_bytes", "gauge", "Size that the blocks that are only in compressed "
           "memory have in slots.", _of(_compressed, "block_bytes")),
    Metric("kvtier_compressed_blocks", "gauge", "Blocks in compressed memory; some have a slot too.",
           _of(_compressed, "blocks")),
    Metric("kvtier_compressed_effective_ratio", "gauge", "Bytes of blocks per byte of slots and compressed "
           "memory.", _of(_compressed, "effective")),
    Metric("kvtier_compressed_events", "counter", "Blocks that were compressed, read, found to be damaged, "
           "dropped for others, or not worth their memory.",
           lambda f: {name: _compressed(f)[name] for name in COMPRESSED_EVENTS}, "event",
           COMPRESSED_EVENTS),
    # What engines hold in their own caches.
    Metric("kvtier_hot_resident_blocks", "gauge", "Blocks that engines hold in their own caches, as their "
           "plugins report it; a block counts for each engine, group and shard.",
           _of(_resident, "blocks")),
    Metric("kvtier_hot_resident_bytes", "gauge", "Their size.", _of(_resident, "bytes")),
    Metric("kvtier_hot_away_blocks", "gauge", "Blocks that left memory because an engine holds them and the "
           "disk has them.", _of(_resident, "away_blocks")),
    Metric("kvtier_hot_resident_moves", "counter", "Blocks that entered and left engines' caches; refused "
           "means that the daemon does not note them, evicted that a block left memory because an engine "
           "holds it, returned that it was read back because the engine dropped it.",
           lambda f: {name: _resident(f)[f"{name}_blocks"] for name in RESIDENT_MOVES}, "event",
           RESIDENT_MOVES),
    Metric("kvtier_catalog_memory_bytes", "gauge", "Memory of the catalog of all blocks.",
           lambda f: f["catalog_bytes"]),
    Metric("kvtier_notes_memory_bytes", "gauge", "Memory of the records of removed blocks.",
           lambda f: f["notes_bytes"]),
    # Movements.
    Metric("kvtier_transfer_bytes", "counter", "Bytes transferred, by route: saved by clients, used by "
           "clients, written to disk, read from disk, copied to free segments, read by the scrub.", routes,
           "route", ROUTES),
    Metric("kvtier_load_seconds", "histogram", "How long a client held a read lease: from the answer "
           "with the lease to its release.", lambda f: f["latencies"]["load"]),
    Metric("kvtier_save_seconds", "histogram", "How long a client took to save: from the answer with "
           "the slots to the last commit.", lambda f: f["latencies"]["save"]),
    Metric("kvtier_wait_seconds", "histogram", "How long a request waited for blocks on disk: from the "
           "first answer with coming blocks to the first answer without.",
           lambda f: f["latencies"]["wait"]),
    # Queues and clients.
    Metric("kvtier_waiting_lookups", "gauge", "Lookups that wait for blocks on disk.",
           lambda f: f["waiting_lookups"]),
    Metric("kvtier_reading_blocks", "gauge", "Blocks requested from the disks and not yet read.",
           _of(_cold, "reading")),
    Metric("kvtier_writing_blocks", "gauge", "Blocks that are being written to the disks.",
           _of(_cold, "writing")),
    Metric("kvtier_leaving_segments", "gauge", "Segments that are being freed.", _of(_cold, "leaving")),
    Metric("kvtier_engines", "gauge", "Connected engines: one for all processes of a vLLM engine, and "
           "one for each other client with an open space.", lambda f: f["engines"]),
    Metric("kvtier_sessions", "gauge", "Clients with an open space: of a vLLM engine, its scheduler and"
           " each of its ranks.", lambda f: f["sessions"]),
    Metric("kvtier_connections", "gauge", "Connected clients of any kind.", lambda f: f["connections"]),
    Metric("kvtier_leases", "gauge", "Leases to read and to write, including pins.",
           lambda f: sum(of["leases"] for of in f["tenants"].values())),
    Metric("kvtier_spaces", "gauge", "Spaces that have blocks or users.",
           lambda f: sum(of["spaces"] for of in f["tenants"].values())),
    Metric("kvtier_pinned_bytes", "gauge", "Memory held by pins.",
           lambda f: sum(of["pinned_bytes"] for of in f["tenants"].values())),
    Metric("kvtier_failures", "counter", "Failed requests, by code; internal means a bug in the daemon.",
           lambda f: f["failures"], "code", CODES),
    Metric("kvtier_audit_lost_entries", "counter", "Entries of the audit log that could not be written to "
           "audit.path.", lambda f: f["audit"]["lost_entries"]),
    # The cold tier.
    Metric("kvtier_cold_on", "gauge", "1 if the cold tier reads and writes; 0 if not, or if there is no"
           " cold tier.",
           lambda f: int(_cold(f).get("on", False))),
    Metric("kvtier_cold_given_up", "gauge", "1 if a part of the cold tier is off until a restart.",
           lambda f: int(_cold(f).get("given_up", False))),
    Metric("kvtier_cold_faults", "counter", "Errors and timeouts of the disks.", _of(_cold, "faults")),
    Metric("kvtier_cold_frames", "counter", "Blocks written to and read from the disks, by outcome: "
           "loaded means that a client used a block that was read, not_read that the read was cancelled, "
           "failed or was too late, spoilt that the frame is damaged, unknown_key that it is encrypted with "
           "a key that is not in cold.key_file, direct that a client read it itself, not_direct that it "
           "could not.",
           lambda f: _cold(f).get("states", {}), "outcome", FRAMES),
    Metric("kvtier_cold_loads", "counter", "Requests for blocks on disk, by decision.",
           lambda f: _cold(f).get("loads", {}), "verdict", WHY),
    Metric("kvtier_cold_unasked_blocks", "gauge", "Blocks found on disk at the start that no request "
           "can find, because cold.codecs now stores their models differently.", _of(_cold, "unasked")),
    Metric("kvtier_cold_unwritten_blocks", "counter", "Blocks evicted before they were on a disk, by "
           "reason.",
           lambda f: _cold(f).get("unwritten", {}), "reason", UNWRITTEN),
    Metric("kvtier_cold_unread_blocks", "counter", "Blocks whose read failed or was cancelled.",
           lambda f: sum(_cold(f).get("not_read", {}).values())),
    Metric("kvtier_cold_day_bytes", "gauge", "Bytes written to the disks in the last 24 hours.",
           _of(_cold, "day_bytes")),
    Metric("kvtier_cold_day_limit_bytes", "gauge", "Limit for the last 24 hours (cold.daily_writes); 0 "
           "means no limit.",
           _of(_cold, "day_limit_bytes")),
    # Copies in the memory of GPUs.
    Metric("kvtier_hot_copies_capacity_bytes", "gauge", "Memory of GPUs that holders have given to tenants.",
           _of(_copies, "capacity_bytes")),
    Metric("kvtier_hot_copies_bytes", "gauge", "The part of it that copies occupy.",
           _of(_copies, "used_bytes")),
    Metric("kvtier_hot_copies_blocks", "gauge", "Copies of blocks in it, by state; quarantined copies are "
           "part of those that are written: their writers are gone or disconnected.",
           lambda f: {state: _copies(f).get(name, 0) for state, name in COPY_STATES.items()}, "state",
           tuple(COPY_STATES)),
    Metric("kvtier_hot_copies_saves", "counter", "Blocks for which an engine asked for a copy, by outcome: "
           "refused means that there was no room, or a copy already, or no block any longer.",
           lambda f: _copies(f).get("counts", {}), "outcome", COPY_OUTCOMES),
    Metric("kvtier_hot_copies_loads", "counter", "Blocks of loads by engines that use such memory: found if "
           "they had a copy, absent if not.",
           lambda f: {name: _copies(f).get(name, 0) for name in COPY_LOADS}, "copy", COPY_LOADS),
    Metric("kvtier_hot_copies_evicted", "counter", "Copies that were dropped to make room for others.",
           _of(_copies, "evicted")),
    # The remote tier.
    Metric("kvtier_remote_on", "gauge", "1 if the remote store is used; 0 if it does not answer, or if there "
           "is none.", lambda f: int(_remote(f).get("on", False))),
    Metric("kvtier_remote_faults", "counter", "Failed requests to the remote store.", _of(_remote, "faults")),
    Metric("kvtier_remote_restarts", "counter", "How often the process that talks to the remote store was "
           "replaced because it or the store failed.", _of(_remote, "restarts")),
    Metric("kvtier_remote_blocks", "counter", "Blocks written to and read from the remote store, by outcome: "
           "dropped means that too many blocks waited to be written, archived that a block was written "
           "before its place on disk was reused, not_archived that it waited for that when its place was "
           "reused, absent that the object did not exist, "
           "spoilt that it is damaged, or not encrypted although remote.encryption is on, unknown_key that "
           "it is encrypted with a key that is not in remote.key_file, not_read and cancelled that the read "
           "failed or was too late, resharded that it was read and made of objects of another tensor "
           "parallelism; not_resharded counts spaces for which that is not possible.",
           lambda f: _remote(f).get("states", {}), "outcome", OBJECTS),
    Metric("kvtier_remote_bytes", "counter", "Bytes of objects that were written and read.",
           lambda f: _remote(f).get("bytes", {}), "way", ("written", "read")),
    Metric("kvtier_remote_loads", "counter", "Requests for blocks in the remote store, by decision.",
           lambda f: _remote(f).get("loads", {}), "verdict", WHY),
    Metric("kvtier_remote_queued", "gauge", "Blocks and prefixes that wait to be written.",
           _of(_remote, "queued")),
    Metric("kvtier_remote_known_objects", "gauge", "Objects that are known to exist, or to have been absent "
           "lately.", _of(_remote, "known_objects")),
    Metric("kvtier_remote_latency_seconds", "gauge", "Time until the first byte of an object arrives, on "
           "average.", _of(_remote, "latency_s")),
    Metric("kvtier_coding_failures", "counter", "Blocks that could not be encoded or decoded.",
           _of(_coding, "failures")),
    Metric("kvtier_staged_bytes", "gauge", "Memory in use for encoded blocks that wait to be written.",
           _of(_coding, "staged_bytes")),
    Metric("kvtier_staged_limit_bytes", "gauge", "Limit on the memory for encoded blocks.",
           _of(_coding, "staged_limit_bytes")),
    Metric("kvtier_staging_waits", "counter", "How often blocks had to wait for this memory.",
           _of(_coding, "waited")),
    Metric("kvtier_staging_refusals", "counter",
           "How often blocks got none of this memory and were written unencoded.", _of(_coding, "refused")),
    Metric("kvtier_scrub_frames", "counter", "Frames that the scrub has read.",
           _of(_scrub, "frames")),
    Metric("kvtier_scrub_damaged_frames", "counter", "Damaged frames that the scrub has found.",
           _of(_scrub, "damaged")),
    Metric("kvtier_scrub_round_seconds", "gauge", "Duration of the last scrub of all segments; 0 before"
           " the first one has ended.",
           lambda f: _scrub(f).get("last_round_s") or 0),
    # The event loop.
    Metric("kvtier_loop_lag_seconds", "histogram", "Delay of a timer in the daemon's event loop, "
           "sampled 20 times a second.", lambda f: f["loop"]),
    Metric("kvtier_loop_lag_max_seconds", "gauge", f"Largest delay in the last {KEPT_S} s.",
           lambda f: f["loop"]["most_s"][str(KEPT_S)]),
    # Tenants.
    Metric("kvtier_tenant_capacity_bytes", "gauge", "A tenant's share of the warm tier.",
           _of_tenants("capacity_bytes"), "tenant", open=True),
    Metric("kvtier_tenant_bytes", "gauge", "Memory of a tenant that holds available blocks.",
           _of_tenants("used_bytes"), "tenant", open=True),
    Metric("kvtier_tenant_engines", "gauge", "Engines of a tenant.", _of_tenants("engines"), "tenant",
           open=True),
    Metric("kvtier_tenant_sessions", "gauge", "Clients of a tenant with an open space.",
           _of_tenants("sessions"), "tenant", open=True),
    Metric("kvtier_tenant_connections", "gauge", "Connected clients of a tenant.",
           _of_tenants("connections"), "tenant", open=True),
    Metric("kvtier_tenant_connections_limit", "gauge", "How many clients of a tenant may be connected.",
           _of_tenants("max_clients"), "tenant", open=True),
    Metric("kvtier_tenant_served_seconds", "counter", "Time for which the event loop served a tenant.",
           _of_tenants("served_s"), "tenant", open=True),
    Metric("kvtier_tenant_message_bytes", "gauge", "Memory of a tenant's requests that are incomplete and "
           "answers that its clients have not received.", _of_tenants("message_bytes"), "tenant", open=True),
    Metric("kvtier_tenant_message_limit_bytes", "gauge", "Limit of this memory.",
           _of_tenants("message_limit_bytes"), "tenant", open=True),
    Metric("kvtier_tenant_lookup_tokens", "counter", "Tokens looked up by a tenant.",
           lambda f: {name: of["lookup_tokens"] - of["coming_tokens"] for name, of in f["tenants"].items()},
           "tenant", open=True),
    Metric("kvtier_tenant_hit_tokens", "counter", "Tokens that a tenant found, in any tier.",
           lambda f: {name: of["hit_tokens"] - of["coming_tokens"] for name, of in f["tenants"].items()},
           "tenant", open=True),
    Metric("kvtier_tenant_used_tokens", "counter", "Found tokens that the tenant's clients reported as "
           "used.",
           _of_tenants("used_tokens"), "tenant", open=True),
    Metric("kvtier_tenant_spoilt_blocks", "counter", "Blocks of a tenant that were overwritten in memory "
           "after their save, and forgotten.", _of_tenants("spoilt_blocks"), "tenant", open=True),
)  # fmt: skip
