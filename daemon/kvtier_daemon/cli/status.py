"""`kvtier status`: the contents of the daemon, its hits and its misses, as a table or as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from kvtier_daemon.cli.connecting import connected
from kvtier_daemon.cli.flags import Socket, flag, print_json
from kvtier_daemon.cli.tables import (
    BAR_CELLS,
    LEAST_BAR_CELLS,
    OFFERED_AGAIN,
    Bar,
    bar_of,
    console_of,
    copies_rows,
    count,
    duration,
    falling,
    not_taken,
    percent,
    resident_row,
    row,
    share_rows,
    table_of,
    tier_rows,
)  # fmt: skip
from kvtier_daemon.tiers.states import is_away, is_switched_off, meaning, remedy

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table


def status(
    json: Annotated[bool, flag("--json", "Print one JSON object instead of a table.")] = False,
    socket: Socket = None,
) -> None:
    """Show what the daemon holds, its hits and its misses. Exits with 3 if no daemon answers."""
    with connected(socket, "status") as client:
        stats = client.stats()
    if json:
        print_json(stats)
        return
    draw(stats, console_of())


def draw(stats: Mapping[str, Any], console: Console) -> None:
    """Print `stats` as tables, within 80 columns, or fewer with shorter bars and fewer counts of tenants."""
    from rich.padding import Padding

    for part in _parts(stats, bar_of(console.options.ascii_only), console.width):
        console.print(Padding(part, (0, 0, 1, 1)))


def _parts(stats: Mapping[str, Any], bar: Bar, width: int) -> Iterator[RenderableType]:
    from rich.text import Text

    cells = max(LEAST_BAR_CELLS, min(BAR_CELLS, width - 56))
    yield Text.assemble(
        (f"kvtier {stats.get('version', '')}", "bold"),
        f"   up {duration(stats.get('uptime_s', 0))}",
        f"   {count(stats.get('sessions', 0), 'session')}",
    )
    for hint in stats.get("hints", ()):
        yield Text(f"! {hint}", "yellow")
    yield _tiers(stats, bar, cells)
    yield _flows(stats, bar, cells)
    if notes := _notes(stats):
        yield notes
    if tenants := stats.get("tenants"):
        yield _tenants(tenants, width)


def _tiers(stats: Mapping[str, Any], bar: Bar, cells: int) -> Table:
    table = table_of("", "", ">", "~", "~")
    resident_row(table, stats)
    copies_rows(table, stats, bar, cells)
    for name, tier in stats.get("tiers", {}).items():
        tier_rows(table, name, tier, bar, cells)
        if meaning(name, tier):
            row(table, "", "", "", tier["state"], "")
    return table


def _flows(stats: Mapping[str, Any], bar: Bar, cells: int) -> Table:
    """Return the hit rate in total and by tier, the misses, and the outcomes of saves, as shares of 100%."""
    table = table_of("~", "", ">", ">")
    found = stats.get("hit_tokens", {})
    hits = {"hit": sum(found.values())}
    hits |= {f"  hit {tier}": n for tier, n in falling(found)}
    misses = {f"miss {why}": n for why, n in falling(stats.get("miss_tokens", {}))}
    looked_up = stats.get("lookup_tokens", 0)
    by_tier = stats.get("used_tokens", {})
    used = {"used of these": sum(by_tier.values())} if by_tier else {}
    shares = hits | used | misses if looked_up else {}
    share_rows(table, "tokens looked up", looked_up, shares, bar, cells)
    saved = stats.get("saved_tokens", 0)
    refused = {
        not_taken(why): n
        for why, n in falling(stats.get("refused_tokens", {})) if why != OFFERED_AGAIN
    }  # fmt: skip
    offered = saved + sum(refused.values())
    shares = {"saved": saved} | refused if offered else {}
    share_rows(table, "tokens offered", offered, shares, bar, cells)
    return table


def _notes(stats: Mapping[str, Any]) -> Table | None:
    """Return the other counters, one line for each kind."""
    from kvtier.units import format_bytes

    table = table_of("", "~")
    moved = [f"{way} {format_bytes(n)}" for way, n in stats.get("bytes", {}).items() if n]
    evicted = [f"{why} {n:,}" for why, n in falling(stats.get("evicted_blocks", {}))]
    states = {
        name: [f"{state} {n:,}" for state, n in falling(tier.get("states", {}))]
        for name, tier in stats.get("tiers", {}).items()
    }
    switched = {
        f"{name} tier": [text]
        for name, tier in stats.get("tiers", {}).items()
        if (text := meaning(name, tier))
    }
    lines = switched | {"bytes": moved, "evicted blocks": evicted}
    lines["hot blocks"] = [
        f"{name.removesuffix('_blocks').replace('_', ' ')} {n:,}"
        for name, n in falling(stats.get("hot", {}).get("resident", {}))
        if name.endswith("_blocks")
    ]
    lines |= {f"{name} blocks": counts for name, counts in states.items()}
    again = stats.get("refused_tokens", {}).get(OFFERED_AGAIN, 0)
    lines["saves waited"] = [f"for the disk; {again:,} tokens were offered again"] if again else []
    if cold := stats.get("tiers", {}).get("cold"):
        lines |= _cold_notes(cold)
    if remote := stats.get("tiers", {}).get("remote"):
        lines |= _remote_notes(remote)
    for label, counts in lines.items():
        if counts:
            row(table, label, ", ".join(counts))
    return table if table.row_count else None


def _cold_notes(cold: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the wear of the disks, the results of the scrub, older copies of directories, and the faults."""
    from kvtier.units import format_bytes

    moved, scrub = cold.get("bytes", {}), cold.get("scrub", {})
    new, again = moved.get("written", 0), moved.get("written_again", 0)
    day, limit = cold.get("day_bytes", 0), cold.get("day_limit_bytes", 0)
    left = f"{format_bytes(max(0, limit - day))} left of {format_bytes(limit)}"
    each = f"{(new + again) / new:.2f} for each new byte" if new else ""
    looked = f"{count(scrub.get('frames', 0), 'frame')}, {scrub.get('damaged', 0):,} damaged"
    took = scrub.get("last_round_s")
    refused = cold.get("refused", {})
    return {
        "cold written": [format_bytes(new + again), each] if new else [],
        "  in 24 hours": [format_bytes(day), left if limit else "no limit"] if new or limit else [],
        "cold, other codec": [
            f"{count(lost, 'block')} stored with another cold.codecs setting for their model"
        ]
        if (lost := cold.get("unasked", 0))
        else [],
        "cold codecs": _codecs(cold.get("coding", {}).get("spaces", ())),
        "cold loads": [f"{why} {n:,}" for why, n in falling(cold.get("loads", {}))],
        "cold not written": [f"{why} {n:,}" for why, n in falling(cold.get("unwritten", {}))],
        "cold not read": [f"{why} {n:,}" for why, n in falling(cold.get("not_read", {}))],
        "cold scrub": [
            f"{format_bytes(rate)}/s, {looked}",
            f"last round {duration(took)}" if took is not None else "first round",
        ]
        if (rate := scrub.get("rate", 0))
        else ["off"],
        "cold, older copy": list(cold.get("older_copies", ())),
        "cold forgets": [failure] if (failure := cold.get("not_counted")) else [],
        "cold, refused": [
            f"{count(files, 'segment file')} with {format_bytes(refused['bytes'])} of cold.size; the log "
            "says why, and what to do"
        ]
        if (files := refused.get("files", 0))
        else [],
        "cold faults": _faults(cold),
    }


