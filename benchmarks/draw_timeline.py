"""Draw one hit's timeline as SVG, from the file that the plugin's option `timeline` names.

python benchmarks/draw_timeline.py hits.json hit.svg            # the last hit
python benchmarks/draw_timeline.py hits.json hit.svg REQUEST
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LABEL, ROW, EDGE = 960, 190, 26, 14
TICKS = 8
COLORS = {"copy": "#d9822b", "blocks come": "#8c6bb1", "first step": "#2b8a5a"}
OTHER = "#5b7fa6"


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


def drawn(spans: list[dict[str, Any]]) -> str:
    start = min(one["ts"] for one in spans)
    whole_ms = max(one["ts"] + one["dur"] - start for one in spans) / 1000 or 0.001
    scale = (WIDTH - LABEL - 110) / whole_ms
    height = EDGE * 4 + ROW * len(spans) + 24
    about = spans[0]["args"]
    tokens = ", ".join(f"{count} tokens {tier}" for tier, count in about["tokens"].items() if count)
    bottom = height - 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{EDGE}" y="20" font-size="14">{escape(about["request"])}: {tokens},'
        f" {whole_ms:.2f} ms</text>",
    ]
    step, at_ms = step_of(whole_ms), 0.0
    while at_ms <= whole_ms:
        x = LABEL + at_ms * scale
        parts.append(f'<line x1="{x:.1f}" y1="34" x2="{x:.1f}" y2="{bottom}" stroke="#dddddd"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle" fill="#666666">{at_ms:g} ms</text>'
        )
        at_ms = round(at_ms + step, 6)
    for row, one in enumerate(spans):
        y = 40 + row * ROW
        x, width = LABEL + (one["ts"] - start) / 1000 * scale, max(1.5, one["dur"] / 1000 * scale)
        color = next((c for name, c in COLORS.items() if one["name"].startswith(name)), OTHER)
        parts += [
            f'<text x="{EDGE}" y="{y + 14}">{escape(one["name"])}</text>',
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 8}" fill="{color}"/>',
            f'<text x="{x + width + 5:.1f}" y="{y + 14}" fill="#333333">{one["dur"] / 1000:.2f} ms</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    spans = read_spans(Path(sys.argv[1]).read_text())
    request = sys.argv[3] if len(sys.argv) == 4 else None
    Path(sys.argv[2]).write_text(drawn(of_request(spans, request)))


if __name__ == "__main__":
    main()
