"""Parts of tables: bars, shares, and numbers as text. Imports rich only when it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

BAR_CELLS = 24
LEAST_BAR_CELLS = 4
LABEL_CELLS = 20
NAME_CELLS = 12  # of a name that wraps: fewer are hard to read


class Bar(Protocol):
    """Draws a part of a whole as a bar."""

    def __call__(self, part: float, whole: float, cells: int = BAR_CELLS) -> Text: ...


def console_of() -> Console:
    """Return a console that prints text unchanged, without markup."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # `Commands.invoke` handles it for all commands

    return Plain(highlight=False, markup=False, emoji=False)


def bar_of(ascii_only: bool) -> Bar:
    from rich.text import Text

    full, empty = ("#", "-") if ascii_only else ("█", "░")

    def bar(part: float, whole: float, cells: int = BAR_CELLS) -> Text:
        filled = min(cells, round(cells * part / whole)) if whole else 0
        if part and not filled:  # a small part must be visible
            filled = 1
        return Text.assemble((full * filled, "cyan"), (empty * (cells - filled), "dim"))

    return bar


def table_of(*headings: str, least: Sequence[int] = ()) -> Table:
    """Return a table without lines. A heading that begins with > is for a column of numbers.

    A heading that ends in ~ is for a column of text that wraps if space is short. `least` has the minimum
    widths of the first columns, so that the columns do not move when the table is drawn again.
    """
    from rich.table import Table

    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="dim",
        show_header=any(heading.strip(">~") for heading in headings),
    )
    for heading, min_width in zip_longest(headings, least):
        justify: Literal["left", "right"] = "right" if heading.startswith(">") else "left"
        gives_way = heading.endswith("~")
        table.add_column(
            heading.strip(">~"),
            justify=justify,
            no_wrap=not gives_way,
            overflow="fold",
            min_width=min_width,
        )
    return table


def row(table: Table, *cells: str | Text) -> None:
    """Add a row. Its first cell, the label, does not give way to the others on a narrow terminal."""
    from rich.text import Text

    label = table.columns[0]
    label.min_width = max(label.min_width or 0, min(len(cells[0]), LABEL_CELLS))
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def print_fitting(table: Table) -> None:
    """Print a table, without the numbers at its right for which the terminal is too narrow.

    rich would take the room from the columns that wrap, and so lose names."""
    from rich.cells import cell_len

    console, columns = console_of(), table.columns

    def width(column: Column) -> int:
        longest = max(cell_len(str(cell)) for cell in (column.header, *column.cells))
        return longest if column.no_wrap else min(longest, NAME_CELLS)

    while columns[-1].no_wrap and sum(width(one) + 2 for one in columns) > console.width + 2:
        columns.pop()
    console.print(table)


def share_rows(
    table: Table, label: str, whole: int, parts: Mapping[str, int], bar: Bar, cells: int = BAR_CELLS
) -> None:
    """Add a row for the whole, and a row with a bar for each of its parts."""
    row(table, label, "", "", f"{whole:,}")
    for name, part in parts.items():
        row(table, f"  {name}", bar(part, whole, cells), percent(part, whole), f"{part:,}")


def tier_rows(
    table: Table, name: str, tier: Mapping[str, Any], bar: Bar, cells: int = BAR_CELLS
) -> None:
    """Add a row for what a tier holds, and one for its memory while that is being allocated."""
    from kvtier.units import format_bytes

    capacity, used = tier.get("capacity_bytes", 0), tier.get("used_bytes", 0)
    amounts = f"{format_bytes(used)} of {format_bytes(capacity)}"
    blocks = count(tier.get("blocks", 0), "block")
    row(table, name, bar(used, capacity, cells), percent(used, capacity), amounts, blocks)
    ready = tier.get("allocated_bytes", capacity)
    if ready < capacity:
        part = percent(ready, capacity)
        row(table, "", bar(ready, capacity, cells), part, "allocated so far", "")
    compressed = tier.get("compressed", {})
    if size := compressed.get("capacity_bytes", 0):
        used = compressed["used_bytes"]
        amounts = f"{format_bytes(used)} of {format_bytes(size)}"
        blocks = f"{count(compressed['blocks'], 'block')}, {compressed['effective']:.2f}x"
        row(table, "compressed", bar(used, size, cells), percent(used, size), amounts, blocks)


def resident_row(table: Table, stats: Mapping[str, Any]) -> None:
    """Add a row for what engines hold in their own caches, if they hold anything."""
    from kvtier.units import format_bytes

    resident = stats.get("hot", {}).get("resident", {})
    if resident.get("blocks", 0):
        engines = count(resident["engines"], "engine")
        amounts = f"{format_bytes(resident['bytes'])} in {engines}"
        row(table, "hot", "", "", amounts, count(resident["blocks"], "block"))


def copies_rows(table: Table, stats: Mapping[str, Any], bar: Bar, cells: int = BAR_CELLS) -> None:
    """Add a row for the copies in the memory of each GPU."""
    from kvtier.units import format_bytes

    for gpu, one in stats.get("hot", {}).get("arena", {}).get("gpus", {}).items():
        used, capacity = one["used_bytes"], one["capacity_bytes"]
        amounts = f"{format_bytes(used)} of {format_bytes(capacity)}"
        blocks = count(one["blocks"], "block")
        # With the first digits of its UUID the label is as wide as "compressed".
        label, share = f"GPU {gpu[:6]}", percent(used, capacity)
        row(table, label, bar(used, capacity, cells), share, amounts, blocks)


def falling(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the counts above 0, the largest first."""
    return sorted(((name, n) for name, n in counts.items() if n), key=lambda item: -item[1])


def percent(part: float, whole: float) -> str:
    """Return the share in whole percent; 100% only for the whole and 0% only for nothing."""
    if not whole or not part:
        return "0%"
    share = 100 * part / whole
    if share < 1:
        return "<1%"
    return ">99%" if 99 < share < 100 else f"{share:.0f}%"


def count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# Outcomes of tokens that were not saved again, but not lost either.
KEPT_ALREADY = {"present": "already stored", "in_progress": "save in progress"}
# A client that gets this answer offers the same tokens again, so they do not count as offered twice.
OFFERED_AGAIN = "writing"


def not_taken(why: str) -> str:
    """Return the label of offered tokens that were not saved for this reason."""
    return KEPT_ALREADY.get(why, f"refused {why}")


def duration(seconds: float) -> str:
    """Return the two largest units: enough to see a recent restart."""
    left = int(seconds)
    parts: list[str] = []
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or parts or unit == "s":
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])
