"""What it costs to look: scrapes, commands and the page at a million blocks, and what clients notice of it.

The baseline of a scrape is a HEAD of a missing page: the same connection, request and answer without
content. The baseline of a ping during a command is a ping during another client's continuous pings: as many
processes need the processors, but the daemon does almost no work for one of them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from prometheus_client.parser import text_string_to_metric_families

import harness
from bench_control import GROUP, MILLION, chain, fill, tiny_spec
from harness import Daemon, Row, at_most, percentile
from kvtier import Client, Space
from kvtier_daemon.cli import listing

COMMAND = [sys.executable, "-m", "kvtier_daemon.cli"]
STARTS = 15  # of a command
WATCHED_BY_S = 10.0
PINGED_S = 3.0
PAUSE_S = 0.001
HTTP = '[http]\nlisten = "127.0.0.1:0"\n'
SCRAPES = 200
WATCHED_S = 6.0
POLL_S = 2.0  # the page's
IDLE_S = 10.0


def get(port: int, path: str, method: str = "GET") -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path)
    body = connection.getresponse().read()
    connection.close()
    return body


def timed(ask: Callable[[], object], times: int) -> list[float]:
    took = []
    for _ in range(times):
        started = time.perf_counter()
        ask()
        took.append((time.perf_counter() - started) * 1e3)
    return took


def processor_s(daemon: Daemon) -> float:
    """What the daemon has taken so far."""
    fields = Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def valid(port: int, blocks: int) -> None:
    families = {
        one.name: one for one in text_string_to_metric_families(get(port, "/metrics").decode())
    }
    warm = [s.value for s in families["kvtier_tier_blocks"].samples if s.labels["tier"] == "warm"]
    assert warm == [blocks], warm
    looked = sum(s.value for s in families["kvtier_lookup_tokens"].samples)
    assert looked == sum(
        s.value for name in ("hit", "miss") for s in families[f"kvtier_{name}_tokens"].samples
    )


def looking(folder: Path) -> list[Row]:
    """Scrapes of a daemon with a million blocks, and its clients meanwhile."""
    rows = []
    count = MILLION // GROUP * GROUP
    with Daemon(folder, "4GiB", HTTP) as daemon:
        daemon.wait_for_arena()
        client = Client.connect(daemon.socket, populate=False)
        space = client.open(tiny_spec())
        fill(client, space, count)
        port = int(client.stats()["http"].rpartition(":")[2])
        valid(port, count)
        nothing = timed(lambda: get(port, "/none", "HEAD"), SCRAPES)
        for path in ("/metrics", "/status"):
            before = processor_s(daemon)
            took = timed(lambda path=path: get(port, path), SCRAPES)  # type: ignore[misc]
            rows.append(
                at_most(f"GET {path} of a daemon with 1,000,000 blocks, p99", percentile(took, 0.99), "ms",
                        50, p50=median(took), nothing_p50=median(nothing),
                        nothing_p99=percentile(nothing, 0.99),
                        cpu_ms=(processor_s(daemon) - before) / SCRAPES * 1e3)
            )  # fmt: skip
        keys = space.keys(chain(1, 16))
        assert space.match(keys).ready == 16

        def look() -> list[float]:
            until, took = time.perf_counter() + WATCHED_S, []
            while time.perf_counter() < until:
                took += timed(lambda: space.match(keys), 1)
                time.sleep(0.0005)
            return took

        alone = look()
        over, scrapes = threading.Event(), 0

        def scrape() -> None:
            nonlocal scrapes
            while not over.wait(0.1):
                get(port, "/metrics")
                scrapes += 1

        scraper = threading.Thread(target=scrape)
        scraper.start()
        scraped = look()
        over.set()
        scraper.join()
        assert scrapes > WATCHED_S, "nobody scraped"
        rows.append(
            at_most("a match while metrics are scraped ten times a second: p99 beyond none's",
                    percentile(scraped, 0.99) - percentile(alone, 0.99), "ms", 5, p50=median(scraped),
                    alone_p50=median(alone), alone_p99=percentile(alone, 0.99), longest=max(scraped),
                    alone_longest=max(alone), scrapes=scrapes)
        )  # fmt: skip
        rows += commands(daemon, client, space)
        client.close()
    return rows


# --- commands ------------------------------------------------------------------------------------


def commands(daemon: Daemon, client: Client, space: Space) -> list[Row]:
    """Measure the requests themselves, then a ping while the daemon answers them. Holds nothing
    afterwards."""
    rows = []
    python = taken(["-c", ""])
    for words, bar in ((["--help"], 150.0), (["status"], 100.0), (["status", "--json"], 100.0)):
        place = [] if words == ["--help"] else ["--socket", daemon.socket]
        wall, cpu = taken(["-m", "kvtier_daemon.cli", *words, *place])
        rows.append(
            at_most(f"kvtier {' '.join(words)}: processor time beyond python's start", cpu - python[1], "ms",
                    bar, wall=wall, python_wall=python[0])
        )  # fmt: skip
    took = timed(client.stats, 50)
    rows.append(
        Row("status: answered by the daemon in", median(took), "ms", more={"longest": max(took)})
    )
    for name, words in (("monitor", ["monitor"]), ("top", ["top", "--json"])):
        before = processor_s(daemon)
        watching = subprocess.Popen(
            [*COMMAND, *words, "--socket", daemon.socket], stdout=subprocess.DEVNULL
        )
        time.sleep(WATCHED_BY_S)
        watching.terminate()
        watching.wait()
        share = (processor_s(daemon) - before) / WATCHED_BY_S * 100
        rows.append(at_most(f"kvtier {name}: of a core of the daemon's", share, "%", 1))
    with pings(daemon) as alone:
        time.sleep(PINGED_S)
    with pings(daemon) as busy:
        timed_for(client.ping, PINGED_S)
    with pings(daemon) as listed:
        for _ in range(3):
            assert (
                sum(1 for _ in listing.blocks(client, "", space.index)) == MILLION // GROUP * GROUP
            )
    with pings(daemon) as purged:
        purge = [*COMMAND, "purge", "--all", "--yes", "--socket", daemon.socket]
        subprocess.run(purge, check=True, stdout=subprocess.DEVNULL)
    assert client.stats()["tiers"]["warm"]["blocks"] == 0, "the purge left something"
    floor = percentile(busy, 0.99)
    for name, took in (
        ("keys of 1,000,000 blocks are listed", listed),
        ("they are purged", purged),
    ):
        rows.append(
            at_most(f"a ping while {name}: p99 beyond that relative to a client that pings",
                    percentile(took, 0.99) - floor, "ms", 2, p50=median(took), p99=percentile(took, 0.99),
                    longest=max(took), floor_p50=median(busy), floor_p99=floor, floor_longest=max(busy),
                    alone_p99=percentile(alone, 0.99), pings=len(took))
        )  # fmt: skip
    return rows


def taken(words: list[str]) -> tuple[float, float]:
    """The least milliseconds that such a process took, by the clock and of the processors."""
    walls, cpus = [], []
    for _ in range(STARTS):
        started = time.perf_counter()
        process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        walls.append((time.perf_counter() - started) * 1e3)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, words
        cpus.append((used.ru_utime + used.ru_stime) * 1e3)
    return min(walls), min(cpus)


def timed_for(ask: Callable[[], object], seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        ask()


@contextmanager
def pings(daemon: Daemon) -> Iterator[list[float]]:
    """Return the milliseconds of pings meanwhile, by a separate process, which waits for no lock of this
    one."""
    took: list[float] = []
    process = subprocess.Popen(
        [sys.executable, __file__, "--pings", daemon.socket],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    yield took
    process.stdin.close()
    took += json.loads(process.stdout.read())
    process.wait()
    assert len(took) > 100, "hardly a ping"


def ping(path: str) -> int:
    """What `pings` runs: until its input ends."""
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    took: list[float] = []
    with Client.connect(path, populate=False) as client:
        print(flush=True)
        while not over.is_set():
            took += timed(client.ping, 1)
            time.sleep(PAUSE_S)
    print(json.dumps(took))
    return 0


def polling(folder: Path) -> list[Row]:
    """What an idle daemon takes of a core: silent, listening, and with the page open."""
    taken = {}
    for name, more in (("silent", ""), ("listening", HTTP)):
        place = folder / name
        place.mkdir()
        with Daemon(place, "64MiB", more) as daemon:
            daemon.wait_for_arena()
            time.sleep(1)
            before = processor_s(daemon)
            time.sleep(IDLE_S)
            taken[name] = (processor_s(daemon) - before) / IDLE_S * 100
            if not more:
                continue
            with Client.connect(daemon.socket, populate=False) as client:
                port = int(client.stats()["http"].rpartition(":")[2])
            before = processor_s(daemon)
            for _ in range(int(IDLE_S / POLL_S)):
                get(port, "/status")
                get(port, "/history?after=0")
                time.sleep(POLL_S)
            taken["page"] = (processor_s(daemon) - before) / IDLE_S * 100
    return [
        at_most("an idle daemon with the page open: of a core", taken["page"], "%", 1, silent=taken["silent"],
                listening=taken["listening"])
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--pings", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.pings:
        return ping(arguments.pings)
    rows: list[Row] = []
    probes = [harness.noise()]
    with tempfile.TemporaryDirectory() as name:
        for part in (looking, polling):
            place = Path(name) / part.__name__
            place.mkdir()
            rows += part(place)
    probes.append(harness.noise())
    return harness.report("operator", rows, probes, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
