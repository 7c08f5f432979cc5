"""`prefix` with an engine's hints about the attention that blocks receive: important chains stay
longer, and unimportant ones lose their tails earlier. It never makes a hole, and the head of a
chain, where attention sinks are, is evicted last. Without hints it equals `prefix`.

Z. Zhang et al., "H2O: heavy-hitter oracle for efficient generative inference of large language
models", NeurIPS 2023; G. Xiao et al., "Efficient streaming language models with attention sinks",
ICLR 2024. `Attention` is native, `AttentionModel` the same in Python.
"""

from models.policies.model import hint_of, unpack
from models.policies.native import Attention
from models.policies.prefix import CONTINUED, LEVEL_SHIFT, SHARED, PrefixModel

__all__ = ["Attention", "AttentionModel"]


class AttentionModel(PrefixModel):
    eighths = (8, 1, 8, 64)  # no hint, little, medium, much

    def hinted(self, ids: bytes, importance: float, names: bytes = b"") -> None:
        level = hint_of(importance)
        for number in unpack(ids):
            block = self.blocks.get(number)
            if block is None or block.where == "nowhere":
                continue
            block.own = (block.own & (CONTINUED | SHARED)) | level << LEVEL_SHIFT
            if block.listed > 0:
                self.relist(number)
