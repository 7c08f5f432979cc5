"""`kvtier sim`: simulates a trace of requests with other sizes and policies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier_daemon.cli.flags import Json, PrefillGrowth, PrefillRate, print_json, value
from kvtier_daemon.cli.progress import progress

if TYPE_CHECKING:
    from kvtier_daemon.sim.prices import Prices
    from kvtier_daemon.sim.trace import TraceRequests
    from kvtier_daemon.tools.sizing import PrefillCost

ENOUGH = 0.95  # of the best hit rate of the tried sizes


def sim(
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE", help="A trace of kvtier record, or in Mooncake's format."),
    ],
    policy: Annotated[
        str, value("NAME,...", "Policies, as in warm.policy, or the offline optimum.")
    ] = "auto",
    blocks: Annotated[
        str | None, value("N,...", "Simulate one tier of N blocks, or of 5% of the trace's blocks.")
    ] = None,
    memory: Annotated[str | None, value("SIZE,...", "Sizes of the warm tier.")] = None,
    nvme: Annotated[str | None, value("SIZE,...", "Sizes of the cold tier; 0: none.")] = None,
    config: Annotated[
        Path | None, value("CONFIG", "The model's config.json, for its bytes per token.")
    ] = None,
    token_bytes: Annotated[
        int, value("BYTES", "Bytes per token, without CONFIG.", min=1)
    ] = 131_072,
    block_tokens: Annotated[
        int, value("N", "Tokens per block; 0: as in the trace, or 512.", min=0)
    ] = 0,
    prefill_rate: PrefillRate = 10_000,
    prefill_growth: PrefillGrowth = 0,
    engines: Annotated[
        int, value("N", "Engines, one request each at a time; 0: no queue.", min=0)
    ] = 0,
    memory_rate: Annotated[str, value("SIZE", "Bytes per second from memory.")] = "25GB",
    nvme_read: Annotated[str, value("SIZE", "Bytes per second from the disk.")] = "6GB",
    nvme_write: Annotated[str, value("SIZE", "Bytes per second to the disk.")] = "3GB",
    codec_ratio: Annotated[
        float, value("RATIO", "Stored bytes divided by saved bytes.", min=0.01, max=1.0)
    ] = 1.0,
    write_limit: Annotated[
        str, value("SIZE", "Bytes written per day, as cold.daily_writes; 0: no limit.")
    ] = "0",
    compressed: Annotated[
        float,
        value(
            "SHARE", "With --blocks: the share of the tier that is compressed memory.", min=0, max=1
        ),
    ] = 0,
    hbm: Annotated[
        str, value("SIZE", "The engines' own cache on top of memory; 0: not simulated.")
    ] = "0",
    residency: Annotated[
        str, value("NAME", "With --hbm, what kvtier knows of that cache: off, on or lazy.")
    ] = "on",
    admission: Annotated[
        str, value("NAME", "What is written to the disk: all, second-touch or auto.")
    ] = "auto",
    prices: Annotated[
        str,
        value("NAME=N,...", "Prices, such as gpu-hour=2.5,memory-gib=4,nvme-gib=0.1: show costs."),
    ] = "",
    budget: Annotated[
        float,
        value("AMOUNT", "With --prices: try ways to buy memory and NVMe for this amount.", min=0),
    ] = 0,
    plot: Annotated[
        Path | None, value("FILE", "Draw the hit rates as SVG; with --prices, the costs.")
    ] = None,
    json: Json = False,
) -> None:
    """Simulate a trace of requests with tiers of other sizes.

    Uses the daemon's own policies and planner. With --blocks it simulates one tier and prints its hit
    rate. Otherwise it simulates memory and disk, and the time to the first token. With --prices it
    also computes what the prompts cost, with kvtier and without.
    """
    from kvtier_daemon.cli.flags import amount, items
    from kvtier_daemon.sim.trace import read
    from kvtier_daemon.tools.sizing import PrefillCost

    requests = read(trace, block_tokens)
    prefill = PrefillCost(
        1 / prefill_rate, 1 / prefill_rate / prefill_growth if prefill_growth else 0.0
    )
    policies = items("--policy", policy)
    _check_policies(policies, blocks is not None)
    asked = _prices(prices, budget, sizes=bool(memory or nvme), one_tier=blocks is not None)
    if blocks is not None:
        counts = _counts(blocks, requests)
        _one_tier(requests, policies, counts, prefill, plot, json, compressed, codec_ratio)
        return
    if compressed:
        raise typer.BadParameter("--compressed: needs --blocks")
    from kvtier_daemon.sim.tiers import ADMISSIONS, RESIDENCY, Machine

    if residency not in RESIDENCY:
        raise typer.BadParameter(
            f"--residency: expected one of {', '.join(RESIDENCY)}, got {residency!r}"
        )
    if residency != "on" and not amount("--hbm", hbm):
        raise typer.BadParameter(f"--residency {residency}: needs --hbm, the engines' own cache")
    if admission not in ADMISSIONS:
        raise typer.BadParameter(
            f"--admission: expected one of {', '.join(ADMISSIONS)}, got {admission!r}"
        )
    if config is not None:
        from kvtier_daemon.cli.size import read_cache

        cache = read_cache(config)
        token_bytes = cache.prefix_bytes(2, whole=True) - cache.prefix_bytes(1, whole=True)
    whole = requests.native.unique * requests.block_tokens * token_bytes
    block_bytes = requests.block_tokens * token_bytes
    memories = _sizes("--memory", memory, [whole // 64, whole // 16, whole // 4], block_bytes)
    disks = _sizes("--nvme", nvme, [0, whole // 4, whole], block_bytes)
    sizes = [(memory_bytes, nvme_bytes) for memory_bytes in memories for nvme_bytes in disks]
    if asked is not None and budget:
        sizes = [one for one in asked.splits(budget) if one[0] >= block_bytes]
        if not sizes:
            raise typer.BadParameter(f"--budget: {budget:g} does not buy memory for one block")
    machines = [
        Machine(
            memory_bytes=memory_bytes, nvme_bytes=nvme_bytes, token_bytes=token_bytes, policy=name,
            prefill=prefill, memory_bytes_s=amount("--memory-rate", memory_rate),
            nvme_read_bytes_s=amount("--nvme-read", nvme_read),
            nvme_write_bytes_s=amount("--nvme-write", nvme_write), codec_ratio=codec_ratio, engines=engines,
            daily_bytes=amount("--write-limit", write_limit), admission=admission,
            hbm_bytes=amount("--hbm", hbm), residency=residency,
        )
        for name in policies for memory_bytes, nvme_bytes in sizes
    ]  # fmt: skip
    _two_tiers(requests, machines, asked, plot, json)


def _prices(text: str, budget: float, sizes: bool, one_tier: bool) -> Prices | None:
    from kvtier_daemon.sim.prices import read_prices

    if budget and not text:
        raise typer.BadParameter("--budget: needs --prices")
    if budget and sizes:
        raise typer.BadParameter("--budget: determines the sizes; leave out --memory and --nvme")
    if not text:
        return None
    if one_tier:
        raise typer.BadParameter("--prices: not with --blocks, which simulates no times")
    try:
        return read_prices(text)
    except ValueError as error:
        raise typer.BadParameter(f"--prices: {error}") from None


def _check_policies(policies: list[str], one_tier: bool) -> None:
    from kvtier_daemon.catalog.policy import make
    from kvtier_daemon.sim.replay import OPTIMUM

    for name in policies:
        if name == OPTIMUM and one_tier:
            continue
        try:
            make(name)
        except ValueError as error:
            raise typer.BadParameter(f"--policy: {error}") from None


def _counts(text: str, requests: TraceRequests) -> list[int]:
    from kvtier_daemon.cli.flags import items

    found = []
    for item in items("--blocks", text):
        try:
            count = (
                int(requests.native.unique * float(item[:-1]) / 100)
                if item.endswith("%")
                else int(item)
            )
        except (ValueError, OverflowError):
            count = 0
        if not 1 <= count < 1 << 31:
            raise typer.BadParameter(f"--blocks: {item!r} is not a number of blocks above 0")
        found.append(count)
    return found


def _sizes(flag: str, text: str | None, otherwise: list[int], least_bytes: int) -> list[int]:
    from kvtier.units import format_bytes
    from kvtier_daemon.cli.flags import amount, items

    if text is None:
        return otherwise
    sizes = []
    for item in items(flag, text):
        if item.strip().isdecimal() and (int(item) or flag == "--memory"):
            raise typer.BadParameter(
                f"{flag}: {item!r} has no unit; write {item}GiB if that is intended"
            )
        nbytes = amount(flag, item)
        if 0 < nbytes < least_bytes or (not nbytes and flag == "--memory"):
            least = format_bytes(least_bytes)
            raise typer.BadParameter(
                f"{flag}: {item!r} is smaller than one block, which has {least}"
            )
        sizes.append(nbytes)
    return sizes


def _trace(requests: TraceRequests) -> dict[str, Any]:
    return {
        "trace": str(requests.path),
        "requests": len(requests),
        "looked_up_blocks": requests.looked_up_blocks,
        "unique_blocks": requests.native.unique,
        "block_tokens": requests.block_tokens,
    }


def _save_plot(path: Path, picture: str) -> None:
    from kvtier.errors import ConfigError

    try:
        path.write_text(picture)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


# --- one tier --------------------------------------------------------------------------------------


def _one_tier(
    requests: TraceRequests,
    policies: list[str],
    counts: list[int],
    prefill: PrefillCost,
    plot: Path | None,
    json: bool,
    compressed: float,
    ratio: float,
) -> None:
    from dataclasses import asdict
    from functools import partial

    from kvtier_daemon.sim.replay import OPTIMUM, replay

    asked = [*policies, *(() if OPTIMUM in policies else (OPTIMUM,))]
    with progress() as bar:
        task = bar.add_task("requests", total=len(requests) * len(counts) * len(asked))
        play = partial(
            replay, requests, prefill=prefill, progress=lambda n: bar.advance(task, n),
            compressed=compressed, ratio=ratio,
        )  # fmt: skip
        found = [[play(name, count) for name in asked] for count in counts]
    runs = []
    for outcomes in found:
        best = outcomes[asked.index(OPTIMUM)]
        for outcome in outcomes[: len(policies)]:
            runs.append(asdict(outcome) | {"optimum_hit_rate": best.hit_rate})
    if plot is not None:
        from kvtier_daemon.sim.plot import draw

        lines = {
            name: [
                (count, outcomes[number].hit_rate)
                for count, outcomes in sorted(
                    zip(counts, found, strict=True), key=lambda pair: pair[0]
                )
            ]
            for number, name in enumerate(asked)
        }
        labels: dict[float, str] = {count: f"{count:,}" for count in counts}
        _save_plot(
            plot,
            draw(f"{requests.path.name}: blocks that hit", "blocks of the tier", lines, labels),
        )
    if json:
        print_json(_trace(requests) | (runs[0] if len(runs) == 1 else {"runs": runs}))
        return
    typer.echo(
        f"{len(requests):,} requests, {requests.native.unique:,} blocks of {requests.block_tokens} tokens"
    )
    typer.echo(f"{'blocks':>10}  {'policy':<10}{'hit rate':>9}{'optimum':>9}{'saved':>14}")
    for run in runs:
        typer.echo(
            f"{run['blocks']:>10,}  {run['policy']:<10}{run['hit_rate']:>9.2%}{run['optimum_hit_rate']:>9.2%}"
            f"{run['recompute_s_saved']:>12,.0f} s"
        )


# --- two tiers -------------------------------------------------------------------------------------


def _two_tiers(
    requests: TraceRequests,
    machines: list[Any],
    prices: Prices | None,
    plot: Path | None,
    json: bool,
) -> None:
    from array import array
    from dataclasses import asdict

    from kvtier_daemon.sim.report import cost_with, cost_without, report, without_tiers
    from kvtier_daemon.sim.tiers import Simulation
    from kvtier_kernels import Optimum

    runs = []
    with progress() as bar:
        task = bar.add_task("requests", total=len(requests) * len(machines))
        for machine in machines:
            simulation = Simulation(requests, machine)
            simulation.run(lambda n: bar.advance(task, n))
            run = report(requests, machine, simulation)
            room = max(1, simulation.memory_blocks + simulation.nvme_blocks)
            best = array("I", Optimum(requests.native, room).run(len(requests)))
            hits = sum(
                hit for hit, only_saved in zip(best, requests.saved, strict=True) if not only_saved
            )
            run["optimum"] = {
                "hit_rate": hits / max(1, requests.looked_up_blocks),
                "ttft_ms": without_tiers(requests, machine, best),
            }
            if prices is not None:
                run["cost"] = asdict(cost_with(requests, machine, run, prices))
            runs.append(run)
        none: dict[str, Any] = {"ttft_ms": without_tiers(requests, machines[0])}
        if prices is not None:
            none["cost"] = asdict(cost_without(requests, machines[0], prices))
    recommended = _recommended(runs)
    if plot is not None:
        (_plot_sizes if prices is None else _plot_costs)(requests, runs, plot)
    if json:
        told = _trace(requests) | {"recompute_only": none, "runs": runs}
        print_json(told | {"recommended": recommended})
        return
    _show_sizes(requests, runs, none["ttft_ms"], recommended)
    if prices is not None:
        _show_costs(runs, none["cost"], recommended)


def _recommended(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the cheapest of the tried sizes; without prices, the smallest with almost the best hit rate."""
    best = max(run["hit_rate"] for run in runs)
    enough = [run for run in runs if run["hit_rate"] >= ENOUGH * best]
    first = min(enough, key=lambda run: (run["memory_bytes"], run["nvme_bytes"], -run["hit_rate"]))
    if "cost" in first:
        first = min(runs, key=lambda run: (run["cost"]["per_million"], run["cost"]["bought"]))
    return {name: first[name] for name in ("policy", "memory_bytes", "nvme_bytes", "hit_rate")}


