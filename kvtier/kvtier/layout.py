"""The description of a KV cache: its groups, the size of its blocks, and the identity of its space."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from kvtier.errors import SpecError

DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
KINDS = ("full", "window", "state")
LIMIT_GROUPS = 64
LIMIT_SHARDS = 255
LIMIT_PLACES = 1024  # groups times shards: a lookup checks each of them for every key
LIMIT_BLOCK_BYTES = 1 << 30
LIMIT_BLOCK_TOKENS = 1 << 20
LIMIT_NUMBER = 1 << 31
LIMIT_DESCRIPTION_BYTES = 16 << 10
GROUP_NUMBERS = (
    "layers", "kv_heads", "head_dim", "parts", "window_tokens", "state_bytes", "opaque_bytes",
)  # fmt: skip
IDENTITY_VERSION = b"kvtier.space.1\0"
# In the name of a model or a client they would control the terminals and logs that show it.
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
PAGE_MARK = "page:"  # prefix of the last word of a layout, which describes an engine's pages

Kind = Literal["full", "window", "state"]


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers that are cached in the same way, as one shard holds them.

    `kind` says which blocks of a prefix are needed: `full` needs all of them, `window` those of the last
    `window_tokens`, `state` only the last one (Mamba and similar layers). A state has `state_bytes` per
    layer, independent of the tokens of a block. `parts` is 2 for K and V. `opaque_bytes` replaces the
    computed size of a block, for engines that pad their pages. `shards` is the number of shards.
    """

    kind: Kind = "full"
    layers: int
    kv_heads: int = 0
    head_dim: int = 0
    parts: int = 2
    window_tokens: int = 0
    state_bytes: int = 0
    opaque_bytes: int = 0
    shards: int = 1

    def token_bytes(self, dtype: str) -> int:
        """Return the bytes of one token of one shard."""
        return self.layers * self.parts * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def block_bytes(self, dtype: str, block_tokens: int) -> int:
        """Return the bytes of one block of one shard."""
        if self.opaque_bytes:
            return self.opaque_bytes
        if self.kind == "state":
            return self.layers * self.state_bytes
        return self.token_bytes(dtype) * block_tokens

    def needed_blocks(self, block_tokens: int, prefix_blocks: int) -> range:
        """Return which blocks of a prefix this group needs to restore the prefix."""
        if self.kind == "full":
            return range(prefix_blocks)
        trailing = 1 if self.kind == "state" else self.window_blocks(block_tokens)
        return range(max(0, prefix_blocks - trailing), prefix_blocks)

    def window_blocks(self, block_tokens: int) -> int:
        """Return the number of blocks that the window covers."""
        return -(-self.window_tokens // block_tokens)


class KvSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The complete description of a cache. Two caches share blocks only if all fields are equal.

    `weights` identifies the content of the weights: a revision, or a digest of the headers and sizes of the
    files. It must not be empty: otherwise two fine-tunes of one model would read each other's cache.
    Create it with `dense`, `mla` or `groups`.
    """

    model: str
    weights: str
    dtype: str
    block_tokens: int
    cache_groups: tuple[Group, ...]
    quantization: str = ""
    layout: str = "layer,part,token,head,dim"
    strides: tuple[int, ...] = ()
    rope: str = ""
    attention: str = ""
    engine: str = ""
    engine_layout: str = ""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    @classmethod
    def dense(
        cls,
        *,
        model: str,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        block_tokens: int,
        weights: str,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        window_tokens: int = 0,
        **more: Any,
    ) -> KvSpec:
        """Describe MHA, GQA or MQA: K and V in every layer. `layers` and `kv_heads` are those of the whole
        model. With parallelism each rank keeps its share; ranks that hold the same heads share one shard."""
        _positive(layers=layers, kv_heads=kv_heads, head_dim=head_dim)
        _positive(tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
        head_shards = min(tensor_parallel, kv_heads)
        if kv_heads % head_shards or tensor_parallel % head_shards:
            raise SpecError(
                f"kv_heads={kv_heads} cannot be divided over tensor_parallel={tensor_parallel}"
            )
        if layers % pipeline_parallel:
            raise SpecError(
                f"layers={layers} cannot be divided over pipeline_parallel={pipeline_parallel}"
            )
        group = Group(
            kind="window" if window_tokens else "full",
            layers=layers // pipeline_parallel,
            kv_heads=kv_heads // head_shards,
            head_dim=head_dim,
            window_tokens=window_tokens,
            shards=head_shards * pipeline_parallel,
        )
        return cls(
            model=model,
            weights=weights,
            dtype=dtype,
            block_tokens=block_tokens,
            cache_groups=(group,),
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            **more,
        ).checked()

    @classmethod
    def mla(
        cls,
        *,
        model: str,
        layers: int,
        latent_dim: int,
        rope_dim: int,
        dtype: str,
        block_tokens: int,
        weights: str,
        tensor_parallel: int = 1,
        **more: Any,
    ) -> KvSpec:
        """Describe multi-head latent attention: one latent in place of K and V. It is the same on every
        tensor-parallel rank, so all ranks share one shard."""
        _positive(layers=layers, latent_dim=latent_dim)
        _integers(rope_dim=rope_dim)
        group = Group(layers=layers, kv_heads=1, head_dim=latent_dim + rope_dim, parts=1)
        return cls(
            model=model,
            weights=weights,
            dtype=dtype,
            block_tokens=block_tokens,
            cache_groups=(group,),
            layout=f"layer,token,latent={latent_dim}+{rope_dim}",
            tensor_parallel=tensor_parallel,
            **more,
        ).checked()

    @classmethod
    def groups(
        cls,
        groups: Sequence[Group],
        *,
        model: str,
        dtype: str,
        block_tokens: int,
        weights: str,
        **more: Any,
    ) -> KvSpec:
        """Describe a cache of several groups: full attention, sliding windows, recurrent states."""
        return cls(
            model=model,
            weights=weights,
            dtype=dtype,
            block_tokens=block_tokens,
            cache_groups=tuple(groups) if isinstance(groups, Sequence) else groups,
            **more,
        ).checked()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one shard, all groups together."""
        return sum(self.group_block_bytes(index) for index in range(len(self.cache_groups)))

    @property
    def places(self) -> int:
        """The number of parts of each block: the sum of the shards of all groups."""
        return sum(group.shards for group in self.cache_groups)

    def group_block_bytes(self, group: int) -> int:
        """Return the bytes of one block of one shard of this group."""
        return self.cache_groups[group].block_bytes(self.dtype, self.block_tokens)

    def checked(self) -> KvSpec:
        """Return self if it is valid. Raises SpecError, which names the field, otherwise."""
        try:
            msgspec.json.decode(msgspec.json.encode(self), type=type(self))
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            raise SpecError(f"a field has the wrong type: {error}") from error
        for name in ("model", "weights"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise SpecError(f"{name} must be text, got {value!r}")
            if not value.strip():
                raise SpecError(f"{name} is empty: caches of different models could be mixed")
        if found := CONTROLS.search(self.model):
            raise SpecError(f"model {self.model!r} has the control character {found[0]!r}")
        if self.dtype not in DTYPE_BYTES:
            raise SpecError(
                f"dtype {self.dtype!r} is unknown: expected one of {', '.join(DTYPE_BYTES)}"
            )
        _positive(
            block_tokens=self.block_tokens,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
        )
        if self.block_tokens > LIMIT_BLOCK_TOKENS:
            raise SpecError(f"block_tokens={self.block_tokens}: at most {LIMIT_BLOCK_TOKENS}")
        if not 1 <= len(self.cache_groups) <= LIMIT_GROUPS:
            raise SpecError(f"cache_groups: 1 to {LIMIT_GROUPS}, not {len(self.cache_groups)}")
        if len(msgspec.json.encode(self)) > LIMIT_DESCRIPTION_BYTES:
            raise SpecError(f"the description is longer than {LIMIT_DESCRIPTION_BYTES} bytes")
        for index, group in enumerate(self.cache_groups):
            self._check_group(index, group)
        if self.places > LIMIT_PLACES:
            raise SpecError(f"{self.places} groups times shards: at most {LIMIT_PLACES}")
        return self

    def _check_group(self, index: int, group: Group) -> None:
        _positive(**{f"cache_groups[{index}].layers": group.layers})
        if not 1 <= group.shards <= LIMIT_SHARDS:
            raise SpecError(
                f"cache_groups[{index}].shards: 1 to {LIMIT_SHARDS}, not {group.shards}"
            )
        if group.kind == "window":
            _positive(**{f"cache_groups[{index}].window_tokens": group.window_tokens})
        for name in GROUP_NUMBERS:
            if not 0 <= getattr(group, name) < LIMIT_NUMBER:
                raise SpecError(f"cache_groups[{index}].{name}: 0 to {LIMIT_NUMBER - 1}")
        size = group.block_bytes(self.dtype, self.block_tokens)
        if not 1 <= size <= LIMIT_BLOCK_BYTES:
            raise SpecError(
                f"cache_groups[{index}]: a block has {size} bytes, expected 1 to "
                f"{LIMIT_BLOCK_BYTES}"
            )


def space_id(spec: KvSpec, tenant: str, loss: str = "") -> bytes:
    """Return the identity of a space: 32 bytes over all fields, the tenant, and the loss of its codec."""
    # JSON of named fields in declared order: no two descriptions have the same text.
    named = {"tenant": tenant, "spec": spec}
    description = msgspec.json.encode({**named, "loss": loss} if loss else named)
    return hashlib.sha256(IDENTITY_VERSION + description).digest()


def _integers(**values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int):
            raise SpecError(f"{name}={value!r}: must be an integer")


def _positive(**values: int) -> None:
    _integers(**values)
    for name, value in values.items():
        if value < 1:
            raise SpecError(f"{name}={value}: must be at least 1")
