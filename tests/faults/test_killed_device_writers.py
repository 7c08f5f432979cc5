"""A writer whose copies a device makes: its slots are not reused while a queued copy may still run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier_daemon.serving.writers import DEVICE_HOLD_S
from support.daemons import Daemon, running
from support.fake_cuda import FakeCuda
from support.specs import spec_of

# Reserves slots and forks. The child inherits the mappings, and the driver copies there until a file exists.
ENGINE = """
import os, sys, time
from pathlib import Path
import numpy as np
from kvtier import Client
from kvtier_kernels import cuda
from kvtier_kernels.cuda import blocks
from support.fake_cuda import FakeCuda, soon
from support.specs import spec_of

socket, library, go = sys.argv[1:]
spec = spec_of("killed")
client = Client.connect(socket, populate=False, device=True)
space = client.open(spec)
saving = space.reserve(space.keys(list(range(16 * 16))))
saving.__enter__()
if os.fork():
    time.sleep(600)
blocks.compile_kernel = lambda text, architecture: b"host\\0"
fake = FakeCuda(Path(library))
copier = cuda.Copier(fake.driver(), "batch")
pages = fake.device(np.full(16 * spec.block_bytes, 7, np.uint8))
pieces = copier.pieces([pages.ctypes.data], [pages.nbytes], [0], [spec.block_bytes], [spec.block_bytes], 16)
ids, slots = saving.placed(list(range(16)), spec.block_bytes)
copier.pins.of(saving.mappings)
soon(lambda: fake.live()["registered"] == 1)
fake.hold()
lane = copier.lane()
lane.start(pieces, ids, saving.mappings, slots, True, None)
soon(lambda: fake.held == 1)
print(os.getppid(), flush=True)
soon(Path(go).exists)
fake.hold(False)
lane.finish()
print("copied", flush=True)
"""


def test_slots_of_a_killed_engine_are_free_only_when_no_queued_copy_can_run(
    daemon_of: Callable[..., Daemon], fake_cuda: FakeCuda, tmp_path: Path
) -> None:
    """The engine is killed, and a forked child of it keeps the device's channel: the copy runs after the end
    of the process. The simulation checks who gets the slots meanwhile."""
    daemon, go = daemon_of(warm="16MiB"), tmp_path / "go"

    def held(stats: dict[str, Any]) -> int:
        states = stats["tiers"]["warm"]["states"]
        return int(states["writing"] + states["quarantined"])

    with running(ENGINE, daemon.socket, fake_cuda.path, str(go)) as (process, output):
        assert int(output.readline()) == process.pid
        assert held(daemon.stats()) == 16
        killed_at = time.monotonic()
        process.kill()
        go.touch()
        assert output.readline() == "copied\n"
        daemon.wait_for(lambda stats: not held(stats))
        assert time.monotonic() - killed_at >= DEVICE_HOLD_S
    with daemon.connect() as client:
        space = client.open(spec_of("killed"))
        keys = space.keys(list(range(10**7, 10**7 + 16 * 256)))
        assert space.save(keys, bytes(256 * space.block_bytes)).stored == 256
