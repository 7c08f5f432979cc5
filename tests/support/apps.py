"""Run a daemon in the process of a test, which can then use its objects."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvtier_daemon.app import App, MakeLowerTier
from kvtier_daemon.claim import claim_socket, release_socket
from kvtier_daemon.config.schema import load
from kvtier_daemon.tiers.cold.lifecycle import ColdLifecycle


def served(
    folder: Path,
    work: Callable[[App], Awaitable[None]],
    more: str = "",
    lower: MakeLowerTier = ColdLifecycle,
    warm: str = "",
) -> None:
    """Run a daemon in this process until `work` has ended; `lower` makes the tier below memory. `warm` are
    lines for that section."""
    (folder / "disk").mkdir()
    file = folder / "kvtier.toml"
    text = f'socket = "{folder}/s"\nstate = "{folder}/state"\n[warm]\nsize = "4MiB"\nkeep_s = 0\n'
    text += warm
    if lower is ColdLifecycle:
        text += f'[cold]\ndirectories = ["{folder}/disk"]\nsize = "64MiB"\nsegment = "1MiB"\n'
    file.write_text(text + more)
    loaded = load(file, environ={})
    config = loaded.config
    listener = claim_socket(config.socket, config.socket_mode, config.socket_group)

    async def run() -> None:
        secrets = {name: bytes(32) for name in config.tenants}
        app = App(loaded, secrets, listener, lower=lower)
        serving = asyncio.create_task(app.serve())
        async with asyncio.timeout(60):
            while app._server is None or app.lower.tier is None:
                if serving.done():
                    await serving  # it has failed
                await asyncio.sleep(0.01)
            tenants = app.tenants.values()
            while not all(one.tier.recovery.is_complete for one in tenants):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await work(app)
            assert not serving.done()
            os.kill(os.getpid(), signal.SIGTERM)
            await serving

    try:
        asyncio.run(run())
    finally:
        faulthandler.cancel_dump_traceback_later()
        release_socket(listener)
