"""Every metric there is: its name, what it counts, and where in the daemon's figures that is.

The figures are what `kvtier status --json` prints, so the two never disagree, but for what lookups were told
to expect from the disk: there it counts as a hit at once, and is taken back if it does not come. A counter
that falls is a restart to Prometheus, so here such tokens count once it is known what became of them.

Labels have closed sets, so that every series is there from the start; but for tenants, which are configured.
What somebody counts that is in no set is "other": a name forgotten here must not blind who looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier.catalog import WHY_MISSED
from kvtier.catalog.blocks import WHY_EVICTED
from kvtier.catalog.departures import UNWRITTEN
from kvtier.planning import WHY
from kvtier.wire import CODES, OUTCOMES
from kvtier_daemon.observing.exposition import Family, Kind, Labels, Sample
from kvtier_daemon.observing.lag import KEPT_S

Figures = Mapping[str, Any]
Read = Callable[[Figures], Any]

WARM_STATES: Final = ("ready", "writing", "promoting", "doomed", "quarantined")
ROUTES: Final = ("save", "load", "cold_write", "cold_read", "cold_rewrite", "cold_scrub")
FRAMES: Final = ("written", "written_again", "read", "not_read", "spoilt")
TIERS: Final = ("warm", "cold")
OTHER: Final = "other"  # a test fails where a daemon shows it
ENDS: Final[Mapping[Kind, tuple[str, ...]]] = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "info": ("_info",),
}


@dataclass(frozen=True, slots=True)
class Series:
    """A metric. `values` are of one label; without a label `read` gives one number, or a histogram, else one
    for each value. `open` says that the label's values are what is configured."""

    name: str
    kind: Kind
    help: str
    read: Read
    label: str = ""
    values: tuple[str, ...] = ()
    open: bool = False

    @property
    def sample_names(self) -> tuple[str, ...]:
        """What is asked for in a query."""
        return tuple(self.name + end for end in ENDS[self.kind])

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label,) if self.label else ()

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


class Split(Series):
    """By two labels: `read` gives (tier, state) and a number."""

    __slots__ = ()

    @property
    def labels(self) -> tuple[str, ...]:
        return ("tier", "state")

    def _samples(self, figures: Figures) -> Iterator[Sample]:
        for (tier, state), value in self.read(figures).items():
            labels: Labels = (("tier", tier), ("state", state))
            yield Sample(labels, value)


def families(figures: Figures) -> Iterable[Family]:
    """All of them, of these figures."""
    return (series.family(figures) for series in SERIES)


# --- where they are -------------------------------------------------------------------------------


def _warm(figures: Figures) -> Mapping[str, Any]:
    found: Mapping[str, Any] = figures["tiers"]["warm"]
    return found


def _cold(figures: Figures) -> Mapping[str, Any]:
    """Empty where there is no such tier: then all of it is zero."""
    found: Mapping[str, Any] = figures["tiers"].get("cold", {})
    return found


def lookups(figures: Figures) -> int:
    return int(figures["lookup_tokens"] - figures["coming_tokens"])


def hits(figures: Figures) -> dict[str, int]:
    hits = dict(figures["hit_tokens"])
    hits["cold"] = hits.get("cold", 0) - figures["coming_tokens"]
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


def _scrub(figures: Figures) -> Mapping[str, Any]:
    return _cold(figures).get("scrub") or {}


def _of_tenants(name: str) -> Read:
    def read(figures: Figures) -> dict[str, int]:
        return {tenant: of[name] for tenant, of in figures["tenants"].items()}

    return read


def _of_cold(name: str) -> Read:
    return lambda figures: _cold(figures).get(name, 0)


def _of_coding(name: str) -> Read:
    return lambda figures: _cold(figures).get("coding", {}).get(name, 0)


# --- what they are --------------------------------------------------------------------------------

