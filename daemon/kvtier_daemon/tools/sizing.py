"""The size of a model's KV cache, from its Hugging Face config, and when loading is faster than computing.

Counts what engines allocate: what each layer stores per token, per window, or per sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

from kvtier.errors import ConfigError

Kind = Literal["full", "window", "state"]

STATE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SCALE_BYTES = 4  # a float32 for each K and each V of a head, if scales are stored so
PACKED_MLA = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}  # FlashMLA packs 512 + 64 dims like this
FORMATS = (
    *STATE_BYTES, "fp8", "int8", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head",
    "nvfp4", *PACKED_MLA,
)  # fmt: skip
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
FORMAT_ALIASES = {"fp8_e4m3": "fp8", "fp8_e5m2": "fp8", **DTYPE_ALIASES}
MAX_NUMBER = (1 << 31) - 1
MAX_LAYERS = 10_000  # each costs time here; published models have fewer than 200
NESTED = ("text_config", "llm_config", "language_config", "text_model_config")
# Defaults of classes for nested configs: published files leave these out.
NESTED_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
        "hidden_size": 2304, "num_hidden_layers": 26,
    },
    "llama": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    "mistral": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip
# One layer in this many has full attention, if the config leaves that to its class.
PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "gpt_oss": 2, "cohere2": 4}

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "num_attention_groups",
)  # fmt: skip
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
HEAD_DIM = ("attention_head_dim", "head_dim", "hidden_size_per_head", "kv_channels", "head_size")
STATES_ALONE = ("mamba", "mamba2", "falcon_mamba")
LAYER_NAMES: dict[str, str] = {
    "full_attention": "full", "attention": "full", "global": "full", "full": "full", "*": "full",
    "sliding_attention": "window", "sliding": "window", "local": "window", "local_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "state", "mamba": "state", "mamba2": "state", "recurrent": "state", "m": "state",
    "conv": "state", "hybrid": "both", "mlp": "none", "moe": "none", "-": "none", "e": "none",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer stores on one GPU: `heads` vectors of `key_dim + value_dim` per token, or a state."""

    kind: Kind
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window_tokens: int = 0
    state_bytes: int = 0
    more_bytes: int = 0  # more bytes per token, such as the keys of a sparse index
    fixed_bytes: int = 0  # per token, if a format packs it differently
    copies: int = 1  # how many GPUs store the same

    def token_bytes(self, kv_format: str) -> int:
        if self.kind == "state":
            return 0
        if self.fixed_bytes:
            return self.fixed_bytes + self.more_bytes
        return self.heads * _head_bytes(kv_format, self.key_dim, self.value_dim) + self.more_bytes


