"""`kvtier status`: the contents of the daemon, its hits and its misses, as a table or as JSON."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvtier_daemon.cli.flags import Socket, flag, print_json
from kvtier_daemon.cli.tables import (
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

    from kvtier import Client

# The command answers within 2 s of its start. If its own start took longer, it waits longer for the daemon,
# because the machine is slow.
TOLD_S = 1.75
ANSWER_S, LEAST_ANSWER_S = 1.5, 1.0


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


@contextmanager
def connected(socket: Path | None, name: str, answer_s: float = 0.0) -> Iterator[Client]:
    """Connect to the daemon at `socket`, or at the default socket. If no daemon of this version answers,
    Unavailable contains the remedy. `answer_s` is the time limit of later answers, if they may take longer
    than the first."""
    from kvtier import Client
    from kvtier.client import default_socket
    from kvtier.errors import ProtocolError, Refused, Unavailable

    path = Path(socket or default_socket())
    try:
        first_s = _first_answer_s()
        if answer_s > first_s:  # detect a daemon that does not answer sooner
            Client.connect(str(path), timeout_s=first_s, populate=False, name=name).close()
        timeout_s = max(answer_s, first_s)
        with Client.connect(
            str(path), timeout_s=timeout_s, populate=False, name=name, reconnect_s=0
        ) as client:
            yield client
    except Unavailable as error:
        raise Unavailable(_why(path, error)) from error
    except ProtocolError as error:
        text = f"the process at {path} is not a kvtier daemon of this version: {error}"
        raise Unavailable(
            f"{text}; `kvtier --version` prints the version of this command"
        ) from error
    except Refused as error:
        if error.code != "wrong_schema":
            raise
        from importlib.metadata import version

        text = f"{path}: {error.message}; this command is kvtier {version('kvtier')}"
        raise Unavailable(text) from error


@cache
def _first_answer_s() -> float:
    """Return the time limit of the first answer, which depends on how long this process took to start."""
    return round(min(ANSWER_S, max(LEAST_ANSWER_S, TOLD_S - _age_s())), 1)


def _age_s() -> float:
    """Return the age of this process."""
    # The program's name may contain blanks and brackets; it ends with the last bracket.
    begun = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - begun / os.sysconf("SC_CLK_TCK")


def _why(path: Path, error: Exception) -> str:
    """Return why no daemon answers at `path`, and the remedy."""
    from kvtier import client
    from kvtier.errors import ConfigError
    from kvtier.wire import LIMIT_SOCKET_PATH
    from kvtier_daemon.claim import is_stopped, named, owner_of
    from kvtier_daemon.config.schema import default_socket

    cause = error.__cause__
    if isinstance(cause, PermissionError):
        return _closed(path)
    if len(os.fsencode(path)) > LIMIT_SOCKET_PATH:
        return str(error)
    try:
        owner = owner_of(path)
    except ConfigError:  # the owner is unknown: report what the client found
        owner = None
    if owner is not None:
        advice = (
            f"it is stopped; `kill -CONT {owner}` continues it"
            if is_stopped(owner)
            else "see its log, and restart it if this continues"
        )
        return f"{named(owner)} listens at {path} and does not serve: {error}; {advice}"
    reason = (cause.strerror or cause) if isinstance(cause, OSError) else error
    own = default_socket(os.environ, os.geteuid())
    nor = f", nor at {own}" if str(path) == client.DEFAULT_SOCKET and own != path else ""
    return (
        f"no daemon answers at {path}: {reason}{nor}; start one with `kvtier serve --warm-size "
        "8GiB`, or give its path with --socket"
    )


def _closed(path: Path) -> str:
    """Return why this user cannot connect to the socket, and the remedy."""
    uid = os.geteuid()
    try:
        found = path.stat()
    except OSError:
        return (
            f"uid {uid} may not enter the directory of {path}; set socket in the daemon's "
            "configuration to a path in a directory that its users can enter"
        )
    group = _group_name(found.st_gid)
    join = (
        f"become a member of group {group}, or " if found.st_mode & 0o020 and found.st_gid else ""
    )
    return (
        f"uid {uid} may not connect to {path} (owner uid {found.st_uid}, group {group}, mode "
        f"{found.st_mode & 0o777:04o}); {join}set socket_group or socket_mode in the daemon's "
        "configuration"
    )


def _group_name(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


# --- the table -----------------------------------------------------------------------------------


def draw(stats: Mapping[str, Any], console: Console) -> None:
    """Print `stats` as tables, within 80 columns."""
    from rich.padding import Padding

    for part in _parts(stats, bar_of(console.options.ascii_only)):
        console.print(Padding(part, (0, 0, 1, 1)))


def _parts(stats: Mapping[str, Any], bar: Bar) -> Iterator[RenderableType]:
    from rich.text import Text

    yield Text.assemble(
        (f"kvtier {stats.get('version', '')}", "bold"),
        f"   up {duration(stats.get('uptime_s', 0))}",
        f"   {count(stats.get('sessions', 0), 'session')}",
    )
    for hint in stats.get("hints", ()):
        yield Text(f"! {hint}", "yellow")
    yield _tiers(stats, bar)
    yield _flows(stats, bar)
    if notes := _notes(stats):
        yield notes
    if tenants := stats.get("tenants"):
        yield _tenants(tenants)


def _tiers(stats: Mapping[str, Any], bar: Bar) -> Table:
    table = table_of("", "", ">", "", "")
    resident_row(table, stats)
    copies_rows(table, stats, bar)
    for name, tier in stats.get("tiers", {}).items():
        tier_rows(table, name, tier, bar)
        if meaning(name, tier):
            row(table, "", "", "", tier["state"], "")
    return table


def _flows(stats: Mapping[str, Any], bar: Bar) -> Table:
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
    share_rows(table, "tokens looked up", looked_up, shares, bar)
    saved = stats.get("saved_tokens", 0)
    refused = {
        not_taken(why): n
        for why, n in falling(stats.get("refused_tokens", {})) if why != OFFERED_AGAIN
    }  # fmt: skip
    offered = saved + sum(refused.values())
    shares = {"saved": saved} | refused if offered else {}
    share_rows(table, "tokens offered", offered, shares, bar)
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
    faults, failure = cold.get("faults", 0), cold.get("failure", "")
    if is_away(cold):
        return []
    if cold.get("given_up"):
        return [f"off: {failure}; repair that and restart the daemon"]
    if failure:
        off = "" if cold.get("on", True) else "off: "
        advice = f"the daemon retries; if it continues, {remedy(failure)}"
        return [f"{faults:,}; {off}{failure}; {advice}"]
    return [f"{faults:,}, all disks work again"] if faults else []


def _tenants(tenants: Mapping[str, Any]) -> Table:
    from kvtier.units import format_bytes

    table = table_of(
        "tenant~", ">fill", ">used", ">of", ">blocks", ">spaces", ">sessions", ">leases"
    )
    for name, tenant in tenants.items():
        capacity, used = tenant.get("capacity_bytes", 0), tenant.get("used_bytes", 0)
        counts = (f"{tenant.get(what, 0):,}" for what in ("blocks", "spaces", "sessions", "leases"))
        amounts = percent(used, capacity), format_bytes(used), format_bytes(capacity)
        row(table, name, *amounts, *counts)
    return table
