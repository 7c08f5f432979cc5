"""What this process serves, and the store of its pages until its weights change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import sglang
from sglang.srt.runtime_context import (
    get_device,
    get_exec,
    get_lora,
    get_model,
    get_parallel,
    get_serving,
)

from kvtier_plugins.page_store import PageStore, RankCache
from kvtier_sglang.identity import ModelFacts, RankPlace, describe
from kvtier_sglang.options import StorageOptions
from kvtier_sglang.pages import ServedPool

log = logging.getLogger("sglang.kvtier")

SETTINGS = (
    "dtype", "quantization", "kv_cache_dtype", "quantization_param_path", "json_model_override_args",
    "model_impl",
)  # fmt: skip


def model_facts() -> ModelFacts:
    """What this process serves."""
    model = get_model()
    texts = {name: str(getattr(model, name, "")) for name in SETTINGS}
    texts["attention_backend"] = str(getattr(get_exec().kernel, "attention_backend", ""))
    return ModelFacts(
        path=str(model.model_path), revision=model.revision, load_format=str(model.load_format),
        seed=int(get_device().random_seed or 0), hosts=int(get_parallel().nnodes or 1),
        version=str(get_serving().weight_version), engine=sglang.__version__, texts=texts,
        adapters=tuple(str(getattr(one, "lora_path", one)) for one in get_lora().lora_paths or ()),
    )  # fmt: skip


class ServedPages:
    """The pages of a rank. What cannot be kept is logged once, and the server works without kvtier."""

    def __init__(self) -> None:
        self._store: PageStore | None = None
        self._facts: ModelFacts | None = None

    def open(
        self,
        find: Callable[[], tuple[Mapping[str, ServedPool], RankPlace]],
        options: StorageOptions,
    ) -> None:
        """Describe the pools that `find` returns, and connect."""
        try:
            pools, place = find()
            facts = model_facts()
            spec = describe(facts, pools, place, options.weights)
        except (ValueError, OSError) as error:
            self.decline(str(error))
            return
        except Exception as error:  # noqa: BLE001  # unknown pools
            self.decline(f"{type(error).__name__}: {error}")
            return
        self._facts = facts
        cache = RankCache(spec, pools, "sglang", log, place.shard, place.writes)
        self._store = PageStore(cache, options)

    def decline(self, why: str) -> None:
        log.warning("kvtier: this server works without kvtier: %s", why)
        self.close()

    def usable(self) -> PageStore | None:
        """The store, unless the weights were updated in place: pages of both weights would have one name."""
        if self._store is not None and self._facts is not None:
            version, path = str(get_serving().weight_version), str(get_model().model_path)
            if (version, path) != (self._facts.version, self._facts.path):
                self.decline(
                    "its weights were updated in place; it uses kvtier again after a restart"
                )
        return self._store

    @property
    def opened(self) -> PageStore | None:
        """The store, whatever the weights are."""
        return self._store

    def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()
