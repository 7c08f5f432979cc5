"""What a block of KV cache is: its parts, its size, and the identity of the space that it belongs to."""

from __future__ import annotations

import hashlib
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
LIMIT_PLACES = 1024  # groups times shards: each is looked at for every key
LIMIT_BLOCK_BYTES = 1 << 30
LIMIT_BLOCK_TOKENS = 1 << 20
LIMIT_NUMBER = 1 << 31
LIMIT_DESCRIPTION_BYTES = 16 << 10
GROUP_NUMBERS = (
    "layers", "kv_heads", "head_dim", "parts", "window_tokens", "state_bytes", "opaque_bytes",
)  # fmt: skip
IDENTITY_VERSION = b"kvtier.space.1\0"

Kind = Literal["full", "window", "state"]


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers that are cached alike, as one shard holds them.

    `full`: every block of a prefix is needed. `window`: only those of the trailing `window_tokens`.
    `state`: only the last one (Mamba and kin), `state_bytes` a layer whatever the block's tokens.
    `opaque_bytes` overrides the arithmetic where an engine pads its pages.
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
        return self.layers * self.parts * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def block_bytes(self, dtype: str, block_tokens: int) -> int:
        """Bytes of one block of one shard."""
        if self.opaque_bytes:
            return self.opaque_bytes
        if self.kind == "state":
            return self.layers * self.state_bytes
        return self.token_bytes(dtype) * block_tokens

    def needed_blocks(self, block_tokens: int, prefix_blocks: int) -> range:
        """Which blocks of a prefix this group must have for the prefix to be restored."""
        if self.kind == "full":
            return range(prefix_blocks)
        trailing = 1 if self.kind == "state" else self.window_blocks(block_tokens)
        return range(max(0, prefix_blocks - trailing), prefix_blocks)

    def window_blocks(self, block_tokens: int) -> int:
        return -(-self.window_tokens // block_tokens)


class KvSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The full description of a cache: two caches share blocks only if every field is equal.

    `weights` names the weights by content (a revision, or a digest of the files' headers and sizes);
    without it two fine-tunes of one model would read each other's cache, so an empty one is refused.
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
        """MHA, GQA or MQA: K and V in every layer. `layers` and `kv_heads` are the whole model's;
        with parallelism each rank keeps its share, and ranks that would hold the same heads share
        one shard."""
        _positive(layers=layers, kv_heads=kv_heads, head_dim=head_dim)
        _positive(tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
        head_shards = min(tensor_parallel, kv_heads)
        if kv_heads % head_shards or tensor_parallel % head_shards:
            raise SpecError(
                f"kv_heads={kv_heads} can't be divided over tensor_parallel={tensor_parallel}"
            )
        if layers % pipeline_parallel:
            raise SpecError(
                f"layers={layers} can't be divided over pipeline_parallel={pipeline_parallel}"
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
        """Multi-head latent attention: one latent part in place of K and V, the same on every
        tensor-parallel rank, so all of them share one shard."""
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
        """Several groups: sliding windows beside full attention, recurrent states beside either."""
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
        """How many residencies each block has: groups times shards."""
        return sum(group.shards for group in self.cache_groups)

    def group_block_bytes(self, group: int) -> int:
        return self.cache_groups[group].block_bytes(self.dtype, self.block_tokens)

    def checked(self) -> KvSpec:
        """Itself, if it makes sense; raises SpecError naming the field otherwise."""
        try:
            msgspec.json.decode(msgspec.json.encode(self), type=type(self))
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            raise SpecError(f"a field of another type: {error}") from error
        for name in ("model", "weights"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise SpecError(f"{name} is text, not {value!r}")
            if not value.strip():
                raise SpecError(f"{name} is empty: a cache without it would be shared wrongly")
        if self.dtype not in DTYPE_BYTES:
            raise SpecError(f"dtype {self.dtype!r} is unknown: one of {', '.join(DTYPE_BYTES)}")
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
                f"cache_groups[{index}]: a block of {size} bytes; 1 to {LIMIT_BLOCK_BYTES} are possible"
            )


def space_id(spec: KvSpec, tenant: str, loss: str = "") -> bytes:
    """The identity of everything that shares keys: 32 bytes over every field, the tenant, and what its
    blocks may lose."""
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
