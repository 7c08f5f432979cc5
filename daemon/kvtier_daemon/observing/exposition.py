"""Metrics as text: in the format of Prometheus, and in OpenMetrics if the client requests it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Kind = Literal["counter", "gauge", "histogram", "info"]
Labels = Sequence[tuple[str, str]]

PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_ENDS: Final = {"counter": "_total", "info": "_info"}


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of a family. The value of a histogram is what `Histogram.report` returns."""

    labels: Labels
    value: float | int | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric; `name` does not include the suffix of its kind."""

    name: str
    kind: Kind
    help: str
    samples: Sequence[Sample]


def accepts_openmetrics(accept: str) -> bool:
    """Return whether this Accept header prefers OpenMetrics, or accepts it as much as any other format."""
    wanted = {"openmetrics": 0.0, "text": 0.0}
    for part in accept.split(","):
        kind, *parameters = (piece.strip() for piece in part.lower().split(";"))
        quality = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    quality = float(parameter[2:])
                except ValueError:
                    quality = 0.0
        if kind == "application/openmetrics-text":
            wanted["openmetrics"] = max(wanted["openmetrics"], quality)
        elif kind == "text/plain":
            wanted["text"] = max(wanted["text"], quality)
    return wanted["openmetrics"] > 0 and wanted["openmetrics"] >= wanted["text"]


def render(families: Iterable[Family], openmetrics: bool = False) -> bytes:
    lines: list[str] = []
    for family in families:
        lines += _family(family, openmetrics)
    if openmetrics:
        lines.append("# EOF")
    return ("\n".join(lines) + "\n").encode()


def _family(family: Family, openmetrics: bool) -> Iterator[str]:
    end = _ENDS.get(family.kind, "")
    # In the older format a counter has the name of its samples, and the type `info` does not exist.
    name = family.name if openmetrics else family.name + end
    kind = "gauge" if family.kind == "info" and not openmetrics else family.kind
    yield f"# HELP {name} {_escaped(family.help, openmetrics)}"
    yield f"# TYPE {name} {kind}"
    for sample in family.samples:
        if isinstance(sample.value, Mapping):
            yield from _histogram(family.name, sample.labels, sample.value)
        else:
            yield _line(family.name + end, sample.labels, sample.value)


def _histogram(name: str, labels: Labels, found: Mapping[str, Any]) -> Iterator[str]:
    bounds = [*(repr(float(bound)) for bound in found["le_s"]), "+Inf"]
    for bound, count in zip(bounds, found["counts"], strict=True):
        yield _line(f"{name}_bucket", (*labels, ("le", bound)), count)
    yield _line(f"{name}_sum", labels, found["sum_s"])
    yield _line(f"{name}_count", labels, found["counts"][-1])


def _line(name: str, labels: Labels, value: float | int) -> str:
    pairs = ",".join(f'{label}="{_escaped(text, True)}"' for label, text in labels)
    return f"{name}{{{pairs}}} {value!r}" if pairs else f"{name} {value!r}"


def _escaped(text: str, quotes: bool) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text
