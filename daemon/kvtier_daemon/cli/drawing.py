"""Pieces of tables for people: bars, shares, and numbers in words. Nothing of rich is imported before it is
used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

BAR_CELLS = 24


class Bar(Protocol):
    """Draws how much of a whole a part is."""

    def __call__(self, part: float, whole: float, cells: int = BAR_CELLS) -> Text: ...


def console_of() -> Console:
    """Return what prints text as it is: a name with brackets or colons in it means nothing more."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # for the command's end, where all are told the same

    return Plain(highlight=False, markup=False, emoji=False)


def bar_of(full: str, empty: str) -> Bar:
    from rich.text import Text

    def bar(part: float, whole: float, cells: int = BAR_CELLS) -> Text:
        filled = min(cells, round(cells * part / whole)) if whole else 0
        if part and not filled:  # a little is not nothing
            filled = 1
        return Text.assemble((full * filled, "cyan"), (empty * (cells - filled), "dim"))

    return bar


def table_of(*headings: str, least: Sequence[int] = ()) -> Table:
    """Return a table without lines; a heading that begins with > is of a column of numbers.

    A heading that ends in ~ is of a column of text that gives way when room is short. `least`: how wide the
    first columns are at least, so that what is drawn again stands still.
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
    from rich.text import Text

    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def falling(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return what was counted at all, the most first."""
    return sorted(((name, n) for name, n in counts.items() if n), key=lambda item: -item[1])


def percent(part: float, whole: float) -> str:
    """Return the share in whole percent; 100% only for all of it and 0% only for nothing."""
    if not whole or not part:
        return "0%"
    share = 100 * part / whole
    if share < 1:
        return "<1%"
    return ">99%" if 99 < share < 100 else f"{share:.0f}%"


def count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# Of what was offered and not taken: these were not lost.
KEPT_ALREADY = {"present": "kept already", "in_progress": "being saved already"}


def not_taken(why: str) -> str:
    """What to call tokens that were offered and not taken for this reason."""
    return KEPT_ALREADY.get(why, f"refused {why}")


def duration(seconds: float) -> str:
    """Return the two largest units: enough to know whether it was restarted lately."""
    left = int(seconds)
    parts: list[str] = []
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or parts or unit == "s":
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])
