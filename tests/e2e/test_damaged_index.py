"""64 bytes of the index are zeroed: the daemon must start."""

from __future__ import annotations

import struct
from pathlib import Path

from kvtier_daemon.tiers.cold.index import Index
from support.daemons import running, start_daemon
from support.effort import effort

LEAF = 2
SAMPLE = effort(8, 100, 100)


def test_a_daemon_starts_with_a_zeroed_leaf_of_the_index(tmp_path: Path) -> None:
    cold = tmp_path / "cold"
    cold.mkdir()
    config = f'[cold]\ndirectories = ["{cold}"]\nsize = "96MiB"\nsegment = "1MiB"\n'
    start_daemon(tmp_path, config=config).stop()
    index = Index(cold / "index", 16 << 20)
    for number in range(6000):
        index.put(b"segments", struct.pack(">QI", number % 8, number), b"")
    index.close()
    data = cold / "index" / "data.mdb"
    text = data.read_bytes()
    leaves = [
        at
        for at in range(2 * 4096, len(text), 4096)
        if struct.unpack_from("<H", text, at + 10)[0] == LEAF
        and text.count(0, at, at + 4096) < 3900
    ]
    read = "import sys, pathlib; from kvtier_daemon.tiers.cold.index import Index; "
    read += "Index(pathlib.Path(sys.argv[1]), 16 << 20).entries(b'segments')"
    # Most are in the current tree, the others are obsolete.
    for at in leaves[:: max(1, len(leaves) // SAMPLE)]:
        data.write_bytes(text[:at] + bytes(64) + text[at + 64 :])
        with running(read, str(index.folder)) as (reader, _):
            if reader.wait(60) < 0:
                break
    daemon = start_daemon(tmp_path, config=config)
    try:
        daemon.wait_for_disks()
        assert daemon.process.poll() is None, daemon.log.read_text()[-400:]
    finally:
        if daemon.process.poll() is None:
            daemon.stop()
