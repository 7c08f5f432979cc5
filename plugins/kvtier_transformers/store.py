"""The blocks of one model in a daemon.

A failure of kvtier is a miss: it is counted by its reason, the first one is logged, and the daemon is not
used for a moment after it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from kvtier import Client, KvSpec
from kvtier.recompute import Recompute
from kvtier.space import Space
from kvtier_transformers.device import TensorCopies, copies_on
from kvtier_transformers.identity import adapters_digest, describe, fingerprint, precision
from kvtier_transformers.layout import CacheLayout, find_layout
from kvtier_transformers.options import CacheOptions, UnsupportedModel, log

TIMEOUT_S = 1.0  # of the requests of a client that the store connects itself
PAUSE_S = 5.0  # without the daemon after a failure
LEAST_PREFILL_TOKENS = 16
CHANGED = 0.1  # of the time per token, before the daemon is told again

Where = Client | str | os.PathLike[str] | None


class Store:
    """What `space` returns is the space of the model as it is now. Threads may share a store.

    `counts`: tokens, blocks, and failures by their reason. `reason`: why the model cannot be kept, or empty.
    """

    def __init__(self, model: Any, where: Where, options: CacheOptions) -> None:
        self.options = options.checked()
        self.counts: Counter[str] = Counter()
        self.reason = ""
        self._model = weakref.ref(model)
        self._where = where
        self._client = where if isinstance(where, Client) else None
        self._layout: CacheLayout | None = None
        self._spec: KvSpec | None = None
        self._space: Space | None = None
        self._seen: tuple[Any, ...] = ()
        self._extras = b""
        self._retry_at = 0.0
        self._is_away = False
        self._recompute = Recompute()
        self._told = 0.0
        self._told_device = False
        self._lock = threading.Lock()

    @property
    def layout(self) -> CacheLayout:
        assert self._layout is not None
        return self._layout

    def space(self) -> tuple[Space, bytes] | None:
        """The model's space, and the extras of its keys; None if the daemon is away or it cannot be kept."""
        if self.reason or time.monotonic() < self._retry_at:
            self.counts["unsupported" if self.reason else "away"] += 1
            return None
        with self.failing("connect"), self._lock:
            self._identify()
            assert self._spec is not None
            if self._client is None:
                assert not isinstance(self._where, Client)
                name = f"transformers {os.getpid()}"
                # Does not connect again by itself: the store does, for the first call after a pause.
                self._client = Client.connect(
                    self._where, timeout_s=TIMEOUT_S, name=name, reconnect_s=0,
                    device=self.copies is not None,
                )  # fmt: skip
            if self._space is None:
                self._space = self._client.open(self._spec)
            return self._space, self._extras + precision()
        return None

    @cached_property
    def copies(self) -> TensorCopies | None:
        """Copies to and from the GPU that has the whole cache, if there is one."""
        return copies_on({part.device for group in self.layout.groups for part in group.parts})

    @property
    def save_copies(self) -> TensorCopies | None:
        """Copies for saves. Without `device` the daemon would reuse slots that a GPU may still write."""
        client = self._client
        if self.copies is None or client is None or client.device:
            return self.copies
        if not self._told_device:
            self._told_device = True
            log.info(
                "kvtier: saving through host memory, which is slower: connect the client with device=True"
            )
        return None

    def describes(self, space: Space, extras: bytes) -> bool:
        """Whether the blocks of the model as it is now are in this space, with these extras."""
        with self._lock:
            self._identify()
            return self._spec == space.spec and self._extras + precision() == extras

    def _identify(self) -> None:
        """Describe the model, again if its tensors or its adapters have changed."""
        model = self._model()
        if model is None or (seen := fingerprint(model)) == self._seen:
            return
        try:
            if self._layout is None:
                self._layout = find_layout(model)
            spec = describe(model, self._layout, self.options)
            self._extras = adapters_digest(model)
        except Exception as error:
            known = isinstance(error, (UnsupportedModel, ValueError))
            self.reason = str(error) if known else f"{type(error).__name__}: {error}"
            log.warning("kvtier: generating without kvtier: %s", self.reason)
            raise
        if spec != self._spec:
            self._spec, self._space = spec, None
        self._seen = seen

    @contextlib.contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """Count a failure of kvtier, and do not use the daemon for a moment after it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # becomes a cache miss
            self.counts[f"failed:{what}"] += 1
            if self.reason:
                return
            self._retry_at = time.monotonic() + PAUSE_S
            if not self._is_away:
                self._is_away = True
                log.warning("kvtier: generating without the daemon: %s: %s", what, str(error))
            with self._lock:
                client = self._client
                if (
                    client is not self._where
                    and client is not None
                    and client.link.connection.broken
                ):
                    client.close()
                    self._client = self._space = None
                    if (copies := self.__dict__.get("copies")) is not None:
                        copies.forget()
        else:
            if self._is_away and what != "connect":
                self._is_away = False
                log.warning("kvtier: the daemon answers again")

    def computed(self, space: Space, tokens: int, before: int, seconds: float) -> None:
        """Tell the daemon how long a prompt takes, so that it reads from disk only what is faster."""
        if tokens < LEAST_PREFILL_TOKENS:
            return
        with self._lock:
            self._recompute.stepped(tokens, before + tokens / 2, seconds)
            fit = self._recompute.fit
            if abs(fit[0] - self._told) <= CHANGED * self._told:
                return
            self._told = fit[0]
        with self.failing("report"):
            space.prefill(*fit)

    def close(self) -> None:
        """Stop using the daemon, and close a client that this store has connected."""
        with self._lock:
            self.reason = self.reason or "closed"
            client, self._client, self._space = self._client, None, None
            if (copies := self.__dict__.get("copies")) is not None:
                copies.close()
            if client is not None and client is not self._where:
                client.close()


_stores: weakref.WeakKeyDictionary[Any, dict[tuple[Any, CacheOptions], Store]] = (
    weakref.WeakKeyDictionary()
)


def store_of(model: Any, where: Where, options: CacheOptions) -> Store:
    """The store of this model, client and options: one for all calls."""
    stores = _stores.setdefault(model, {})
    place = where if isinstance(where, Client) else os.fspath(where) if where else None
    return stores.setdefault((place, options), Store(model, where, options))


REQUESTS = itertools.count(1)  # numbers of lookups: of all stores, because they may share a client