def _head_bytes(kv_format: str, key_dim: int, value_dim: int) -> int:
    values = key_dim + value_dim
    if kv_format in STATE_BYTES:
        return values * STATE_BYTES[kv_format]
    if kv_format == "nvfp4":
        return sum(dim // 2 + dim // 16 for dim in (key_dim, value_dim))
    if kv_format == "int4_per_token_head":
        return key_dim // 2 + value_dim // 2 + 2 * SCALE_BYTES
    return values + (2 * SCALE_BYTES if kv_format.endswith("_per_token_head") else 0)


@dataclass(frozen=True, slots=True)
class Cache:
    """The KV cache of a model on one GPU of `tensor_parallel` GPUs."""

    model: str
    kv_format: str
    layers: tuple[Layer, ...]
    tensor_parallel: int
    remarks: tuple[str, ...]

    @property
    def token_bytes(self) -> int:
        """The bytes that one more token writes, including windows."""
        return sum(layer.token_bytes(self.kv_format) for layer in self.layers)

    @property
    def full_token_bytes(self) -> int:
        """The bytes by which a long sequence grows with each token."""
        return sum(
            layer.token_bytes(self.kv_format) for layer in self.layers if layer.kind == "full"
        )

    @property
    def state_bytes(self) -> int:
        return sum(layer.state_bytes for layer in self.layers)

    def prefix_bytes(self, tokens: int, block_tokens: int = 1, *, whole: bool = False) -> int:
        """Return the bytes of a prefix: full attention, the last window, the last state; in whole blocks.

        For one GPU, or for the `whole` model, in which identical copies on several GPUs count once."""
        total = 0
        for layer in self.layers:
            kept = min(tokens, layer.window_tokens) if layer.kind == "window" else tokens
            blocks = -(-kept // block_tokens)
            if kept < tokens and block_tokens > 1:
                blocks += 1  # a window can begin within a block
            own = blocks * block_tokens * layer.token_bytes(self.kv_format) + layer.state_bytes
            total += own * self.tensor_parallel // layer.copies if whole else own
        return total

    def groups(self) -> list[dict[str, int | str]]:
        """The layers, grouped by kind."""
        return [
            {
                "kind": layer.kind,
                "layers": count,
                "bytes_per_token": layer.token_bytes(self.kv_format) * count,
                "window_tokens": layer.window_tokens,
                "state_bytes": layer.state_bytes * count,
            }
            for layer, count in Counter(self.layers).items()
        ]


# --- reading a config ------------------------------------------------------------------------------


class _Fields:
    """The fields of a config, by any of their names. Errors name the field."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self._where = config, where

    def wrong(self, name: str, why: str) -> ConfigError:
        return ConfigError(f"{self._where}: {name}: {why}")

    def get(self, *names: str) -> Any:
        """Return the first of these fields that exists and is not null, or None."""
        return next(
            (value for name in names if (value := self._config.get(name)) is not None), None
        )

    def number(self, *names: str, least: int = 1, most: int = MAX_NUMBER) -> int:
        value = self.maybe(*names, least=least, most=most)
        if value is None:
            also = f" (or as {', '.join(names[1:])})" if names[1:] else ""
            raise self.wrong(names[0], f"is missing{also}")
        return value

    def maybe(self, *names: str, least: int = 1, most: int = MAX_NUMBER) -> int | None:
        for name in names:
            if (value := self._config.get(name)) is not None:
                return self.integer(name, value, least, most)
        return None

    def integer(self, name: str, value: Any, least: int = 1, most: int = MAX_NUMBER) -> int:
        """Return the value of this field if it is an integer within these limits."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, f"{value!r} is not an integer from {least:,} to {most:,}")
        return value

    def items(self, name: str) -> list[Any] | None:
        value = self._config.get(name)
        if value is not None and not isinstance(value, list):
            raise self.wrong(name, "is not a list")
        return value


def read_config(
    config: Mapping[str, Any],
    where: str = "config",
    *,
    kv_format: str = "auto",
    state_dtype: str = "auto",
    tensor_parallel: int = 1,
) -> Cache:
    """Return the cache that a `config.json` describes. Raises ConfigError if something is missing."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}: not a JSON object")
    text = _text_of(config)
    fields = _Fields(text, where)
    remarks: list[str] = []
    dtype = _dtype(fields, remarks)
    found = _format(fields, kv_format, dtype)
    layers = _layers(
        fields, found, _state_dtype(fields, state_dtype, dtype), tensor_parallel, remarks
    )
    if found in PACKED_MLA and not all(layer.fixed_bytes for layer in layers):
        raise fields.wrong("kv_lora_rank", f"{found} is a format for latent attention of 512 + 64")
    return Cache(
        model=str(fields.get("model_type") or "model"),
        kv_format=found,
        layers=tuple(layers),
        tensor_parallel=tensor_parallel,
        remarks=tuple(remarks),
    )


def _text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the language model, merged over the outer config."""
    thinker = config.get("thinker_config")
    if isinstance(thinker, Mapping):
        config = {**config, **thinker}
    for name in NESTED:
        nested = config.get(name)
        if isinstance(nested, Mapping):
            defaults = NESTED_DEFAULTS.get(str(nested.get("model_type")), {})
            return {**config, **defaults, **{k: v for k, v in nested.items() if v is not None}}
    return dict(config)


def _dtype(fields: _Fields, remarks: list[str]) -> str:
    value = fields.get("dtype", "torch_dtype")
    name = str(value).removeprefix("torch.") if value is not None else ""
    name = DTYPE_ALIASES.get(name, name)
    if name in ("bfloat16", "float16"):
        return name
    if name not in ("", "auto", "float32", "float64") and not name.startswith("float8_"):
        named = "torch_dtype" if fields.get("dtype") is None else "dtype"
        raise fields.wrong(
            named, f"{value!r} is no float type of torch, such as bfloat16; correct or remove it"
        )
    remarks.append(
        f"the config's dtype is {name or 'missing'}: counted as bfloat16, as engines run it"
    )
    return "bfloat16"


def _format(fields: _Fields, asked: str, dtype: str) -> str:
    if asked != "auto":
        asked = FORMAT_ALIASES.get(asked, asked)
        if asked not in FORMATS:
            raise ConfigError(
                f"unknown cache format {asked!r}: expected one of {', '.join(FORMATS)}"
            )
        return asked
    quantization = fields.get("quantization_config", "compression_config")
    if isinstance(quantization, Mapping):
        scheme = quantization.get("kv_cache_scheme")
        algorithm = quantization.get("kv_cache_quant_algo")
        if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
            return "fp8" if scheme.get("type") == "float" else "int8"
        if isinstance(algorithm, str) and algorithm.lower() in ("fp8", "nvfp4"):
            return algorithm.lower()
    return dtype


def _state_dtype(fields: _Fields, asked: str, dtype: str) -> tuple[str, str]:
    """Return the types of the state of a convolution and of the recurrent state."""
    told = fields.get("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    if asked == "auto":
        asked = str(told) if told is not None else dtype
        # The default of its class, which files leave out.
        if told is None and fields.get("model_type") == "nemotron_h":
            asked = "float32"
    if asked not in STATE_BYTES:
        raise fields.wrong(
            "mamba_ssm_cache_dtype", f"{asked!r} is not one of {', '.join(STATE_BYTES)}"
        )
    return dtype, asked


def _layers(
    fields: _Fields,
    kv_format: str,
    state_dtypes: tuple[str, str],
    parallel: int,
    remarks: list[str],
) -> list[Layer]:
    kinds = _kinds(fields)
    attention = any(kind not in ("state", "none") for kind in kinds)
    whole = _attention(fields, kv_format, parallel, remarks) if attention else Layer("full")
    state = (
        Layer("state", state_bytes=_state_bytes(fields, state_dtypes, parallel))
        if any(kind in ("state", "both") for kind in kinds)
        else Layer("state")
    )
    window = _window(fields, kinds)
    shared = fields.maybe("num_kv_shared_layers", least=0) or 0
    heads = fields.get("num_key_value_heads")
    by_layer = isinstance(heads, list)
    if by_layer and len(heads) != len(kinds):
        raise fields.wrong("num_key_value_heads", f"{len(heads)} entries for {len(kinds)} layers")
    found: list[Layer] = []
    for index, kind in enumerate(kinds[: len(kinds) - shared]):
        layer = whole
        if by_layer:
            own = fields.integer(f"num_key_value_heads[{index}]", heads[index])
            layer = replace(whole, **_share(fields, own, parallel))
        if kind in ("full", "both"):
            found.append(_wide(fields, layer, parallel))
        if kind in ("window", "chunk"):
            found.append(replace(layer, kind="window", window_tokens=window))
        if kind in ("state", "both"):
            found.append(state)
    if shared:
        remarks.append(f"the last {shared} layers use the caches of other layers")
    if crossed := fields.items("cross_attention_layers"):
        remarks.append(f"{len(crossed)} layers cache only an image's tokens: not counted")
    if not found:
        raise fields.wrong(LAYERS[0], "no layer has a cache")
    return found


def _wide(fields: _Fields, layer: Layer, parallel: int) -> Layer:
    """Return a layer of full attention, in models where those have other heads (Gemma 4)."""
    dim = fields.maybe("global_head_dim")
    if dim is None and fields.get("model_type") in ("gemma4", "gemma4_text"):
        dim = 512  # the default of its class, which files leave out
    if dim is None or fields.get("kv_lora_rank") is not None:
        return layer
    layer = replace(layer, key_dim=dim, value_dim=dim)
    if fields.get("attention_k_eq_v") and (own := fields.maybe("num_global_key_value_heads")):
        layer = replace(layer, **_share(fields, own, parallel))
    return layer


# --- which layers are of which kind ----------------------------------------------------------------


def _kinds(fields: _Fields) -> list[str]:
    count = _layer_count(fields)
    for name in ("layer_types", "layers_block_type"):
        if types := fields.items(name):
            return _named_kinds(fields, name, types, count)
    if (pattern := fields.get("hybrid_override_pattern")) is not None:
        return _named_kinds(fields, "hybrid_override_pattern", list(str(pattern)), count)
    if types := fields.items("block_types"):  # repeated over the layers
        repeated = [types[index % len(types)] for index in range(count)]
        return _named_kinds(fields, "block_types", repeated, count)
    if types := fields.items("attn_type_list"):
        return ["full" if one else "state" for one in types]
    if (period := fields.maybe("attn_layer_period")) is not None:
        offset = fields.maybe("attn_layer_offset", least=0) or 0
        return ["full" if index % period == offset else "state" for index in range(count)]
    for name in ("attn_layer_indices", "full_attn_idxs"):
        if (indices := fields.items(name)) is not None:
            return ["full" if index in indices else "state" for index in range(count)]
    if (interval := fields.maybe("full_attention_interval")) is not None:
        return _every(interval, count, "state")
    if (blocks := fields.items("block_configs")) is not None:
        return ["none" if _is_no_attention(block) else "full" for block in blocks]
    if (crossed := fields.items("cross_attention_layers")) is not None:
        return ["none" if index in crossed else "full" for index in range(count)]
    model = fields.get("model_type")
    if model == "falcon_h1":
        return ["both"] * count
    if model in STATES_ALONE:
        return ["state"] * count
    if model == "llama4_text":
        ropes = fields.items("no_rope_layers") or [int((i + 1) % 4 != 0) for i in range(count)]
        return ["chunk" if rope else "full" for rope in ropes]
    return _windowed_kinds(fields, count, str(model))


def _layer_count(fields: _Fields) -> int:
    if fields.maybe(*LAYERS) is None:
        if pattern := fields.get("hybrid_override_pattern"):
            return len(str(pattern))
        for name in ("layer_types", "layers_block_type", "block_configs"):
            if value := fields.items(name):
                return len(value)
    return fields.number(*LAYERS, most=MAX_LAYERS)


def _windowed_kinds(fields: _Fields, count: int, model: str) -> list[str]:
    if not _sliding(fields):
        return ["full"] * count
    pattern = fields.get(
        "sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers"
    )
    if isinstance(pattern, str | list) and not pattern:
        raise fields.wrong("sliding_window_pattern", f"{pattern!r} is empty")
    if isinstance(pattern, str):
        return ["window" if pattern[i % len(pattern)] == "L" else "full" for i in range(count)]
    if isinstance(pattern, list):
        return ["window" if pattern[i % len(pattern)] else "full" for i in range(count)]
    if pattern is None:
        pattern = PATTERNS.get(model)
    if pattern is not None:
        if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 0:
            raise fields.wrong("sliding_window_pattern", f"{pattern!r} is not a number of layers")
        return _every(pattern, count, "window") if pattern else ["full"] * count
    if (
        fields.get("use_sliding_window")
        and (whole := fields.maybe("max_window_layers", least=0)) is not None
    ):
        return ["full" if index < whole else "window" for index in range(count)]
    return ["window"] * count


def _sliding(fields: _Fields) -> bool:
    return (
        fields.maybe("sliding_window", least=0) not in (None, 0)
        and fields.get("use_sliding_window") is not False
    )


def _every(interval: int, count: int, between: str) -> list[str]:
    return ["full" if (index + 1) % interval == 0 else between for index in range(count)]


def _named_kinds(fields: _Fields, name: str, types: Sequence[Any], count: int) -> list[str]:
    if len(types) != count:
        raise fields.wrong(name, f"{len(types)} entries for {count} layers")
    kinds = []
    for index, value in enumerate(types):
        kind = LAYER_NAMES.get(str(value).lower())
        if kind is None:
            raise fields.wrong(f"{name}[{index}]", f"unknown kind of layer {value!r}")
        kinds.append(kind)
    return kinds


def _is_no_attention(block: Any) -> bool:
    attention = block.get("attention") if isinstance(block, Mapping) else None
    return isinstance(attention, Mapping) and bool(
        attention.get("no_op") or attention.get("replace_with_linear")
    )


def _group_size(fields: _Fields, block: Any) -> int:
    attention = block.get("attention") if isinstance(block, Mapping) else None
    size = attention.get("n_heads_in_group") if isinstance(attention, Mapping) else None
    return fields.integer("block_configs: attention: n_heads_in_group", size)


def _window(fields: _Fields, kinds: Sequence[str]) -> int:
    if "chunk" in kinds:
        return fields.number("attention_chunk_size")
    return fields.number("sliding_window", "attention_window_size") if "window" in kinds else 0


# --- what a layer keeps ----------------------------------------------------------------------------


def _attention(fields: _Fields, kv_format: str, parallel: int, remarks: list[str]) -> Layer:
    if fields.get("kv_lora_rank") is not None:
        return _latent(fields, kv_format, parallel, remarks)
    heads = fields.number(*HEADS)
    dim = _head_dim(fields, heads)
    kv_heads = 1 if isinstance(fields.get("num_key_value_heads"), list) else _kv_heads(fields)
    value_dim = fields.maybe("v_head_dim") or dim
    return Layer("full", key_dim=dim, value_dim=value_dim, **_share(fields, kv_heads, parallel))


def _latent(fields: _Fields, kv_format: str, parallel: int, remarks: list[str]) -> Layer:
    latent = fields.number("kv_lora_rank")
    rope = fields.number("qk_rope_head_dim", least=0)
    more = 0
    if (index := fields.maybe("index_head_dim")) is not None:
        more = index + -(-index // 128) * SCALE_BYTES  # fp8 with a scale for each 128
        remarks.append(f"{more} B a token and layer are the keys of the sparse index")
    packed = PACKED_MLA.get(kv_format, 0) if (latent, rope) == (512, 64) else 0
    return Layer("full", 1, latent + rope, 0, more_bytes=more, fixed_bytes=packed, copies=parallel)


def _kv_heads(fields: _Fields) -> int:
    if fields.get("multi_query_attention") is False:
        return fields.number(*HEADS)
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        return 1
    nested = fields.get("attn_config")
    if isinstance(nested, Mapping) and isinstance(nested.get("kv_n_heads"), int):
        return int(nested["kv_n_heads"])
    blocks = fields.items("block_configs")
    if blocks is not None:
        sizes = {_group_size(fields, block) for block in blocks if not _is_no_attention(block)}
        if len(sizes) != 1:
            raise fields.wrong(
                "block_configs", "layers with different numbers of heads are not supported"
            )
        return fields.number(*HEADS) // sizes.pop()
    return fields.maybe(*KV_HEADS) or fields.number(*HEADS)


def _head_dim(fields: _Fields, heads: int) -> int:
    dim = fields.maybe(*HEAD_DIM, least=0)
    if dim:
        return dim
    hidden = fields.number(*HIDDEN)
    if hidden % heads:
        raise fields.wrong(
            HIDDEN[0], f"{hidden} cannot be divided over {heads} heads, and head_dim is missing"
        )
    return hidden // heads


class _Share(TypedDict):
    heads: int
    copies: int


def _share(fields: _Fields, heads: int, parallel: int) -> _Share:
    """Return the number of heads on one GPU. With fewer heads than GPUs, several GPUs store the same head."""
    if heads < 1 or max(heads, parallel) % min(heads, parallel):
        raise fields.wrong(KV_HEADS[0], f"{heads} cannot be divided over {parallel} GPUs")
    return {"heads": max(1, heads // parallel), "copies": max(1, parallel // heads)}


def _state_bytes(fields: _Fields, dtypes: tuple[str, str], parallel: int) -> int:
    """Return a recurrent layer's bytes per sequence: the last inputs of its convolution, its state."""
    conv, state = _state_values(fields, parallel)
    return (conv * STATE_BYTES[dtypes[0]] + state * STATE_BYTES[dtypes[1]]) // parallel


def _state_values(fields: _Fields, parallel: int) -> tuple[int, int]:
    if fields.get("linear_num_value_heads") is not None:  # gated delta net
        keys = fields.number("linear_num_key_heads") * fields.number("linear_key_head_dim")
        value_heads, value_dim = (
            fields.number("linear_num_value_heads"),
            fields.number("linear_value_head_dim"),
        )
        conv = (2 * keys + value_heads * value_dim) * (fields.number("linear_conv_kernel_dim") - 1)
        return conv, value_heads * value_dim * fields.number("linear_key_head_dim")
    if fields.get("conv_L_cache") is not None:  # only short convolutions
        dim = fields.maybe("conv_dim") or fields.number(*HIDDEN)
        return dim * (fields.number("conv_L_cache") - 1), 0
    kernel = fields.maybe("mamba_d_conv", "conv_kernel", "d_conv")
    if kernel is None:
        if fields.get("model_type") not in ("minimax", "minimax_text_01", "MiniMaxText01"):
            raise fields.wrong(
                "mamba_d_conv", "is missing; other recurrent layers are not supported"
            )
        heads = fields.number(*HEADS)  # lightning attention: a matrix for each head
        return 0, heads * _head_dim(fields, heads) ** 2
    size = fields.number("mamba_d_state", "ssm_state_size", "state_size")
    expand = fields.maybe("mamba_expand", "expand") or 2
    mamba2_heads = fields.maybe("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    if mamba2_heads is None and fields.get("model_type") == "mamba2":
        mamba2_heads = fields.number("num_heads")
    if mamba2_heads is None:  # the first Mamba
        alone = fields.get("model_type") in STATES_ALONE
        inner = (fields.maybe("intermediate_size") if alone else None) or expand * fields.number(
            *HIDDEN
        )
        return inner * (kernel - 1), inner * size
    inner = fields.maybe("mamba_d_ssm") or expand * fields.number(*HIDDEN)
    dim_names = ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    told = fields.get(*dim_names)
    dim = inner // mamba2_heads if told in (None, "auto") else fields.number(*dim_names)
    groups = fields.maybe("mamba_n_groups", "n_groups", "mamba_ngroups") or 1
    if groups % parallel:
        groups = parallel  # each GPU needs the groups of its heads
    conv = (mamba2_heads * dim + 2 * groups * size) * (kernel - 1)
    return conv, mamba2_heads * dim * size


# --- load or recompute -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """The time to compute a prompt: seconds = a * tokens + b * tokens * context."""

    token_s: float
    context_s: float = 0.0

    def seconds(self, tokens: int, before: int = 0) -> float:
        return tokens * (self.token_s + self.context_s * (before + tokens / 2))


def break_even_bandwidth(
    cache: Cache, prefill: PrefillCost, tokens: int, latency_s: float
) -> float | None:
    """Return the bytes per second from which loading these tokens is faster than computing them, or None."""
    spare = prefill.seconds(tokens) - latency_s
    return cache.prefix_bytes(tokens, whole=True) / spare if spare > 0 else None


def break_even_tokens(
    cache: Cache, prefill: PrefillCost, bandwidth: float, latency_s: float, most: int = 1 << 24
) -> int | None:
    """Return the shortest prompt whose load at this bandwidth is faster than computing it; None above
    `most`.

    The time saved by a load is convex in the tokens and not positive at zero, so the load stays faster from
    there on."""

    def wins(tokens: int) -> bool:
        load_s = latency_s + cache.prefix_bytes(tokens, whole=True) / bandwidth
        return load_s <= prefill.seconds(tokens)

    if not wins(most):
        return None
    low, high = 0, most  # slower at low, faster at high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high
