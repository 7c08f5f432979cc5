"""The demo of the remote tier: two hosts on this machine share blocks through a real store.

A saves prompts, B loads them, A is killed, B loads the others. Each host is a daemon with its own socket,
state and memory; they have the secret of the fleet in common.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from kvtier import Client, ConfigError, KvtierError, Space
from kvtier.key import Keys
from kvtier.units import MIB
from kvtier_daemon.config.preflight import missing_library
from kvtier_daemon.tools.temporary_daemon import temporary_daemon, temporary_folder
from kvtier_daemon.tools.workload import SPEC

PROMPTS: Final = 6
BLOCKS: Final = 8  # of a prompt; a block has 2 MiB
START_S: Final = 20.0
SHARE_S: Final = 60.0  # the daemon retries a write that failed after 15 s
LEFT_S: Final = 10.0  # for a load
LOOK_S: Final = 0.005
LENT_BYTES: Final = 256 * MIB
BUCKET: Final = "blocks"
STORES: Final = {"mooncake": "mooncake-transfer-engine-non-cuda", "s3": "nanio"}
LEND: Final = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 20, "tcp", "", sys.argv[1])
print(code, flush=True)
sys.stdin.read()
"""


@dataclass(slots=True)
class FleetStep:
    """What a host did, and what came of it."""

    host: str
    what: str
    prompts: int
    hit_tokens: int = 0
    of_tokens: int = 0
    ms_per_prompt: float = 0.0
    wrong_blocks: int = 0


def run(store: str, as_json: bool) -> bool:
    """Run the demo, and print the results. Returns False if anything was wrong."""
    if store not in STORES:
        raise ConfigError(f"--fleet: expected one of {', '.join(STORES)}, got {store!r}")
    module = "mooncake" if store == "mooncake" else "nanio"
    if find_spec(module) is None:
        raise ConfigError(f"--fleet {store}: the package {STORES[store]} is not installed")
    if store == "mooncake" and (missing := missing_library()):
        raise ConfigError(f"--fleet {store}: {missing}; install it (Debian: libibverbs1)")
    with temporary_folder("kvtier-fleet-") as folder, contextlib.ExitStack() as undo:
        section = _start_store(store, folder, undo)
        steps = _two_hosts(folder, section, undo)
    if as_json:
        print(json.dumps({"store": store, "steps": [asdict(one) for one in steps]}, indent=2))
    else:
        _print_table(store, steps)
    hits = [one for one in steps if one.of_tokens]
    return all(one.hit_tokens == one.of_tokens and not one.wrong_blocks for one in hits)


# --- the store ---------------------------------------------------------------------------------------


def _start_store(store: str, folder: Path, undo: contextlib.ExitStack) -> str:
    """Start a store that ends with `undo`; return the section of the hosts' configuration."""
    port = _free_port()
    log = undo.enter_context((folder / "store.log").open("ab"))
    if store == "s3":
        data, key, secret = folder / "data", "kvtier", secrets.token_hex(16)
        (data / BUCKET).mkdir(parents=True)
        command = [sys.executable, "-P", "-m", "nanio", "serve", "--data-dir", str(data)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--no-access-log"]
        environment = {**os.environ, "NANIO_ACCESS_KEY": key, "NANIO_SECRET_KEY": secret}
        server = _start(command, log.fileno(), undo, environment)
        _wait_for_port(port, server)
        file = folder / "credentials"
        file.touch(0o600)
        file.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key={secret}\n")
        return (
            f'[remote]\nbucket = "{BUCKET}"\nendpoint = "http://127.0.0.1:{port}"\n'
            f'credentials = "{file}"\n'
        )
    package = find_spec("mooncake")
    assert package is not None and package.origin is not None
    address = f"127.0.0.1:{port}"
    command = [str(Path(package.origin).parent / "mooncake_master"), f"--rpc_port={port}"]
    command += ["--rpc_address=127.0.0.1", f"--metrics_port={_free_port()}"]
    master = _start(command, log.fileno(), undo)
    _wait_for_port(port, master)
    # A third host, which lends memory: what A saves must not end with A.
    lender = subprocess.Popen(
        [sys.executable, "-P", "-c", LEND, address, str(LENT_BYTES)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
    )  # fmt: skip
    undo.callback(_end, lender)
    assert lender.stdout is not None
    if lender.stdout.readline() != b"0\n":
        raise KvtierError("the process that lends memory cannot join the pool")
    return f'[remote]\nurl = "mooncake://{address}"\n'


def _start(
    command: list[str], log: int, undo: contextlib.ExitStack, environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:  # fmt: skip
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment
    )
    undo.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            if process.poll() is not None or time.monotonic() > until:
                raise KvtierError("the store does not start") from None
            time.sleep(LOOK_S)


# --- the hosts ---------------------------------------------------------------------------------------


def _two_hosts(folder: Path, section: str, undo: contextlib.ExitStack) -> list[FleetStep]:
    secret = secrets.token_bytes(32)
    (a, daemon), (b, _) = (
        _start_host(folder / name, name, section, secret, undo) for name in ("a", "b")
    )
    first, second = a.open(SPEC), b.open(SPEC)
    tokens = [array("I", [number] * BLOCKS * SPEC.block_tokens) for number in range(PROMPTS)]
    keys = [first.keys(one) for one in tokens]
    half = PROMPTS // 2
    steps = [_saved(first, keys)]
    began = time.monotonic()
    _wait(lambda: _remote(a)["states"]["written"] >= PROMPTS * BLOCKS, SHARE_S)
    shared_ms = (time.monotonic() - began) * 1e3 / PROMPTS
    steps.append(FleetStep("A", "writes them to the store", PROMPTS, ms_per_prompt=shared_ms))
    steps.append(_loaded("B", "loads half from the store", second, keys[:half]))
    daemon.send_signal(signal.SIGKILL)
    daemon.wait()
    steps.append(FleetStep("A", "is killed", 0))
    steps.append(_loaded("B", "loads the rest from there", second, keys[half:]))
    steps.append(_loaded("B", "loads all from its memory", second, keys))
    return steps


def _start_host(
    folder: Path, name: str, section: str, secret: bytes, undo: contextlib.ExitStack
) -> tuple[Client, subprocess.Popen[bytes]]:  # fmt: skip
    state = folder / "state"
    (state / "secrets").mkdir(mode=0o700, parents=True)
    state.chmod(0o700)
    file = state / "secrets" / "default"
    file.touch(0o600)
    file.write_bytes(secret)
    settings = f'{section}write = "all"\nprefix = "demo"\n'
    client, daemon = undo.enter_context(
        temporary_daemon(folder, 256 * MIB, f"host {name}", settings)
    )
    _wait(lambda: bool(_remote(client)["on"]), START_S)
    return client, daemon


def _remote(client: Client) -> dict[str, Any]:
    remote: dict[str, Any] = client.stats()["tiers"]["remote"]
    return remote


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise KvtierError(f"the store did not do what was asked within {seconds:.0f} s")
        time.sleep(LOOK_S)


def _contents(keys: Keys) -> Iterator[bytes]:
    """The content of a block is its key, repeated."""
    return (bytes(key) * (SPEC.block_bytes // len(key)) for key in keys)


def _saved(space: Space, prompts: list[Keys]) -> FleetStep:
    began = time.monotonic()
    for keys in prompts:
        space.save(keys, list(_contents(keys)))
    took_s = time.monotonic() - began
    return FleetStep(
        "A", "saves the prompts", len(prompts), ms_per_prompt=took_s * 1e3 / len(prompts)
    )


def _loaded(host: str, what: str, space: Space, prompts: list[Keys]) -> FleetStep:
    """Load each prompt as an engine does, and compare every byte. The time is from the first request, which
    finds out that the store has it, until its blocks can be read."""
    step = FleetStep(host, what, len(prompts))
    took_s = 0.0
    for keys in prompts:
        began = time.monotonic()
        until = began + LEFT_S
        while (found := space.match(keys)).ready < len(keys) and time.monotonic() < until:
            time.sleep(LOOK_S)
        with space.load(keys[: found.ready]) as blocks:
            took_s += time.monotonic() - began
            for block, content in zip(blocks, _contents(keys), strict=False):
                assert block is not None
                step.wrong_blocks += bytes(block) != content
            step.hit_tokens += len(blocks) * SPEC.block_tokens
        step.of_tokens += len(keys) * SPEC.block_tokens
    step.ms_per_prompt = took_s * 1e3 / len(prompts)
    return step


# --- the results -------------------------------------------------------------------------------------


def _print_table(store: str, steps: list[FleetStep]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    name = "a Mooncake Store" if store == "mooncake" else "an S3 server"
    table = Table(title=f"kvtier demo: two hosts and {name}", box=box.ROUNDED)
    for column in ("host", "step"):
        table.add_column(column, no_wrap=True)
    for column in ("prompts", "hit tokens", "ms each", "wrong"):
        table.add_column(column, justify="right")
    for one in steps:
        loads = bool(one.of_tokens)
        table.add_row(
            one.host, one.what, str(one.prompts) if one.prompts else "",
            f"{one.hit_tokens:,} of {one.of_tokens:,}" if loads else "",
            f"{one.ms_per_prompt:,.1f}" if one.prompts else "",
            str(one.wrong_blocks) if loads else "",
        )  # fmt: skip
    console = Console(highlight=False)
    console.print(table)
    tokens, size = BLOCKS * SPEC.block_tokens, BLOCKS * SPEC.block_bytes // MIB
    console.print(f"A prompt has {tokens} tokens, {size} MiB of KV cache.")
    console.print("Every byte that B loaded was compared.")