def _is_recommended(run: dict[str, Any], recommended: dict[str, Any]) -> bool:
    return all(run[name] == recommended[name] for name in ("policy", "memory_bytes", "nvme_bytes"))


def _plot_sizes(requests: TraceRequests, runs: list[dict[str, Any]], plot: Path) -> None:
    from kvtier.units import format_bytes
    from kvtier_daemon.sim.plot import draw

    lines: dict[str, list[tuple[float, float]]] = {}
    several = len({run["policy"] for run in runs}) > 1
    for run in sorted(runs, key=lambda run: run["memory_bytes"]):
        name = f"{format_bytes(run['nvme_bytes'])} NVMe" if run["nvme_bytes"] else "no NVMe"
        lines.setdefault(f"{run['policy']}, {name}" if several else name, []).append(
            (max(1, run["memory_bytes"]), run["hit_rate"])
        )
    labels = {max(1, run["memory_bytes"]): format_bytes(run["memory_bytes"]) for run in runs}
    _save_plot(plot, draw(f"{requests.path.name}: blocks that hit", "memory", lines, labels))


def _plot_costs(requests: TraceRequests, runs: list[dict[str, Any]], plot: Path) -> None:
    """Draw the cost of a million tokens over the price to buy, with a line of the sizes that no others
    undercut in both. If all sizes have the same price, draw it over the memory."""
    from kvtier.units import format_bytes
    from kvtier_daemon.sim.plot import draw
    from kvtier_daemon.sim.prices import frontier

    lines: dict[str, list[tuple[float, float]]] = {}
    one_price = len({round(run["cost"]["bought"], 1) for run in runs}) == 1
    if one_price:
        across = f"memory, of {runs[0]['cost']['bought']:,.0f} for memory and NVMe"
        labels = {run["memory_bytes"]: format_bytes(run["memory_bytes"]) for run in runs}
    else:
        across = "price of memory and NVMe"
        labels = {run["cost"]["bought"]: f"{run['cost']['bought']:,.0f}" for run in runs}
    for run in runs:
        size = run["memory_bytes"] if one_price else run["cost"]["bought"]
        lines.setdefault(run["policy"], []).append((size, run["cost"]["per_million"]))
    lines = {name: sorted(line) for name, line in lines.items()}
    if not one_price:
        lines["cheapest"] = frontier(runs)
    title = f"{requests.path.name}: cost of a million prompt tokens"
    _save_plot(plot, draw(title, across, lines, labels, "g"))


