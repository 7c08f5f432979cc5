"""`kvtier size`: the KV cache of a model, and when loading it is faster than computing it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier_daemon.cli.flags import Json, PrefillGrowth, PrefillRate, print_json, value
from kvtier_daemon.cli.tables import count

if TYPE_CHECKING:
    from kvtier_daemon.tools.sizing import Cache

MOST_CHARACTERS = 1 << 24  # of a config: so a file of weights by mistake is not read to its end
LINKS = "3,7,25,50"  # GB/s: NVMe of the third and the fifth generation, PCIe 4 and 5 with 16 lanes


def size(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="A Hugging Face config.json, or its directory.")
    ],
    kv_dtype: Annotated[
        str, value("TYPE", "Type of the cache: auto, fp8, nvfp4 and others.")
    ] = "auto",
    state_dtype: Annotated[
        str, value("TYPE", "Type of recurrent states: auto, float32 and others.")
    ] = "auto",
    tensor_parallel: Annotated[int, value("N", "Number of GPUs of the engine.", min=1)] = 1,
    block_tokens: Annotated[int, value("N", "Tokens per block of the engine.", min=1)] = 16,
    tokens: Annotated[int, value("N", "Tokens of a sequence.", min=1)] = 8192,
    gpu_memory: Annotated[str, value("SIZE", "Memory of each GPU.")] = "80GiB",
    gpu_share: Annotated[
        float, value("SHARE", "Share of the GPU memory for the engine.", min=0.01, max=1.0)
    ] = 0.9,
    weights: Annotated[
        str | None, value("SIZE", "Size of the model; default: the files next to CONFIG.")
    ] = None,
    prefill_rate: PrefillRate = 10_000,
    prefill_growth: PrefillGrowth = 0,
    bandwidth: Annotated[str, value("GB/S,...", "Speeds of links to load over.")] = LINKS,
    latency_ms: Annotated[float, value("MS", "Time before the first byte of a load.", min=0)] = 1.0,
    sequences: Annotated[
        int, value("N", "Sequences at the same time, for which GPUs are counted.", min=0)
    ] = 0,
    gpu_hour: Annotated[float, value("PRICE", "Price of an hour of a GPU.", min=0)] = 0,
    json: Json = False,
) -> None:
    """Show how much KV cache a model needs, and when loads help.

    Prints bytes per token, how many sequences fit into a GPU, and when loading is faster than
    computing.
    """
    from kvtier_daemon.cli.flags import amount, numbers
    from kvtier_daemon.tools.sizing import (
        PrefillCost,
        break_even_bandwidth,
        break_even_tokens,
        read_config,
    )

    path, described = _read(config)
    cache = read_config(
        described,
        str(path),
        kv_format=kv_dtype,
        state_dtype=state_dtype,
        tensor_parallel=tensor_parallel,
    )
    memory = amount("--gpu-memory", gpu_memory)
    weight_bytes = _weights(path.parent) if weights is None else amount("--weights", weights)
    sequence = cache.prefix_bytes(tokens, block_tokens)
    spare = max(0, int(memory * gpu_share) - (weight_bytes or 0) // tensor_parallel)
    token_s = 1 / prefill_rate
    prefill = PrefillCost(token_s, token_s / prefill_growth if prefill_growth else 0.0)
    latency_s = latency_ms / 1000
    links = numbers("--bandwidth", bandwidth)
    report: dict[str, Any] = {
        "model": cache.model,
        "kv_dtype": cache.kv_format,
        "tensor_parallel": tensor_parallel,
        "bytes_per_token": cache.token_bytes,
        "growth_bytes_per_token": cache.full_token_bytes,
        "state_bytes": cache.state_bytes,
        "block_bytes": cache.token_bytes * block_tokens,
        "block_tokens": block_tokens,
        "layers": cache.groups(),
        "sequence": {
            "tokens": tokens,
            "bytes": sequence,
            "stored_bytes": cache.prefix_bytes(tokens, block_tokens, whole=True),
        },
        "gpu": {
            "memory_bytes": memory,
            "weight_bytes": weight_bytes,
            "cache_bytes": spare,
            "sequences": spare // sequence,
        },
        "prefill": {"tokens_s": prefill_rate, "seconds": prefill.seconds(tokens)},
        "break_even": {
            "bandwidth_bytes_s": break_even_bandwidth(cache, prefill, tokens, latency_s),
            "latency_ms": latency_ms,
            "links": [
                {
                    "bandwidth_bytes_s": link * 1e9,
                    "load_s": latency_s + cache.prefix_bytes(tokens, whole=True) / (link * 1e9),
                    "prompt_tokens": break_even_tokens(cache, prefill, link * 1e9, latency_s),
                }
                for link in links
            ],
        },
        "remarks": list(cache.remarks),
    }
    if sequences:
        engines = -(-sequences // fit) if (fit := spare // sequence) else None
        report["sequences"] = {
            "number": sequences,
            "engines": engines,
            "gpus": engines * tensor_parallel if engines else None,
        }
    if gpu_hour:
        report["prices"] = _prices(report, gpu_hour * tensor_parallel / 3600)
    if weight_bytes is None:
        report["remarks"].append(
            f"no weights next to {path.name}: counting sequences as if the GPU held none; give "
            "their size with --weights, such as --weights 16GiB"
        )
    if json:
        print_json(report)
    else:
        _show(report, cache)


def _prices(report: dict[str, Any], second: float) -> dict[str, Any]:
    """What it costs to compute a million tokens, and to load them while the engine waits."""
    millions = report["sequence"]["tokens"] / 1e6
    return {
        "compute_per_million": report["prefill"]["seconds"] * second / millions,
        "load_per_million": {
            f"{link['bandwidth_bytes_s'] / 1e9:g} GB/s": link["load_s"] * second / millions
            for link in report["break_even"]["links"]
        },
    }


def read_cache(config: Path) -> Cache:
    """Return the cache of the model in a config.json, or in the directory that contains it."""
    from kvtier_daemon.tools.sizing import read_config

    path, described = _read(config)
    return read_config(described, str(path))


def _read(config: Path) -> tuple[Path, Any]:
    from json import JSONDecodeError, loads

    from kvtier.errors import ConfigError

    path = config / "config.json" if config.is_dir() else config
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MOST_CHARACTERS)
        if len(text) == MOST_CHARACTERS:
            raise ConfigError(f"{path}: is too long for a config.json; give the model's")
        return path, loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: invalid JSON: {error}") from error


def _weights(directory: Path) -> int | None:
    """Return the bytes of the weights in a directory, or None if it contains no weights."""
    files = list(directory.glob("*.safetensors")) or list(directory.glob("pytorch_model*.bin"))
    return sum(file.stat().st_size for file in files) or None


def _show(report: dict[str, Any], cache: Cache) -> None:
    from kvtier.units import format_bytes

    def line(what: str, text: str) -> None:
        typer.echo(f"  {what:<20}{text}")

    one = "" if cache.tensor_parallel == 1 else f" on each of {cache.tensor_parallel} GPUs"
    typer.echo(f"{report['model']}, cache in {report['kv_dtype']}{one}")
    line("a token", f"{report['bytes_per_token']:,} B")
    for group in report["layers"]:
        typer.echo(f"    {_layer_text(group)}")
    line(f"a block of {report['block_tokens']}", format_bytes(report["block_bytes"]))
    sequence, gpu = report["sequence"], report["gpu"]
    whole = (
        "" if cache.tensor_parallel == 1 else f"; {format_bytes(sequence['stored_bytes'])} to store"
    )
    line(count(sequence["tokens"], "token"), format_bytes(sequence["bytes"]) + whole)
    line(
        "fit in a GPU",
        f"{gpu['sequences']:,} such sequences in the {format_bytes(gpu['cache_bytes'])} of"
        f" {format_bytes(gpu['memory_bytes'])} that are left for them",
    )
    prefill, even = report["prefill"], report["break_even"]
    line(
        "to compute them",
        f"{prefill['seconds']:.3f} s, at {prefill['tokens_s']:,.0f} tokens/s for the first tokens",
    )
    needed = even["bandwidth_bytes_s"]
    line(
        "to load them sooner",
        f"{needed / 1e9:.2f} GB/s"
        if needed
        else f"no link is fast enough with a latency of {even['latency_ms']} ms",
    )
    for link in even["links"]:
        prompt = link["prompt_tokens"]
        wins = "never wins" if prompt is None else f"wins from {prompt:,} tokens on"
        line(f"  {link['bandwidth_bytes_s'] / 1e9:g} GB/s", f"{link['load_s']:.3f} s; {wins}")
    if needed := report.get("sequences"):
        text = "none fits into a GPU"
        if needed["engines"]:
            text = f"{count(needed['gpus'], 'GPU')}, {count(needed['engines'], 'engine')}"
        line(f"{needed['number']:,} at a time", text)
    if prices := report.get("prices"):
        line("price of a million", f"{prices['compute_per_million']:.4g} to compute such tokens")
        for name, price in prices["load_per_million"].items():
            line(f"  {name}", f"{price:.4g} to load them, while the engine waits")
    for remark in report["remarks"]:
        typer.echo(f"  note: {remark}")


def _layer_text(group: dict[str, Any]) -> str:
    count = f"{group['layers']} layer{'' if group['layers'] == 1 else 's'}"
    if group["kind"] == "state":
        return f"{count} with a state: {group['state_bytes']:,} B a sequence"
    text = f"{count} of full attention" if group["kind"] == "full" else (
        f"{count} with a window of {group['window_tokens']:,}"
    )  # fmt: skip
    return f"{text}: {group['bytes_per_token']:,} B"
