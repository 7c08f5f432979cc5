"""Draw one hit's timeline as SVG, from the file that the plugin's option `timeline` names.

python benchmarks/draw_timeline.py hits.json hit.svg            # the last hit
python benchmarks/draw_timeline.py hits.json hit.svg REQUEST
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LABEL, ROW, EDGE = 960, 190, 26, 14
TICKS = 8
COLORS = {"copy": "#d9822b", "blocks come": "#8c6bb1", "first step": "#2b8a5a"}
OTHER, BESIDE = "#5b7fa6", "#adb5bd"
Bar = tuple[str, float, float]  # what, from which ms on, for how many ms


def read_spans(text: str) -> list[dict[str, Any]]:
    """The spans of a file that is perhaps still being written: what is after the last whole line is left."""
    whole = text[: text.rfind("\n") + 1].strip().removeprefix("[").rstrip(",\n")
    return list(json.loads(f"[{whole}]"))


def of_request(spans: list[dict[str, Any]], request: str | None) -> list[dict[str, Any]]:
    """One request's spans in the order of their begin: the last hit's, unless one is named."""
    if not spans:
        raise SystemExit("no hit is in this file")
    name = request or spans[-1]["args"]["request"]
    chosen = [one for one in spans if one["args"]["request"] == name]
    if not chosen:
        raise SystemExit(f"no hit of request {name!r} is in this file")
    return sorted(chosen, key=lambda one: (one["ts"], one["ts"] + one["dur"]))


def step_of(span_ms: float) -> float:
    """A round distance of ticks."""
    step = 0.01
    for factor in (2, 2.5, 2) * 8:
        if span_ms / step <= TICKS:
            break
        step *= factor
    return step


def bars_of(spans: list[dict[str, Any]]) -> list[Bar]:
    start = min(one["ts"] for one in spans)
    return [(one["name"], (one["ts"] - start) / 1000, one["dur"] / 1000) for one in spans]


def drawn(title: str, bars: Sequence[Bar], beside: Sequence[Bar] = ()) -> str:
    """Draw one bar per row, and the bars for comparison below them in grey."""
    whole_ms = max(at + took for _, at, took in (*bars, *beside)) or 0.001
    scale = (WIDTH - LABEL - 110) / whole_ms
    gap = EDGE if beside else 0
    height = EDGE * 4 + ROW * (len(bars) + len(beside)) + gap + 24
    bottom = height - 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
        f' viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{EDGE}" y="20" font-size="14">{escape(title)}</text>',
    ]
    step, at_ms = step_of(whole_ms), 0.0
    while at_ms <= whole_ms:
        x = LABEL + at_ms * scale
        parts.append(f'<line x1="{x:.1f}" y1="34" x2="{x:.1f}" y2="{bottom}" stroke="#dddddd"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle" fill="#666666">{at_ms:g} ms</text>'
        )
        at_ms = round(at_ms + step, 6)
    for row, (name, at, took) in enumerate((*bars, *beside)):
        y = 40 + row * ROW + (gap if row >= len(bars) else 0)
        x, width = LABEL + at * scale, max(1.5, took * scale)
        color = next((c for begin, c in COLORS.items() if name.startswith(begin)), OTHER)
        color = color if row < len(bars) else BESIDE
        parts += [
            f'<text x="{EDGE}" y="{y + 14}">{escape(name)}</text>',
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 8}" fill="{color}"/>',
            f'<text x="{x + width + 5:.1f}" y="{y + 14}" fill="#333333">{took:.2f} ms</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])


def title_of(spans: list[dict[str, Any]]) -> str:
    about, bars = spans[0]["args"], bars_of(spans)
    tokens = ", ".join(f"{count} tokens {tier}" for tier, count in about["tokens"].items() if count)
    whole_ms = max(at + took for _, at, took in bars)
    return f"{about['request']}: {tokens}, {whole_ms:.2f} ms"


def main() -> None:
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    spans = read_spans(Path(sys.argv[1]).read_text())
    request = sys.argv[3] if len(sys.argv) == 4 else None
    chosen = of_request(spans, request)
    Path(sys.argv[2]).write_text(drawn(title_of(chosen), bars_of(chosen)))


if __name__ == "__main__":
    main()
