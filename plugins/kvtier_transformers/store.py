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
from typing import Any, NamedTuple

import torch

from kvtier import Client, KvSpec
from kvtier.recompute import Recompute
from kvtier.space import Space
from kvtier_transformers.device import TensorCopies, copies_on
from kvtier_transformers.identity import (
    adapters_digest,
    describe,
    fingerprint,
    glance,
    placement,
    precision,
    unsuited,
)
from kvtier_transformers.layout import CacheLayout, find_layout
from kvtier_transformers.options import CacheOptions, UnsupportedModel, log

TIMEOUT_S = 1.0  # of the requests of a client that the store connects itself
PAUSE_S = 5.0  # without the daemon after a failure
LEAST_PREFILL_TOKENS = 16
CHANGED = 0.1  # of the time per token, before the daemon is told again

Where = Client | str | os.PathLike[str] | None


class ModelPlace(NamedTuple):
    """Where the blocks of a model are. `copies`: to and from the GPU that has the whole cache, if there is
    one."""

    space: Space
    extras: bytes
    layout: CacheLayout
    copies: TensorCopies | None


class Store:
    """What `place` returns is the place of the model as it is now. Threads may share a store.

    `counts`: tokens, blocks, and failures by their reason. `reason`: why the model cannot be kept, or empty.
    """

    def __init__(self, model: Any, where: Where, options: CacheOptions) -> None:
        self.options = options.checked()
        self.counts: Counter[str] = Counter()
        self.reason = ""
        self.is_closed = False
        self._model = weakref.ref(model)
        self._where = where
        self._client = where if isinstance(where, Client) else None
        self._process = os.getpid()
        self._seen: tuple[Any, ...] = ()
        self._glances: list[bytes] = []
        self._placement: tuple[Any, ...] = ()
        # By the types that autocast computes with.
        self._layouts: dict[bytes, CacheLayout] = {}
        self._specs: dict[bytes, KvSpec] = {}
        self._spaces: dict[bytes, Space] = {}
        self._copies: dict[frozenset[torch.device], TensorCopies | None] = {}
        self._extras = b""
        self._retry_at = 0.0
        self._is_away = False
        self._recompute = Recompute()
        self._told = 0.0
        self._told_device = False
        self._lock = threading.Lock()

    def place(self) -> ModelPlace | None:
        """The place of the model's blocks; None if the daemon is away or the model cannot be kept."""
        if self.reason or time.monotonic() < self._retry_at:
            self.counts["unsupported" if self.reason else "away"] += 1
            return None
        with self.failing("connect"), self._lock:
            types, spec = self._identify()
            layout = self._layouts[types]
            devices = frozenset(part.device for group in layout.groups for part in group.parts)
            if devices not in self._copies:
                self._copies[devices] = copies_on(set(devices))
            copies = self._copies[devices]
            if self._client is not self._where and self._process != os.getpid():
                # The client belongs to the process that this one is a fork of.
                self._client, self._spaces = None, {}
            if self._client is None:
                assert not isinstance(self._where, Client)
                name = f"transformers {os.getpid()}"
                # Does not connect again by itself: the store does, for the first call after a pause.
                self._client = Client.connect(
                    self._where, timeout_s=TIMEOUT_S, name=name, reconnect_s=0,
                    device=copies is not None,
                )  # fmt: skip
                self._process = os.getpid()
            space = self._spaces.get(types)
            if space is None or space.spec != spec:
                space = self._spaces[types] = self._client.open(spec)
            return ModelPlace(space, self._extras + types, layout, copies)
        return None

    def save_copies(self, copies: TensorCopies | None) -> TensorCopies | None:
        """Copies for saves. Without `device` the daemon would reuse slots that a GPU may still write."""
        client = self._client
        if copies is None or client is None or client.device:
            return copies
        if not self._told_device:
            self._told_device = True
            log.info(
                "kvtier: saving through host memory, which is slower: connect the client with device=True"
            )
        return None

    def describes(self, space: Space, extras: bytes) -> bool:
        """Whether the blocks of the model as it is now are in this space, with these extras."""
        if self.unsuited():
            return False
        with self._lock:
            types, spec = self._identify(is_same_call=True)
            return spec == space.spec and self._extras + types == extras

    def unsuited(self) -> str:
        """Why no blocks of the model as it is now can be kept; empty if they can."""
        model = self._model()
        return "" if model is None else unsuited(model)

    def decline(self, why: str) -> None:
        """Count a call that runs without kvtier, and log the first one of each reason."""
        self.counts[f"declined:{why}"] += 1
        if self.counts[f"declined:{why}"] == 1:
            log.warning("kvtier: calls with %s are declined: they run without kvtier", why)

    def _identify(self, is_same_call: bool = False) -> tuple[bytes, KvSpec]:
        """Describe the model, again if its tensors or its adapters have changed. Return the types that
        autocast computes with, and the description."""
        model, types = self._model(), precision()
        if model is None:
            return types, self._specs[types]
        seen, glances = fingerprint(model), self._glances if is_same_call else glance(model)
        if (seen, glances) == (self._seen, self._glances) and types in self._specs:
            return types, self._specs[types]
        try:
            if (found := placement(model)) != self._placement:
                self._layouts, self._placement = {}, found
            if types not in self._layouts:
                self._layouts[types] = find_layout(model)
            spec = describe(model, self._layouts[types], self.options)
            self._extras = adapters_digest(model)
        except Exception as error:
            known = isinstance(error, (UnsupportedModel, ValueError))
            self.reason = str(error) if known else f"{type(error).__name__}: {error}"
            log.warning("kvtier: generating without kvtier: %s", self.reason)
            raise
        if (seen, glances) != (self._seen, self._glances):
            self._seen, self._glances, self._specs = seen, glances, {}
        self._specs[types] = spec
        return types, spec

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
                    self._client, self._spaces = None, {}
                    for copies in filter(None, self._copies.values()):
                        copies.forget()
        else:
            # A report is not answered.
            if self._is_away and what not in ("connect", "report"):
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
            self.reason, self.is_closed = self.reason or "closed", True
            client, self._client, self._spaces = self._client, None, {}
            for copies in filter(None, self._copies.values()):
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
