"""What it costs to look: scrapes, status and the page at a million blocks, and what clients notice of it.

The floor is a HEAD of a page that is not there: the same connection, request and answer with nothing in it.
"""

from __future__ import annotations

import argparse
import http.client
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from prometheus_client.parser import text_string_to_metric_families

import harness
from bench_control import GROUP, MILLION, chain, fill, tiny_spec
from harness import Daemon, Row, at_most, percentile
from kvtier import Client

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
        client.close()
    return rows


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
    arguments = parser.parse_args()
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
