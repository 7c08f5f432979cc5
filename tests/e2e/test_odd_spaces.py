"""Memory that unusual spaces of a tenant leave in the daemon."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from kvtier.layout import Group, KvSpec
from support.daemons import start_daemon
from support.effort import effort

SPACES = effort(100, 200, 200)


def test_headers_of_removed_spaces_use_no_memory(tmp_path: Path) -> None:
    cold = tmp_path / "cold"
    cold.mkdir()
    config = (
        f'[cold]\ndirectories = ["{cold}"]\nsize = "256MiB"\nsegment = "4MiB"\nwrite = "through"\n'
    )
    daemon = start_daemon(tmp_path, config=config)
    try:
        before = daemon.process_bytes()
        group = Group(kind="state", layers=16384, state_bytes=1)
        for number in range(SPACES):
            spec = KvSpec(
                model=f"m{number}",
                weights="rev:1",
                dtype="bfloat16",
                block_tokens=16,
                cache_groups=(group,),
            )
            with daemon.connect() as client:
                space = client.open(spec)
                keys = space.keys(list(range(16)))
                space.save(keys, [np.full(16384, number % 251, np.uint8)])
                while client.stats()["tiers"]["cold"]["states"]["written"] <= number:
                    time.sleep(0.002)
                space.forget(keys)
        assert daemon.process_bytes() - before < SPACES * 200_000
    finally:
        daemon.stop()