def _remote_notes(remote: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return what the remote store is, what was moved, and the failures."""
    from kvtier.units import format_bytes

    moved = [f"{way} {format_bytes(n)}" for way, n in remote.get("bytes", {}).items() if n]
    if remote.get("bytes", {}).get("read"):  # otherwise the rate is an assumption
        moved.append(f"{format_bytes(remote.get('read_bytes_s', 0))}/s")
        moved.append(f"first byte after {1000 * remote.get('latency_s', 0):.1f} ms")
    faults = remote.get("faults", 0)
    return {
        "remote store": [str(remote.get("store", "")), *moved],
        "remote loads": [f"{why} {n:,}" for why, n in falling(remote.get("loads", {}))],
        "remote objects known": [f"{remote.get('known_objects', 0):,}"],
        "remote failure": [
            f"off: {failure}" if is_switched_off(remote) else f"off: {failure}; the daemon retries"
        ]
        if (failure := remote.get("failure"))
        else [f"{faults:,} requests failed, works again"]
        if faults
        else [],
    }


def _codecs(spaces: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how many spaces use each codec, and its compression."""
    ratios: dict[str, list[float]] = {}
    for space in spaces:
        name = f"{space['codec']} (lossy)" if space.get("lossy") else space["codec"]
        ratios.setdefault(name, []).append(space["ratios"].get(space["codec"], 1.0))
    without = Counter((one["asked"], one["why"]) for one in spaces if one.get("why"))
    return [
        f"{name} in {count(len(found), 'space')}"
        + (f", {_smaller(found)}" if name != "raw" else "")
        for name, found in sorted(ratios.items())
    ] + [
        f"no {asked} in {count(spaces, 'space')}: {why}"
        for (asked, why), spaces in sorted(without.items())
    ]


def _smaller(ratios: Sequence[float]) -> str:
    least, most = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f"{least} times smaller" if least == most else f"{least} to {most} times smaller"


def _faults(cold: Mapping[str, Any]) -> list[str]:
    """Return how often the disks failed, the current failure, and the remedy."""
    faults = cold.get("faults", 0) - cold.get("refused", {}).get("files", 0)
    failure = cold.get("failure", "")
    if is_away(cold):
        return []
    if cold.get("given_up"):
        return [f"off: {failure}; repair that and restart the daemon"]
    if failure:
        off = "" if cold.get("on", True) else "off: "
        advice = f"the daemon retries; if it continues, {remedy(failure)}"
        return [f"{faults:,}; {off}{failure}; {advice}"]
    return [f"{faults:,}, all disks work again"] if faults else []


def _tenants(tenants: Mapping[str, Any], width: int) -> Table:
    from kvtier.units import format_bytes

    fitting = max(0, (width - 40) // 10)
    counts = ("blocks", "spaces", "sessions", "leases")[:fitting]
    table = table_of("tenant~", ">fill", ">used", ">of", *(f">{what}" for what in counts))
    for name, tenant in tenants.items():
        capacity, used = tenant.get("capacity_bytes", 0), tenant.get("used_bytes", 0)
        amounts = percent(used, capacity), format_bytes(used), format_bytes(capacity)
        row(table, name, *amounts, *(f"{tenant.get(what, 0):,}" for what in counts))
    return table