def _show_costs(
    runs: list[dict[str, Any]], none: dict[str, float], recommended: dict[str, Any]
) -> None:
    from kvtier.units import format_bytes

    typer.echo("costs of a million prompt tokens:")
    typer.echo(
        f"{'memory':>9}{'NVMe':>10}  {'policy':<9}{'to buy':>11}{'costs':>10}{'of it GPU':>11}"
        f"{'engines':>9}{'disk lasts':>12}"
    )
    typer.echo(
        f"{'none':>9}{'':>10}  {'':<9}{0:>11,.0f}{none['per_million']:>10.4g}"
        f"{none['gpu_per_million']:>11.4g}{none['engines']:>9.1f}"
    )
    for run in runs:
        cost = run["cost"]
        chosen = _is_recommended(run, recommended)
        lasts = f"{cost['disk_years']:.1f} y" if run["nvme_bytes"] else ""
        typer.echo(
            f"{format_bytes(run['memory_bytes']):>9}{format_bytes(run['nvme_bytes']):>10}  {run['policy']:<9}"
            f"{cost['bought']:>11,.0f}{cost['per_million']:>10.4g}{cost['gpu_per_million']:>11.4g}"
            f"{cost['engines']:>9.1f}{lasts:>12}{' <' if chosen else ''}"
        )
    if any(run["nvme_bytes_written_a_day"] is None for run in runs):
        typer.echo(
            "disk lasts: without wear, since the trace is too short to know the bytes written per day"
        )


