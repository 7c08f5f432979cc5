"""The configuration in force: shows it, compares it with its sources, and reloads it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from kvtier.errors import ConfigError
from kvtier_daemon.config import preflight
from kvtier_daemon.config.preflight import MachineFinding
from kvtier_daemon.config.reload import changes, merged
from kvtier_daemon.config.schema import Config, LoadedConfig, settled
from kvtier_daemon.notify import Notifier

log = logging.getLogger(__name__)


class CurrentConfig:
    """`config` is in force. `swap` applies another configuration, which differs only in live values;
    `count_failure` is called for unexpected errors; `key_files` checks the files with keys."""

    def __init__(
        self,
        loaded: LoadedConfig,
        notifier: Notifier,
        swap: Callable[[Config], None],
        count_failure: Callable[[], None],
        key_files: Callable[[Config], list[MachineFinding]] = lambda _: [],
    ) -> None:
        self.config = loaded.config
        self._loaded = loaded
        self._notifier = notifier
        self._swap = swap
        self._count_failure = count_failure
        self._key_files = key_files
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, order: str) -> dict[str, Any]:
        """Return the values in force ("show") or the differences to the sources ("diff"), or apply the live
        changes ("reload"). Raises ConfigError if the sources are invalid."""
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
            return {"changes": [asdict(one) for one in changes(self.config, loaded.config)]}

    async def reload_when(self, asked: asyncio.Event, note: Callable[[str, str], None]) -> None:
        """Reload whenever the event is set; `note` gets the outcome and the keys that have changed."""
        while True:
            await asked.wait()
            asked.clear()
            try:
                found = (await self.answer("reload"))["changes"]
                note("done", ", ".join(one["key"] for one in found if one["live"]))
            except ConfigError:
                note("bad_request", "")  # the reason is in the log
            except Exception:
                note("internal", "")
                log.exception(
                    "internal error while reloading the configuration; the previous one stays "
                    "in force"
                )
                self._count_failure()

    async def _read_again(self) -> LoadedConfig:
        # In a thread, because a file may be on a disk that hangs.
        loaded = await asyncio.to_thread(self._loaded.again)
        if not (finding := preflight.open_files(merged(self.config, loaded.config))).ok:
            raise ConfigError(str(finding))
        return loaded

    async def _reload(self) -> dict[str, Any]:
        """Apply the live changes. Applies nothing if the sources are invalid."""
        self._notifier.reloading()
        try:
            loaded = await self._read_again()
        except Exception as error:
            log.error("reload refused, the previous configuration stays in force: %s", error)
            self._notifier.ready(
                f"reload refused, the previous configuration stays in force: {error}"
            )
            raise
        found = changes(self.config, loaded.config)
        wanted = merged(self.config, loaded.config)
        # In a thread, because of their disks; the swap may end the session.
        files = await asyncio.to_thread(self._key_files, wanted)
        files += await asyncio.to_thread(preflight.audit_file, wanted)
        self.config = wanted
        self._swap(self.config)
        origins = {one.key: loaded.origins[one.key] for one in found if one.live}
        self._loaded = replace(self._loaded, origins={**self._loaded.origins, **origins})
        restart = [one.key for one in found if not one.live]
        for one in found:
            if one.live:
                log.info("reloaded: %s is %s, was %s", one.key, one.files, one.running)
        if restart:
            log.warning("reloaded, except for settings that need a restart: %s", ", ".join(restart))
        elif not origins:
            log.info("reloaded: nothing has changed")
        waits = f"; {', '.join(restart)} need a restart" if restart else ""
        self._notifier.ready(f"reloaded {len(origins)} values{waits}")
        return {
            "changes": [asdict(one) for one in found],
            "files": [{"ok": one.ok, "text": str(one)} for one in files],
        }
