"""Draw rate against distortion as SVG, from the result of bench_quality.py.

python benchmarks/draw_quality.py results/quality.json quality.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 74, 30, 46, 54
# What belongs to a line begins with its name; others are points of their own.
LINES = {"ecsq": "#0b6bcb", "cachegen": "#d9480f", "CacheGen's code": "#862e9c", "q": "#2b8a3e",
         "KIVI": "#5c940d", "fp8": "#495057",
         "TurboQuant": "#c2255c"}  # fmt: skip
LETTER = 6.2  # how wide one is


def line_of(name: str) -> str:
    return next((line for line in LINES if name.startswith(line)), "")


def drawn(rows: Sequence[dict[str, Any]], model: str) -> str:
    """Bits an element across, KL upwards in tens; less of both is better."""
    points = [
        (row["more"]["bits"], row["more"]["KL"], row["name"])
        for row in rows
        if row["more"].get("KL")
    ]
    right = ceil(max(bits for bits, _, _ in points)) + 1
    low = floor(log10(min(apart for _, apart, _ in points)))
    high = ceil(log10(max(apart for _, apart, _ in points)))

    def x(bits: float) -> float:
        return LEFT + bits / right * (WIDTH - LEFT - RIGHT)

    def y(apart: float) -> float:
        share = (log10(apart) - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
        f' viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="bold">{escape(model)}: what encoded K and V'
        " cost</text>",
    ]
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#dee2e6"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        )
    for bits in range(right + 1):
        at = x(bits)
        parts.append(f'<path d="M{at:.1f} {HEIGHT - BOTTOM}v5" stroke="#495057"/>')
        parts.append(
            f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{bits}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">bits an element</text>'
    )
    parts.append(
        f'<text transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
        "KL of a prediction</text>"
    )
    for line, colour in LINES.items():
        mine = sorted(point for point in points if line_of(point[2]) == line)
        if len(mine) > 1:
            path = "L".join(f"{x(bits):.1f} {y(apart):.1f}" for bits, apart, _ in mine)
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    taken: list[tuple[float, float, float, float]] = [
        (x(bits) - 4, y(apart) - 4, x(bits) + 4, y(apart) + 4) for bits, apart, _ in points
    ]
    for bits, apart, name in sorted(points):
        colour = LINES.get(line_of(name), "#c2255c")
        at, level = x(bits), y(apart)
        parts.append(f'<circle cx="{at:.1f}" cy="{level:.1f}" r="4" fill="{colour}"/>')
        left, top, anchor = _room(at, level, LETTER * len(name), taken)
        taken.append((left, top, left + LETTER * len(name), top + 13))
        parts.append(
            f'<text x="{left if anchor == "start" else left + LETTER * len(name):.1f}" y="{top + 11:.1f}"'
            f' text-anchor="{anchor}" fill="{colour}" stroke="#fff" stroke-width="3" paint-order="stroke">'
            f"{escape(name)}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def _room(
    at: float, level: float, width: float, taken: Sequence[tuple[float, float, float, float]]
) -> tuple[float, float, str]:
    """Where a name lies over nothing: right of its point, left of it, or further up or down."""
    for offset in (0.0, -11.0, 11.0, -20.0, 20.0, -30.0, 30.0):
        for left, anchor in ((at + 8, "start"), (at - 8 - width, "end")):
            top = level - 7 + offset
            inside = left > LEFT and left + width < WIDTH - 4
            free = all(
                left + width < x0 or left > x1 or top + 13 < y0 or top > y1
                for x0, y0, x1, y1 in taken
            )
            if inside and free:
                return left, top, anchor
    return at + 8, level - 7, "start"


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    result = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(drawn(result["rows"], result["environment"]["model"]))


if __name__ == "__main__":
    main()
