"""A real daemon over HTTP: metrics that parse and add up, and a dashboard and alerts that use only
these metrics."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kvtier import Space
from kvtier_daemon.observing import metrics
from kvtier_daemon.observing.metrics import OTHER, SERIES, Metric, Split
from support.daemons import SERVE, Daemon, start_daemon
from support.specs import spec_of

FOLDER = Path(metrics.__file__).parent
PATIENCE_MS = 600_000
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
HTTP = '[http]\nlisten = "127.0.0.1:0"\n'
TENANTS = f"""[tenants.own]
uids = [{os.getuid()}]
quota = "75%"
[tenants.others]
uids = ["*"]
quota = "25%"
"""
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def get(daemon: Daemon, path: str, **headers: str) -> tuple[int, str, str]:
    """Status, content type and text."""
    host, _, port = daemon.stats()["http"].rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


def scraped(daemon: Daemon) -> Samples:
    status, _, text = get(daemon, "/metrics")
    assert status == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(samples: Samples, name: str, **labels: str) -> float:
    """The sum of the series with these labels."""
    wanted = set(labels.items())
    found = [n for (called, has), n in samples.items() if called == name and wanted <= set(has)]
    assert found, name
    return sum(found)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("shown")
    (folder / "cold").mkdir()
    cold = f'[cold]\ndirectories = ["{folder / "cold"}"]\nsize = "256MiB"\nwrite = "through"\n'
    daemon = start_daemon(folder, config=HTTP + cold + TENANTS, warm="16MiB")
    yield daemon
    daemon.stop()
    assert "Traceback" not in daemon.log.read_text()


def test_every_series_exists_from_the_start(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(config=HTTP, warm="16MiB")
    first = scraped(daemon)
    names = {name for name, _ in first}
    assert names == {name for one in SERIES for name in sample_names(one)}
    for one in SERIES:
        for value in one.values:
            assert any(dict(labels).get(one.label) == value for _, labels in first), (
                one.name,
                value,
            )
    spec = spec_of()
    with daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys(list(range(spec.block_tokens * 4)))
        space.match(keys)
        space.save(keys, bytearray(4 * spec.block_bytes))
        with space.load(keys):
            pass
        assert {key for key, _ in scraped(daemon).items()} == set(first), "a series came, or went"


def test_an_unknown_reason_is_counted_under_other(shown: Daemon) -> None:
    """An unknown reason used to be a server error, and no metric was shown."""
    figures = json.loads(get(shown, "/status")[2])
    before = {family.name: family for family in metrics.families(figures)}
    figures["miss_tokens"] |= {"whim": 3, "mood": 4}
    after = {family.name: family for family in metrics.families(figures)}
    name = "kvtier_miss_tokens"
    added = set(after[name].samples) - set(before[name].samples)
    assert {(sample.labels, sample.value) for sample in added} == {((("reason", OTHER),), 7)}
    assert after == before | {name: after[name]}


def test_both_formats_have_the_same_values(shown: Daemon) -> None:
    kinds = {}
    for accept, parse in (
        ("text/plain", text_string_to_metric_families),
        ("application/openmetrics-text; version=1.0.0", openmetrics.text_string_to_metric_families),
    ):
        status, kind, text = get(shown, "/metrics", Accept=accept)
        assert status == 200 and kind.startswith(accept)
        found = {family.name.removesuffix("_info"): family for family in parse(text)}
        kinds[accept] = {
            name: {(s.name, tuple(sorted(s.labels.items()))) for s in family.samples}
            for name, family in found.items()
        }
        assert set(found) == {one.name for one in SERIES}
        assert found["kvtier_build"].type == ("gauge" if accept == "text/plain" else "info")
    one, other = kinds.values()
    assert one == other


def traffic(daemon: Daemon) -> None:
    """Save more than the memory holds, then look up all of it: hits in memory, on disk, and misses."""
    spec = spec_of("traffic")
    with daemon.connect() as client:
        space = client.open(spec)
        space.prefill(1.0, 0.0)  # a second per token: the disk is faster
        blocks = 64
        chains = [
            space.keys([n] * spec.block_tokens * blocks)
            for n in range((48 << 20) // spec.block_bytes // blocks)
        ]
        for keys in chains:
            space.save(keys, bytearray(blocks * spec.block_bytes))
            daemon.wait_for(lambda stats: not stats["tiers"]["cold"]["dirty"])
        for keys in (*chains, chains[-1]):
            ask(space, keys)
        ask(space, space.keys([10**6] * spec.block_tokens))


def ask(space: Space, keys: Any) -> None:
    until = time.monotonic() + 60
    # A busy machine may take a read for one of a busy disk.
    found = space.match(keys, within_ms=PATIENCE_MS)
    while (found.coming or found.why in ("crowded", "late")) and time.monotonic() < until:
        time.sleep(0.005)
        found = space.match(keys, within_ms=PATIENCE_MS)
    if found.ready:
        with space.load(keys):
            pass


def test_lookups_are_hits_and_misses_and_agree_with_status(shown: Daemon) -> None:
    before = scraped(shown)
    traffic(shown)
    now, stats = scraped(shown), shown.stats()
    fallen = [
        key for key in now if re.search("_(total|count|bucket)$", key[0]) and now[key] < before[key]
    ]
    assert not fallen
    looked = of(now, "kvtier_lookup_tokens_total")
    assert looked > 0
    assert looked == of(now, "kvtier_hit_tokens_total") + of(now, "kvtier_miss_tokens_total")
    assert looked + of(now, "kvtier_coming_tokens") == stats["lookup_tokens"]
    assert (
        of(now, "kvtier_hit_tokens_total", tier="cold")
        > 0
        < of(now, "kvtier_hit_tokens_total", tier="warm")
    )
    for reason, tokens in stats["miss_tokens"].items():
        assert of(now, "kvtier_miss_tokens_total", reason=reason) == tokens
    own, all_ = "kvtier_tenant_lookup_tokens_total", "kvtier_tenant_hit_tokens_total"
    assert of(now, own, tenant="own") == looked and of(now, own, tenant="others") == 0
    assert of(now, all_, tenant="own") == of(now, "kvtier_hit_tokens_total")
    assert of(now, "kvtier_recompute_seconds_avoided_total") > 0
    # The bytes of all states of the warm tier add up to its capacity.
    assert (
        of(now, "kvtier_tier_bytes", tier="warm")
        == 16 << 20
        == of(now, "kvtier_tier_capacity_bytes", tier="warm")
    )
    assert of(now, "kvtier_tier_bytes", tier="cold") == of(
        now, "kvtier_tier_capacity_bytes", tier="cold"
    )
    for route in ("save", "load", "cold_write", "cold_read"):
        assert of(now, "kvtier_transfer_bytes_total", route=route) > 0, route
    assert of(now, "kvtier_evicted_blocks_total", reason="demoted") > 0
    for name in ("load", "save", "wait"):
        assert of(now, f"kvtier_{name}_seconds_count") > of(
            before, f"kvtier_{name}_seconds_count"
        ), name
        assert of(now, f"kvtier_{name}_seconds_bucket", le="+Inf") == of(
            now, f"kvtier_{name}_seconds_count"
        )


def test_coming_blocks_are_counted_when_their_read_ends(shown: Daemon) -> None:
    spec = spec_of("waited")
    with shown.connect() as client:
        space = client.open(spec)
        space.prefill(1.0, 0.0)  # a second per token: the disk is faster, also on a busy machine
        first, *others = (space.keys([n] * spec.block_tokens * 64) for n in range(24))
        for keys in (first, *others):
            space.save(keys, bytearray(64 * spec.block_bytes))
            shown.wait_for(lambda stats: not stats["tiers"]["cold"]["dirty"])
        before = scraped(shown)
        # More than once: a busy machine may take a read for one of a busy disk.
        asked = islice(cycle((first, *others)), 1000)
        found = next(found for keys in asked if (found := space.match(keys)).coming)
        now, stats = scraped(shown), shown.stats()
        coming = found.coming * spec.block_tokens
        assert of(now, "kvtier_coming_tokens") == coming == stats["coming_tokens"]
        assert of(now, "kvtier_waiting_lookups") == 1
        assert stats["lookup_tokens"] - of(now, "kvtier_lookup_tokens_total") == coming
        cold = of(now, "kvtier_hit_tokens_total", tier="cold")
        assert cold == of(before, "kvtier_hit_tokens_total", tier="cold")
        assert of(now, "kvtier_tenant_lookup_tokens_total") == of(now, "kvtier_lookup_tokens_total")
    shown.wait_for(lambda stats: stats["coming_tokens"] == 0)
    last = scraped(shown)
    assert of(last, "kvtier_hit_tokens_total", tier="cold") == cold + coming
    assert of(last, "kvtier_lookup_tokens_total") == shown.stats()["lookup_tokens"]


def test_the_status_page_equals_the_output_of_the_command(shown: Daemon) -> None:
    status, kind, text = get(shown, "/status")
    body, stats = json.loads(text), shown.stats()
    assert status == 200 and kind == "application/json"
    assert body.pop("health") == "ok"
    assert body.keys() == stats.keys()
    for name in ("version", "pid", "lookup_tokens", "hit_tokens", "miss_tokens", "saved_tokens"):
        assert body[name] == stats[name]


def test_the_page_shows_current_and_past_values(shown: Daemon) -> None:
    assert "<title>kvtier</title>" in get(shown, "/")[2]
    until = time.monotonic() + 60
    while len(points := json.loads(get(shown, "/history")[2])["points"]) < 2:
        assert time.monotonic() < until
        time.sleep(0.2)
    later = json.loads(get(shown, f"/history?after={points[-2][0]}")[2])["points"]
    assert later[0] == points[-1]


def test_without_a_configured_address_no_port_is_open(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(warm="16MiB")
    assert daemon.stats()["http"] == ""
    with open(f"/proc/{daemon.process.pid}/net/tcp") as table:
        listening = {line.split()[9] for line in table if line.split()[3] == "0A"}
    own = {os.readlink(link) for link in Path(f"/proc/{daemon.process.pid}/fd").iterdir()}
    assert not {f"socket:[{inode}]" for inode in listening} & own


def test_a_stalled_daemon_reports_the_stall(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(config=HTTP, warm="16MiB")
    assert get(daemon, "/healthz")[::2] == (200, "ok\n")
    daemon.process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    daemon.process.send_signal(signal.SIGCONT)
    status, _, text = get(daemon, "/healthz")
    assert status == 503 and text.startswith("failed: its event loop stalled for ")
    assert of(scraped(daemon), "kvtier_loop_lag_max_seconds") >= 2


def test_a_port_in_use_is_an_error_in_one_line(shown: Daemon, tmp_path: Path) -> None:
    environment = dict(
        os.environ, KVTIER_STATE=str(tmp_path), KVTIER_SOCKET=str(tmp_path / "s"), KVTIER_WARM__SIZE="16MiB",
        KVTIER_HTTP__LISTEN=shown.stats()["http"],
    )  # fmt: skip
    done = subprocess.run(
        SERVE, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "Address already in use" in done.stderr and "ss -ltnp" in done.stderr
    assert not (tmp_path / "s").exists()


# --- the dashboard and the alerts ------------------------------------------------------------------


def selectors(node: Any) -> Iterator[Any]:
    """Every selector of a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("lhs", "rhs", "expr", "args", "vector_selector", "param"):
        below = getattr(node, name, None)
        for one in below if isinstance(below, list) else [below]:
            if one is not None:
                yield from selectors(one)


