"""The content of `kvtier top`: draws reports and their differences. Needs no terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from kvtier_daemon.cli.tables import (
    OFFERED_AGAIN,
    bar_of,
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
from kvtier_daemon.tiers.states import is_away, meaning

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

VIEWS: Final = ("tiers", "hits", "moves", "clients")
ROUTES: Final = {
    "engines → warm": ("bytes", "saved"),
    "warm → engines": ("bytes", "loaded"),
    "warm → cold": ("cold", "written"),
    "cold → warm": ("cold", "read"),
}
KEPT: Final = 240  # reports
NARROW: Final = 80
SPARKS: Final = " ▁▂▃▄▅▆▇█"
LABEL: Final = 20
CHART_ROWS: Final = 4  # of the chart of the hit rate
MOST_ROWS: Final = 6  # of a route's chart
LIMIT_BAR: Final = 100
# Widths of values that change, so that the columns do not move.
SHARE: Final = len(">99%")
RATE: Final = len("100.00 GB/s")
UP: Final = len("59 min 59 s")
TIERS: Final = (0, 0, SHARE, len("0.98 GiB of 0.98 GiB"), len("9,999,999 blocks"))
SHARES: Final = (LABEL, 0, SHARE, len("9,999,999,999"))


@dataclass(slots=True, frozen=True)
class Moment:
    """A report, the clients, and their time."""

    at: float
    stats: Mapping[str, Any]
    clients: Sequence[Mapping[str, Any]] = ()


@dataclass(slots=True)
class ScreenHistory:
    """The last reports. It is cleared when another process of the daemon answers."""

    moments: deque[Moment] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, moment: Moment) -> None:
        if self.moments and self.moments[-1].stats.get("pid") != moment.stats.get("pid"):
            self.moments.clear()
        self.moments.append(moment)

    @property
    def now(self) -> Moment:
        return self.moments[-1]

    def grown(self, *path: str) -> dict[str, int]:
        """Return the growth of these counters in the last interval; with one report, since the start."""
        after = _at(self.now.stats, path)
        before = _at(self.moments[-2].stats, path) if len(self.moments) > 1 else {}
        return {name: n - before.get(name, 0) for name, n in after.items()}

    def grown_of_all(self, *path: str) -> list[tuple[str, int]]:
        """Return the same for all counters that are not 0, in the stable order of their totals."""
        grown = self.grown(*path)
        return [(name, grown[name]) for name, _ in falling(_at(self.now.stats, path))]

    def rates(self, route: str) -> list[float]:
        """Return the bytes per second on this route, for each interval."""
        each = list(self.moments)
        return [
            (_moved(after.stats, route) - _moved(before.stats, route)) / (after.at - before.at)
            for before, after in pairwise(each)
            if after.at > before.at
        ]

    def hit_shares(self) -> list[float]:
        """Return the hit rate of each interval."""
        shares = []
        for before, after in pairwise(self.moments):
            looked = after.stats.get("lookup_tokens", 0) - before.stats.get("lookup_tokens", 0)
            hits = _found(after.stats) - _found(before.stats)
            shares.append(hits / looked if looked > 0 else 0.0)
        return shares


def _found(stats: Mapping[str, Any]) -> int:
    return sum(stats.get("hit_tokens", {}).values())


def _at(stats: Mapping[str, Any], path: Sequence[str]) -> Mapping[str, int]:
    found: Any = stats
    for name in path:
        found = found.get(name, {})
    return found if isinstance(found, Mapping) else {path[-1]: found}


def _moved(stats: Mapping[str, Any], route: str) -> int:
    where, what = ROUTES[route]
    cold = stats.get("tiers", {}).get("cold", {})
    counters = cold.get("bytes", {}) if where == "cold" else stats.get("bytes", {})
    return int(counters.get(what, 0))


@dataclass(slots=True, frozen=True)
class ScreenRoom:
    """The size of the screen. `rows` is 0 if the height is unlimited."""

    width: int
    rows: int = 0
    ascii_only: bool = False

    def cells(self, spare: int) -> int:
        """Return the length of a bar if `spare` columns are used for other things."""
        return max(8, min(LIMIT_BAR, self.width - spare))


def draw(history: ScreenHistory, view: str, room: ScreenRoom) -> Group:
    """Return one screen of `view`. Needs 80 columns and 22 rows, and uses more if there are more."""
    from rich.console import Group
    from rich.padding import Padding

    parts = {"tiers": _overview, "hits": _hits, "moves": _moves, "clients": _clients}[view]
    each = parts(history, room)
    return Group(*(Padding(part, (0, 0, 1, 1)) for part in [_head(history), *each]))


def _head(history: ScreenHistory) -> Text:
    from rich.text import Text

    stats = history.now.stats
    return Text.assemble(
        (f"kvtier {stats.get('version', '')}", "bold"),
        f"   up {duration(stats.get('uptime_s', 0)):<{UP}}",
        f"   {count(stats.get('engines', 0), 'engine')}",
        f"   {_span(history)}",
    )


def _span(history: ScreenHistory) -> str:
    if len(history.moments) < 2:
        return "since the start"
    return f"last {history.moments[-1].at - history.moments[-2].at:.1f} s"


# --- the views -----------------------------------------------------------------------------------


def _overview(history: ScreenHistory, room: ScreenRoom) -> Iterator[RenderableType]:
    """Tiers, hits, movements and queues, in a few lines each. With more rows also a chart of the hit rate,
    the clients, and charts of the movements."""
    tiers, queues = _tier_bars(history, room), _queues(history)
    shares = _shares(history, room, most=4)
    routes = _routes(history)
    taken = [1, tiers.row_count, shares.row_count, len(routes), queues.row_count]
    left = room.rows - sum(lines + 1 for lines in taken)
    charted = left > CHART_ROWS + 1 and not room.ascii_only
    left -= (CHART_ROWS + 1) * charted
    clients = list(_clients(history, room))
    listed = left > sum(table.row_count + 2 for table in clients)
    left -= sum(table.row_count + 2 for table in clients) * listed
    yield tiers
    yield shares
    if charted:
        yield _hit_chart(history, room)
    yield _rate_lines(history, room, max(1, min(MOST_ROWS, 1 + left // len(routes))))
    yield queues
    if listed:
        yield from clients


def _tier_bars(history: ScreenHistory, room: ScreenRoom) -> Table:
    table = table_of("", "", ">", "", ">", least=TIERS)
    resident_row(table, history.now.stats)
    copies_rows(table, history.now.stats, bar_of(room.ascii_only), room.cells(56))
    for name, tier in history.now.stats.get("tiers", {}).items():
        tier_rows(table, name, tier, bar_of(room.ascii_only), room.cells(56))
    return table


def _hit_chart(history: ScreenHistory, room: ScreenRoom) -> Table:
    table = table_of("", ">", "", least=(LABEL, RATE))
    shares = history.hit_shares()
    now = shares[-1] if shares else 0.0
    curve = _curve(shares[-(room.width - 40) :], CHART_ROWS, 1.0)
    row(table, "hit rate", percent(now, 1.0), curve)
    return table


def _shares(history: ScreenHistory, room: ScreenRoom, most: int) -> Table:
    """The tokens that were looked up: hits by tier, misses by reason."""
    bar = bar_of(room.ascii_only)
    looked_up = history.grown("lookup_tokens")["lookup_tokens"]
    hits = history.grown("hit_tokens")
    parts = {"hit": sum(hits.values())} | {f"  hit {tier}": n for tier, n in hits.items()}
    by_tier = history.grown("used_tokens")
    if by_tier:
        parts["used of these"] = sum(by_tier.values())
    misses = history.grown_of_all("miss_tokens")
    parts |= {f"miss {why}": n for why, n in misses[:most]}
    if others := misses[most:]:
        parts["miss, others"] = sum(tokens for _, tokens in others)
    table = table_of("", "", ">", ">", least=SHARES)
    share_rows(table, "tokens looked up", looked_up, parts, bar, room.cells(56))
    return table


def _rate_lines(history: ScreenHistory, room: ScreenRoom, rows: int) -> Table:
    table = table_of("", ">", "", least=(LABEL, RATE))
    for route in _routes(history):
        rates = history.rates(route)
        curve = "" if room.ascii_only else _curve(rates[-(room.width - 40) :], rows)
        row(table, _ascii(route, room.ascii_only), _rate(rates[-1] if rates else 0.0), curve)
    return table


def _routes(history: ScreenHistory) -> list[str]:
    has_cold = "cold" in history.now.stats.get("tiers", {})
    return [route for route in ROUTES if has_cold or ROUTES[route][0] != "cold"]


def _ascii(text: str, ascii_only: bool) -> str:
    return text.replace("→", "->") if ascii_only else text


def _rate(bytes_s: float) -> str:
    """Return the rate in GB/s, or in MB/s if it is small."""
    if bytes_s >= 1e8 or not bytes_s:
        return f"{bytes_s / 1e9:.2f} GB/s"
    return f"{bytes_s / 1e6:.2f} MB/s"


def _curve(values: Sequence[float], rows: int, top: float = 0.0) -> Text:
    """Return a chart of the values, `rows` lines high. Its full height is `top`, or the largest value."""
    from rich.text import Text

    top = top or max(values, default=0.0)
    steps = len(SPARKS) - 1
    heights = [
        min(rows * steps, -int(-value * rows * steps // top)) if top else 0 for value in values
    ]
    lines = (
        "".join(SPARKS[max(0, min(steps, height - below))] for height in heights)
        for below in range((rows - 1) * steps, -1, -steps)
    )
    return Text("\n".join(lines), "cyan")


def _queues(history: ScreenHistory) -> Table:
    stats = history.now.stats
    cold = stats.get("tiers", {}).get("cold", {})
    states = stats.get("tiers", {}).get("warm", {}).get("states", {})
    table = table_of("", "~")
    held = [
        f"{name} {states[name]:,}"
        for name in ("writing", "doomed", "quarantined")
        if states.get(name)
    ]
    row(table, "slots held", ", ".join(held) or "none")
    for name, tier in stats.get("tiers", {}).items():
        if told := meaning(name, tier):
            row(table, f"{name} tier", told)
        if tier.get("failure") and not is_away(tier):
            off = "" if tier.get("on", True) else "off: "
            row(table, f"{name} tier", f"{off}{tier['failure']}")
    if hints := stats.get("hints"):
        row(table, "hints", "; ".join(hints))
    if cold:
        queues = ("reading", "writing", "leaving")
        row(table, "disk queues", ", ".join(f"{name} {cold.get(name, 0):,}" for name in queues))
    evicted = [f"{why} {n:,}" for why, n in history.grown_of_all("evicted_blocks")]
    row(table, "evicted blocks", ", ".join(evicted) or "none")
    return table


def _hits(history: ScreenHistory, room: ScreenRoom) -> Iterator[RenderableType]:
    """All reasons for misses, the outcomes of saves, and a chart of the hit rate."""
    shares = _shares(history, room, most=12)
    yield shares
    bar = bar_of(room.ascii_only)
    saved = history.grown("saved_tokens")["saved_tokens"]
    outcomes = history.grown_of_all("refused_tokens")
    refused = [(why, tokens) for why, tokens in outcomes if why != OFFERED_AGAIN]
    offered = saved + sum(tokens for _, tokens in refused)
    table = table_of("", "", ">", ">", least=SHARES)
    parts = {"saved": saved} | {not_taken(why): n for why, n in refused}
    share_rows(table, "tokens offered", offered, parts, bar, room.cells(56))
    yield table
    if room.rows > shares.row_count + table.row_count + CHART_ROWS + 5 and not room.ascii_only:
        yield _hit_chart(history, room)


def _moves(history: ScreenHistory, room: ScreenRoom) -> Iterator[RenderableType]:
    """Each route with a chart of its last minutes; the queues; the disk loads by outcome."""
    from rich.text import Text

    queues, routes = _queues(history), _routes(history)
    loads = history.grown_of_all("tiers", "cold", "loads")
    left = room.rows - (queues.row_count + 3 + 2 * bool(loads)) - 2 * len(routes)
    rows = max(1, min(MOST_ROWS, left // len(routes)))
    for route in routes:
        rates = history.rates(route)
        now, top = (rates[-1] if rates else 0.0), max(rates, default=0.0)
        lines = Text(f"{_ascii(route, room.ascii_only):<{LABEL}}{_rate(now):>{RATE + 2}}")
        lines.append(f"   most {_rate(top)}", "dim")
        if not room.ascii_only:
            lines.append("\n").append(_curve(rates[-(room.width - 4) :], rows))
        yield lines
    yield queues
    if loads:
        table = table_of("", "~")
        row(table, "disk loads", ", ".join(f"{why} {n:,}" for why, n in loads))
        yield table


def _clients(history: ScreenHistory, room: ScreenRoom) -> Iterator[Table]:
    """The tenants, then the clients."""
    from kvtier.units import format_bytes

    wide = room.width > NARROW
    names = ("tenant~", ">fill", ">used", ">blocks", ">spaces", ">engines", ">leases")
    table = table_of(*names, *([">pinned"] if wide else []))
    for name, tenant in history.now.stats.get("tenants", {}).items():
        capacity, used = tenant.get("capacity_bytes", 0), tenant.get("used_bytes", 0)
        counts = [f"{tenant.get(what, 0):,}" for what in ("blocks", "spaces", "engines", "leases")]
        pinned = [format_bytes(tenant.get("pinned_bytes", 0))] if wide else []
        row(table, name, percent(used, capacity), format_bytes(used), *counts, *pinned)
    yield table
    table = table_of("client~", "tenant~", ">pid", ">uid", ">spaces", ">up")
    for client in history.now.clients:
        row(
            table, client["client"], client["tenant"], str(client["pid"]), str(client["uid"]),
            str(client["spaces"]), duration(client["up_s"]),
        )  # fmt: skip
    yield table
