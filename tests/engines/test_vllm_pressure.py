"""A cache that is too small: requests are preempted, and pages change hands while they are saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from daemons import Daemon
from prompts import check_same, prompt

PAGES = 40  # three requests and a bit
PROMPTS = [prompt(seed, 250 + seed) for seed in range(200, 218)]
TOKENS = 60


def test_pages_that_change_hands_are_never_found_wrong(
    shared_daemon: Daemon, engine_of: Callable[..., Any]
) -> None:
    """The first pass computes and saves, the next ones load; each makes requests wait for pages."""
    engine = engine_of(
        "llama", shared_daemon.socket, num_gpu_blocks_override=PAGES, disable_log_stats=False
    )
    right = engine.generate(PROMPTS, TOKENS)
    loaded = 0
    for _ in range(4):
        again = engine.generate(PROMPTS, TOKENS)
        for one, other in zip(again, right, strict=True):
            check_same(one, other)
        count, wrong = engine.compare()
        assert wrong == []
        loaded = count
    assert loaded > 100
    counts = engine.recorded("held")[-1]["counts"]
    print(counts)
    assert counts["saved"] > 18 * 8
    assert not any(name.startswith("load_failed") for name in counts)
    engine.generate([prompt(300, 40)], 1)
    held = engine.recorded("held")[-1]
    assert (held["prompts"], held["leases"], held["tickets"]) == (0, 0, 0)
    assert not shared_daemon.stats()["tenants"]["default"]["leases"]