SERIES: Final[tuple[Series, ...]] = (
    Series("kvtier_build", "info", "What runs; always 1.",
           lambda f: {f["version"]: 1}, "version", open=True),
    Series("kvtier_start_time_seconds", "gauge", "When the daemon began, in Unix time.",
           lambda f: f["started_at_s"]),
    Series("kvtier_cpu_seconds", "counter", "Processor time that the daemon took, all its threads.",
           lambda f: f["cpu_s"]),
    # How well it does.
    Series("kvtier_lookup_tokens", "counter", "Tokens looked up; the sum of all hits and misses.",
           lookups),
    Series("kvtier_hit_tokens", "counter", "Tokens found, by the tier that had them.",
           hits, "tier", TIERS),
    Series("kvtier_used_tokens", "counter", "Tokens that clients say they used, of those found, by the tier "
           "that had them: an engine leaves what its own cache has.",
           lambda f: f["used_tokens"], "tier", TIERS),
    Series("kvtier_miss_tokens", "counter", "Tokens not found, by the reason.",
           lambda f: f["miss_tokens"], "reason", WHY_MISSED),
    Series("kvtier_coming_tokens", "gauge", "Tokens that lookups were told to expect from the disk; they "
           "count in no other series until they came or did not.", lambda f: f["coming_tokens"]),
    Series("kvtier_saved_tokens", "counter", "Tokens saved, a block's for each of its parts.",
           lambda f: f["saved_tokens"]),
    Series("kvtier_refused_tokens", "counter", "Tokens offered and not taken, by the reason; present is no "
           "loss.", lambda f: f["refused_tokens"], "reason", OUTCOMES[1:]),
    Series("kvtier_recompute_seconds_avoided", "counter", "What computing what was found would have taken, "
           "by the speed that its clients measured; nothing for those that told none.",
           lambda f: f["recompute_avoided_s"]),
    # What it holds.
    Series("kvtier_tier_capacity_bytes", "gauge", "What a tier may hold; 0 if there is none.",
           lambda f: {"warm": _warm(f)["capacity_bytes"], "cold": _cold(f).get("capacity_bytes", 0)},
           "tier", TIERS),
    Split("kvtier_tier_bytes", "gauge", "What a tier holds, by state. Of the warm one they add up to what of "
          "it has been made.", _bytes_by_state),
    Series("kvtier_tier_blocks", "gauge", "Blocks that can be had, by tier; one may be in both.",
           lambda f: {"warm": _warm(f)["blocks"], "cold": _cold(f).get("blocks", 0)}, "tier", TIERS),
    Series("kvtier_evicted_blocks", "counter", "Blocks that left memory or were dropped, by the reason; "
           "demoted ones are on disk.", lambda f: f["evicted_blocks"], "reason", WHY_EVICTED),
    Series("kvtier_catalog_memory_bytes", "gauge", "Memory for knowing all blocks.",
           lambda f: f["catalog_bytes"]),
    Series("kvtier_notes_memory_bytes", "gauge", "Memory for knowing what was here.",
           lambda f: f["notes_bytes"]),
    # What moves.
    Series("kvtier_transfer_bytes", "counter", "Bytes moved, by route: what clients saved and what they "
           "used of what they found, what was written to disk, read from it, copied to free segments, read "
           "to find damage.",
           routes, "route", ROUTES),
    Series("kvtier_load_seconds", "histogram", "How long a client held what it read: from the answer that "
           "gave the lease to its release.", lambda f: f["latencies"]["load"]),
    Series("kvtier_save_seconds", "histogram", "How long a client took to save: from the answer that gave "
           "the slots to the last commit.", lambda f: f["latencies"]["save"]),
    Series("kvtier_wait_seconds", "histogram", "How long a request waited for blocks on disk: from the first "
           "answer that said they come to the first that said no more do.",
           lambda f: f["latencies"]["wait"]),
    # Queues, and who is here.
    Series("kvtier_waiting_lookups", "gauge", "Lookups that wait for blocks on disk.",
           lambda f: f["waiting_lookups"]),
    Series("kvtier_reading_blocks", "gauge", "Blocks asked of the disks and not there yet.",
           _of_cold("reading")),
    Series("kvtier_writing_blocks", "gauge", "Blocks on their way to the disks.", _of_cold("writing")),
    Series("kvtier_leaving_segments", "gauge", "Segments that are being freed.", _of_cold("leaving")),
    Series("kvtier_engines", "gauge", "Engines connected: one for all processes of a vLLM engine, and one "
           "for each other client that has a space open.", lambda f: f["engines"]),
    Series("kvtier_sessions", "gauge", "Clients that have a space open: of a vLLM engine its scheduler and "
           "each of its ranks.", lambda f: f["sessions"]),
    Series("kvtier_connections", "gauge", "Clients connected, of any kind.", lambda f: f["connections"]),
    Series("kvtier_leases", "gauge", "Leases to read or to write, pins too.",
           lambda f: sum(of["leases"] for of in f["tenants"].values())),
    Series("kvtier_spaces", "gauge", "Model configurations that have blocks or users.",
           lambda f: sum(of["spaces"] for of in f["tenants"].values())),
    Series("kvtier_pinned_bytes", "gauge", "Memory that pins keep.",
           lambda f: sum(of["pinned_bytes"] for of in f["tenants"].values())),
    Series("kvtier_failures", "counter", "Requests that failed, by code; internal is a bug of the daemon's.",
           lambda f: f["failures"], "code", CODES),
    # The cold tier.
    Series("kvtier_cold_on", "gauge", "1 if the disks give and take; 0 if not, or if there are none.",
           lambda f: int(_cold(f).get("on", False))),
    Series("kvtier_cold_given_up", "gauge", "1 if something of the cold tier is off until a restart.",
           lambda f: int(_cold(f).get("given_up", False))),
    Series("kvtier_cold_faults", "counter", "Errors and timeouts of the disks.", _of_cold("faults")),
    Series("kvtier_cold_frames", "counter", "Blocks written to the disks and read from them, by what became "
           "of them: not_read ones did not come (out of time, called off, an error), spoilt ones were "
           "damaged.",
           lambda f: _cold(f).get("states", {}), "outcome", FRAMES),
    Series("kvtier_cold_loads", "counter", "Requests for blocks on disk, by what was decided and why.",
           lambda f: _cold(f).get("loads", {}), "verdict", WHY),
    Series("kvtier_cold_unasked_blocks", "gauge", "Blocks that a start found on the disks and that nobody "
           "can ask for: their models are stored otherwise now (cold.codecs).", _of_cold("unasked")),
    Series("kvtier_cold_unwritten_blocks", "counter", "Blocks evicted that were on no disk, by the reason.",
           lambda f: _cold(f).get("unwritten", {}), "reason", UNWRITTEN),
    Series("kvtier_cold_unread_blocks", "counter", "Blocks that a read did not bring.",
           lambda f: sum(_cold(f).get("not_read", {}).values())),
    Series("kvtier_cold_day_bytes", "gauge", "Written to the disks in the last 24 hours.",
           _of_cold("day_bytes")),
    Series("kvtier_cold_day_limit_bytes", "gauge", "What may be (cold.daily_writes); 0 is no limit.",
           _of_cold("day_limit_bytes")),
    Series("kvtier_coding_failures", "counter", "Blocks that could not be encoded or decoded.",
           _of_coding("failures")),
    Series("kvtier_staged_bytes", "gauge", "Memory that blocks are encoded to, in use until they are "
           "written.", _of_coding("staged_bytes")),
    Series("kvtier_staged_limit_bytes", "gauge", "All there is of it.", _of_coding("staged_limit_bytes")),
    Series("kvtier_staging_waits", "counter", "How often blocks that were to be encoded found none of it "
           "free.", _of_coding("waited")),
    Series("kvtier_staging_refusals", "counter", "How often they got none, and were written as they are.",
           _of_coding("refused")),
    Series("kvtier_scrub_frames", "counter", "Frames read again to find damage.",
           lambda f: _scrub(f).get("frames", 0)),
    Series("kvtier_scrub_damaged_frames", "counter", "Frames that this found damaged.",
           lambda f: _scrub(f).get("damaged", 0)),
    Series("kvtier_scrub_round_seconds", "gauge", "What the last round over all segments took; 0 before it.",
           lambda f: _scrub(f).get("last_round_s") or 0),
    # The loop.
    Series("kvtier_loop_lag_seconds", "histogram", "How late the daemon's loop came to a timer, 20 times a "
           "second.", lambda f: f["loop"]),
    Series("kvtier_loop_lag_max_seconds", "gauge", f"The same at most, in the last {KEPT_S} s.",
           lambda f: f["loop"]["most_s"][str(KEPT_S)]),
    # Tenants.
    Series("kvtier_tenant_capacity_bytes", "gauge", "A tenant's part of the warm tier.",
           _of_tenants("capacity_bytes"), "tenant", open=True),
    Series("kvtier_tenant_bytes", "gauge", "What of it holds blocks that can be had.",
           _of_tenants("used_bytes"), "tenant", open=True),
    Series("kvtier_tenant_engines", "gauge", "A tenant's engines.", _of_tenants("engines"), "tenant",
           open=True),
    Series("kvtier_tenant_sessions", "gauge", "A tenant's clients that have a space open.",
           _of_tenants("sessions"), "tenant", open=True),
    Series("kvtier_tenant_lookup_tokens", "counter", "Tokens that a tenant looked up.",
           lambda f: {name: of["lookup_tokens"] - of["coming_tokens"] for name, of in f["tenants"].items()},
           "tenant", open=True),
    Series("kvtier_tenant_hit_tokens", "counter", "Tokens of those that were found, in any tier.",
           lambda f: {name: of["hit_tokens"] - of["coming_tokens"] for name, of in f["tenants"].items()},
           "tenant", open=True),
    Series("kvtier_tenant_used_tokens", "counter", "Tokens of those that its clients say they used.",
           _of_tenants("used_tokens"), "tenant", open=True),
)  # fmt: skip