def expressions() -> Iterator[tuple[str, str]]:
    """The position and the text of each expression."""
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")
            yield f"{panel['title']} {target['refId']}", text


@pytest.mark.parametrize(("where", "text"), list(expressions()))
def test_an_expression_uses_only_existing_series(shown: Daemon, where: str, text: str) -> None:
    found = list(selectors(promql_parser.parse(text)))
    assert found, "it asks for nothing"
    samples = scraped(shown)
    for one in found:
        if one.name == "up":  # a metric of Prometheus itself
            continue
        labels = [dict(labels) for name, labels in samples if name == one.name]
        assert labels, f"{one.name} is no series"
        for matcher in one.matchers.matchers:
            if matcher.name in ("instance", "job"):  # labels of Prometheus itself
                continue
            for value in matcher.value.split("|"):
                assert any(each.get(matcher.name) == value for each in labels), (
                    f"{matcher.name}={value}"
                )


ENDS = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}


def sample_names(one: Metric) -> list[str]:
    return [one.name + end for end in ENDS.get(one.kind, ("",))]


def labels_of(one: Metric) -> tuple[str, ...]:
    if isinstance(one, Split):
        return "tier", "state"
    return (one.label,) if one.label else ()


def test_labels_that_expressions_group_by_exist() -> None:
    known = {"instance", "job", "le", *(label for one in SERIES for label in labels_of(one))}
    for where, text in expressions():
        for listed in re.findall(r"(?:by|without|on|ignoring) \(([^)]*)\)", text):
            assert {label.strip() for label in listed.split(",")} <= known, where


