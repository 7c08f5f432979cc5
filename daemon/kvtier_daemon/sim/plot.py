"""A chart as SVG: hit rates over sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import log10

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 44, 52
COLOURS = ("#0b6bcb", "#d9480f", "#2b8a3e", "#862e9c", "#c2255c", "#5c940d", "#495057", "#e67700")
Line = Sequence[tuple[float, float]]


def draw(
    title: str, across: str, lines: Mapping[str, Line], labels: Mapping[float, str], numbers: str = ".0%"
) -> str:  # fmt: skip
    """Return a chart of rates from 0 to 1, or other `numbers`, over sizes on a logarithmic axis."""
    sizes = sorted(labels)
    low, high = log10(sizes[0]), log10(sizes[-1])
    top = max((rate for line in lines.values() for _, rate in line), default=0.0)
    step = next(
        nice * 10.0**power
        for power in range(-2 if numbers == ".0%" else -6, 9)
        for nice in (1, 2, 5)
        if top <= 6 * nice * 10.0**power
    )
    ceiling = step * max(1, -(-top // step))

    def x(size: float) -> float:
        share = (log10(size) - low) / (high - low) if high > low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(rate: float) -> float:
        return HEIGHT - BOTTOM - rate / ceiling * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
        f' viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for mark in range(round(ceiling / step) + 1):
        at = y(mark * step)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#dee2e6"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{mark * step:{numbers}}</text>'
        )
    last = -100.0
    for size in sizes:
        at = x(size)
        parts.append(f'<path d="M{at:.1f} {HEIGHT - BOTTOM}v5" stroke="#495057"/>')
        if at - last >= 9 * max(map(len, labels.values())):  # if there is space
            last = at
            where = f'x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle"'
            parts.append(f"<text {where}>{escape(labels[size])}</text>")
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{escape(across)}</text>'
    )
    ends = sorted((y(line[-1][1]), name) for name, line in lines.items() if line)
    below = 0.0
    places: dict[str, float] = {}
    for at, name in ends:  # names at the ends of their lines, without overlap
        below = places[name] = max(at, below + 15)
    for number, (name, line) in enumerate(lines.items()):
        if not line:
            continue
        colour = COLOURS[number % len(COLOURS)]
        path = "L".join(f"{x(size):.1f} {y(rate):.1f}" for size, rate in line)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(size):.1f}" cy="{y(rate):.1f}" r="3" fill="{colour}"/>'
            for size, rate in line
        ]
        end = x(line[-1][0])
        text = f'x="{WIDTH - RIGHT + 14}" y="{places[name] + 4:.1f}" fill="{colour}"'
        if end < WIDTH - RIGHT - 1 or abs(places[name] - y(line[-1][1])) > 2:
            parts.append(
                f'<path d="M{end:.1f} {y(line[-1][1]):.1f}L{WIDTH - RIGHT + 12} {places[name]:.1f}"'
                f' stroke="{colour}" stroke-opacity="0.4"/>'
            )
        parts.append(f"<text {text}>{escape(name)}</text>")
    return "\n".join([*parts, "</svg>", ""])
