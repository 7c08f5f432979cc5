"""What the prompts of a service cost with tiers of certain sizes: GPUs, memory, and disks that wear out.

All amounts are in the currency of the prices that the user gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

GIB = 1 << 30
HOUR_S, DAY_H, YEAR_H = 3600.0, 24.0, 8760.0
RATED_YEARS = 5.0  # for which drives are rated to bear `writes_per_day`
MILLION = 1e6
# Shares of a budget that are spent on memory; the rest is spent on disks.
SPLITS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0)


@dataclass(frozen=True, slots=True)
class Prices:
    """`gpu_hour`: of one hour of all GPUs of an engine. `memory_gib` and `nvme_gib`: to buy a GiB, which is
    replaced after `years`, or when it is worn out: a disk bears `writes_per_day` writes of its whole size for
    five years. `busy`: the share of its time in which an engine computes prompts."""

    gpu_hour: float
    memory_gib: float
    nvme_gib: float
    years: float = 4.0
    writes_per_day: float = 1.0
    busy: float = 0.7

    def bought(self, memory_bytes: int, nvme_bytes: int) -> float:
        """What memory and disks of these sizes cost to buy."""
        return (memory_bytes * self.memory_gib + nvme_bytes * self.nvme_gib) / GIB

    def disk_years(self, nvme_bytes: int, written_a_day: int) -> float:
        """How long a disk with this number of bytes written per day is used."""
        if not written_a_day or not nvme_bytes:
            return self.years
        rated_bytes = nvme_bytes * self.writes_per_day * RATED_YEARS * YEAR_H / DAY_H
        return min(self.years, rated_bytes / (written_a_day * YEAR_H / DAY_H))

    def splits(self, budget: float) -> list[tuple[int, int]]:
        """Sizes of memory and disk, in bytes, that cost this much to buy."""
        return [
            (int(share * budget / self.memory_gib * GIB), int((1 - share) * budget / self.nvme_gib * GIB))
            for share in SPLITS
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cost:
    """Of the prompts of a trace, per million of their tokens. `engines`: that the trace needs on average."""

    per_million: float
    gpu_per_million: float
    memory_per_million: float
    nvme_per_million: float
    engines: float
    bought: float
    disk_years: float


def cost_of(
    prices: Prices, tokens: int, span_s: float, busy_s: float, memory_bytes: int = 0, nvme_bytes: int = 0,
    written_a_day: int = 0,
) -> Cost:  # fmt: skip
    """What prompts with this many tokens, in this time, cost if engines are busy for `busy_s` in all."""
    hours = span_s / HOUR_S
    disk_years = prices.disk_years(nvme_bytes, written_a_day)
    gpu = busy_s / HOUR_S / prices.busy * prices.gpu_hour
    memory = prices.bought(memory_bytes, 0) / (prices.years * YEAR_H) * hours
    nvme = prices.bought(0, nvme_bytes) / (disk_years * YEAR_H) * hours
    millions = max(1, tokens) / MILLION
    return Cost(
        (gpu + memory + nvme) / millions, gpu / millions, memory / millions, nvme / millions,
        busy_s / prices.busy / span_s if span_s else 0.0, prices.bought(memory_bytes, nvme_bytes), disk_years,
    )  # fmt: skip


def read_prices(text: str) -> Prices:
    """Parse NAME=NUMBER,... ValueError: what is wrong, and which names there are."""
    names = {field.name.replace("_", "-"): field.name for field in fields(Prices)}
    found: dict[str, float] = {}
    for item in text.split(","):
        name, _, number = (part.strip() for part in item.partition("="))
        if name not in names:
            raise ValueError(f"unknown price {name!r}; known are {', '.join(names)}")
        try:
            found[names[name]] = float(number)
        except ValueError:
            raise ValueError(f"{name}: {number!r} is not a number") from None
        if not 0 < found[names[name]] < float("inf"):
            raise ValueError(f"{name}: {number} is not above 0")
    missing = [name for name in ("gpu-hour", "memory-gib", "nvme-gib") if names[name] not in found]
    if missing:
        raise ValueError(
            f"without {missing[0]}; for example gpu-hour=2.5,memory-gib=4,nvme-gib=0.1"
        )
    prices = Prices(**found)
    if prices.busy > 1:
        raise ValueError(f"busy: {prices.busy:g} is above 1")
    return prices


def frontier(runs: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """The price to buy and the cost per million of those runs that no other run undercuts in both."""
    found: list[tuple[float, float]] = []
    for bought, cost in sorted((run["cost"]["bought"], run["cost"]["per_million"]) for run in runs):
        if not found or cost < found[-1][1]:
            found.append((bought, cost))
    return found
