"""Write the README's table of figures from the result files, so that no number there was typed by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
SOURCES = {
    "warm": "python benchmarks/bench_warm.py",
    "control": "python benchmarks/bench_control.py",
    "cold": "python benchmarks/bench_cold.py",
    "ttft": "python benchmarks/bench_ttft.py",
}


def table() -> str:
    """The rows of all results that there are, each with its bar, and where and how they were measured."""
    lines = []
    for name, command in SOURCES.items():
        path = HERE / "results" / f"{name}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        where = result["environment"]
        state = "" if result["valid"] else " **The machine was disturbed during this run.**"
        lines += [
            f"`{command}` on {where['cores']} shared cores of {where['cpu']}.{state}",
            "",
            "| | measured | bar |",
            "| --- | --- | --- |",
            *(f"| {row['name']} | {measured(row)} | {row['bar']} |" for row in result["rows"]),
            "",
        ]
    return "\n".join(lines)


def measured(row: dict[str, Any]) -> str:
    value = f"{row['value']:.3g} {row['unit']}".strip()
    if row["low"] is not None:
        value += f" ({row['low']:.2f} to {row['high']:.2f})"
    if "GB/s" in row["more"]:
        value += f", {row['more']['GB/s']:.1f} GB/s"
    return value


def main() -> int:
    """Rewrite the table; with --check only say whether it is true."""
    text = README.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    wanted = f"{head}{BEGIN}\n{table()}{END}{tail}"
    if "--check" in sys.argv:
        if wanted != text:
            print(
                "README.md: the figures are not those of benchmarks/results; run benchmarks/figures.py"
            )
        return int(wanted != text)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