@pytest.fixture
def promtool() -> Callable[..., str]:
    """Prometheus' own tool. It prints problems, and nothing for valid input."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("NOT TESTED: promtool is not here; Debian's package `prometheus` has it")

    def run(*words: str, given: str = "") -> str:
        done = subprocess.run(
            [found, *words], input=given, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_alerts_fire_when_they_should_and_not_before(promtool: Callable[..., str]) -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(FOLDER / "alerts.yml"))
    promtool("test", "rules", str(Path(__file__).parent.parent / "alerts.yml"))


def test_prometheus_finds_nothing_wrong_with_a_scrape(
    shown: Daemon, promtool: Callable[..., str]
) -> None:
    _, _, text = get(shown, "/metrics")
    assert promtool("check", "metrics", given=text) == ""


def test_the_dashboard_is_valid() -> None:
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells


# --- the documents
# -----------------------------------------------------------------------------------


def test_the_documents_list_every_metric_and_every_alert() -> None:
    rows = re.findall(
        r"^\| `(kvtier_\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE
    )
    listed = {name: (kind, labels, text) for name, kind, labels, text in rows}
    for one in SERIES:
        name = one.name if one.kind == "histogram" else sample_names(one)[0]
        labels = ", ".join(f"`{label}`" for label in labels_of(one))
        assert listed.pop(name, None) == (one.kind, labels, one.help), name
    assert not listed, "no such metrics"
    alerts = [where for where, _ in expressions() if where.startswith("Kvtier")]
    told = re.findall(r"^\| `(Kvtier\w+)` \| .+ \| .+ \|$", PAGE.read_text(), re.MULTILINE)
    assert told == alerts