def _show_sizes(
    requests: TraceRequests,
    runs: list[dict[str, Any]],
    computed: dict[str, float],
    recommended: dict[str, Any],
) -> None:
    from kvtier.units import format_bytes
    from kvtier_daemon.sim.report import LEAST_SPAN_S

    hbm_title = f"{'HBM':>7}" if any(run["hbm_bytes"] for run in runs) else ""
    typer.echo(
        f"{len(requests):,} requests in {requests.span_s:,.0f} s, {requests.native.unique:,} blocks of"
        f" {requests.block_tokens} tokens"
    )
    typer.echo(
        f"{'memory':>9}{'NVMe':>10}  {'policy':<9}{'hits':>7}{hbm_title}{'memory':>8}{'NVMe':>7}"
        f"{'optimum':>9}{'TTFT p50':>10}{'p90':>8}{'p99':>8}{'written/day':>13}"
    )
    typer.echo(
        f"{'none':>9}{'':>10}  {'':<9}{0:>7.1%}{' ' * len(hbm_title)}{'':>24}{_times(computed)}"
    )
    for run in runs:
        by = run["hit_rate_by_tier"]
        own = f"{by.get('hbm', 0):>7.1%}" if hbm_title else ""
        chosen = _is_recommended(run, recommended)
        typer.echo(
            f"{format_bytes(run['memory_bytes']):>9}{format_bytes(run['nvme_bytes']):>10}  {run['policy']:<9}"
            f"{run['hit_rate']:>7.1%}{own}{by['memory']:>8.1%}{by['nvme']:>7.1%}"
            f"{run['optimum']['hit_rate']:>9.1%}"
            f"{_times(run['ttft_ms'])}{_a_day(run):>13}"
            f"{' <' if chosen else ''}"
        )
    reason = f"the smallest of these sizes that reaches {ENOUGH:.0%} of the best hit rate"
    if "cost" in runs[0]:
        reason = "the cheapest of these sizes per prompt token"
    typer.echo(
        f"< {format_bytes(recommended['memory_bytes'])} of memory and"
        f" {format_bytes(recommended['nvme_bytes'])} of NVMe: {reason}"
    )
    if any(run["nvme_bytes_written_a_day"] is None for run in runs):
        typer.echo(
            f"written/day: not shown, since the trace has {requests.span_s:,.0f} s and at least"
            f" {LEAST_SPAN_S:,.0f} s are needed"
        )


def _a_day(run: dict[str, Any]) -> str:
    from kvtier.units import format_bytes

    nbytes = run["nvme_bytes_written_a_day"]
    return "-" if nbytes is None else format_bytes(nbytes)


def _times(ttft_ms: dict[str, float]) -> str:
    return f"{ttft_ms['p50']:>8,.0f}ms{ttft_ms['p90']:>6,.0f}ms{ttft_ms['p99']:>6,.0f}ms"
