"""A second connector of an engine: it loads within the step, for named requests, and can fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


@dataclass
class Offered(KVConnectorMetadata):
    """The pages that the step loads into, by request."""

    pages: dict[str, list[int]]


class Neighbour(KVConnectorBase_V1, SupportsHMA):
    """`offers`: how many tokens of a request it has; their data is garbage if it is not `good`."""

    offers: ClassVar[dict[str, int]] = {}
    good = True
    rank: Any = None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.begun: dict[str, list[int]] = {}
        self.failed: set[int] = set()
        self.block = vllm_config.cache_config.block_size

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return max(0, self.offers.get(request.request_id, 0) - computed), False

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        if tokens:
            offered = self.offers.pop(request.request_id)
            pages = blocks.get_block_ids()[0][: offered // self.block]
            self.begun[request.request_id] = pages[-tokens // self.block :]

    def build_connector_meta(self, scheduled: Any) -> Offered:
        begun, self.begun = self.begun, {}
        return Offered(begun)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def register_kv_caches(self, caches: Any) -> None:
        """Do nothing: the rank has them."""

    def start_load_kv(self, context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Offered)
        for request_id, pages in metadata.pages.items():
            if self.good:
                self.rank.fill(request_id)
            else:
                some = [page for page in pages if page]  # the window no longer needs the others
                self.failed.update(some)
                self.rank.spoil(some)

    def wait_for_layer_load(self, name: str) -> None:
        """Do nothing: all pages are loaded before the step begins."""

    def save_kv_layer(self, name: str, layer: Any, metadata: Any, **kwargs: Any) -> None:
        """It saves nothing."""

    def wait_for_save(self) -> None:
        """It saves nothing."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed
