"""The configuration in force: shown, compared with its sources, and put into force again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvtier.errors import ConfigError
from kvtier_daemon import preflight
from kvtier_daemon.config import Config, Loaded, settled
from kvtier_daemon.notify import Notifier
from kvtier_daemon.reloading import changes, merged

log = logging.getLogger(__name__)


class Settings:
    """`config` is in force. `swap` has the daemon go on with another one, which differs from it in what can
    be swapped alone; `count_failure` is called for what should not have failed."""

    def __init__(
        self,
        loaded: Loaded,
        notifier: Notifier,
        swap: Callable[[Config], None],
        count_failure: Callable[[], None],
    ) -> None:
        self.config = loaded.config
        self._loaded = loaded
        self._notifier = notifier
        self._swap = swap
        self._count_failure = count_failure
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, order: str) -> dict[str, Any]:
        """The settled configuration ("show"), what its sources say otherwise now ("diff"), or that put into
        force as far as it can be without a restart ("reload"). ConfigError where they say what can't be."""
        async with self._one_at_a_time:
            if order == "show":
                file = self._loaded.file
                values = settled(self.config)
                origins = self._loaded.origins
                keys = {key: [value, origins.get(key, "default")] for key, value in values.items()}
                return {"file": str(file) if file else "", "keys": keys}
            if order == "reload":
                return await self._reload()
            loaded = await self._read_again()
            return {"changes": [one.as_dict() for one in changes(self.config, loaded.config)]}

    async def reload_when(self, asked: asyncio.Event) -> None:
        """Reload each time that it is asked for."""
        while True:
            await asked.wait()
            asked.clear()
            try:
                await self.answer("reload")
            except ConfigError:
                pass  # it is in the log
            except Exception:
                log.exception(
                    "the configuration could not be read again; the daemon goes on as before"
                )
                self._count_failure()

    async def _read_again(self) -> Loaded:
        # A file may lie on a disk that hangs.
        loaded = await asyncio.to_thread(self._loaded.again)
        if not (finding := preflight.open_files(merged(self.config, loaded.config))).ok:
            raise ConfigError(str(finding))
        return loaded

    async def _reload(self) -> dict[str, Any]:
        """Swap what can be swapped; where what the sources say is wrong, nothing."""
        self._notifier.reloading()
        try:
            loaded = await self._read_again()
        except Exception as error:
            log.error("nothing was reloaded: %s", error)
            self._notifier.ready(f"not reloaded, and serving as before: {error}")
            raise
        found = changes(self.config, loaded.config)
        self.config = merged(self.config, loaded.config)
        self._swap(self.config)
        origins = {one.key: loaded.origins[one.key] for one in found if one.live}
        self._loaded = replace(self._loaded, origins={**self._loaded.origins, **origins})
        restart = [one.key for one in found if not one.live]
        for one in found:
            if one.live:
                log.info("reloaded: %s is %s, was %s", one.key, one.files, one.running)
        if restart:
            log.warning("reloaded, but for what needs a restart: %s", ", ".join(restart))
        elif not origins:
            log.info("reloaded: nothing has changed")
        waits = f", and {', '.join(restart)} wait for a restart" if restart else ""
        self._notifier.ready(f"reloaded {len(origins)} values{waits}")
        return {"changes": [one.as_dict() for one in found]}
