"""Options: of an engine, in `kv_connector_extra_config`, and of a request, such as
`"kv_transfer_params": {"kvtier": {"load": false, "pin": 600, "ttl": 3600}}`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from reprlib import repr as short
from typing import Any, Literal

import msgspec

from kvtier.units import parse_bytes
from kvtier.wire import LIMIT_SOCKET_PATH

log = logging.getLogger("vllm.kvtier")

PARAMETER = "kvtier"
NAMES = ("load", "save", "pin", "warm", "ttl", "priority", "await")
# Of a response, which a router may pass on to the engine that decodes.
RESULTS = ("warm_tokens", "cold_tokens", "pinned_blocks", "memory_blocks", "coming_blocks")
HINT_VERSION = "1"  # of actions in a request's KV hints
LIMIT_PIN_S = LIMIT_TTL_S = 7 * 24 * 3600.0
LEAST_TTL_S = 0.001
LOGGED = 4  # unknown options of a request


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`socket`: as for `kvtier.Client`. `load`: between steps (async), within the step that needs the blocks
    (sync), or whichever is expected to be faster (auto). `patience_ms`: the longest time that a request waits
    for an answer and for blocks from disk. `saving`: how many bytes may wait to be copied. `weights`: a name
    of the weights, if kvtier cannot identify them. `gpu_copies`: the method for a cache on a GPU; `auto`
    measures both. `timeline`: a file for the time line of each hit. `verify`: compare loaded blocks with the
    checksums of their saves. `residency`: tell the daemon which blocks the engine holds in its own cache.
    `layerwise`: on a GPU, the least bytes of a part of a load within a step, whose layers do not wait for the
    rest. `gpu_direct`: on a GPU, ranks read blocks on disk themselves; `auto`: only if the disk is proven to
    write to the GPU's memory. `compute_last`: the last tokens of a prompt are computed, not loaded."""

    socket: str | None = None
    load: Literal["auto", "async", "sync"] = "auto"
    save: bool | Literal["lazy"] = True
    save_decode: bool = True
    patience_ms: int = 1000
    lease_ms: int = 60_000
    saving: str | int = "256MiB"
    copy_threads: int = 2
    weights: str = ""
    gpu_copies: Literal["auto", "batch", "kernel"] = "auto"
    timeline: str = ""
    verify: bool = False
    residency: bool = False
    layerwise: str | int = "16MiB"
    gpu_direct: Literal["off", "auto", "on"] = "off"
    compute_last: int = 0

    @property
    def saving_bytes(self) -> int:
        return parse_bytes(self.saving)

    @property
    def layerwise_bytes(self) -> int:
        """0: never."""
        return parse_bytes(self.layerwise) if self.layerwise not in ("off", 0) else 0


EXPECTED = {
    "socket": 'a path, such as "/run/kvtier/kvtier.sock"',
    "load": '"auto", "async" or "sync"',
    "save": 'true, false or "lazy"',
    "save_decode": "true or false",
    "patience_ms": "milliseconds, such as 1000",
    "lease_ms": "milliseconds, such as 60000",
    "saving": 'bytes, such as "256MiB"',
    "copy_threads": "a number of threads, such as 2",
    "timeline": 'a file, such as "/tmp/hits.json"',
    "verify": "true or false",
    "residency": "true or false",
    "weights": 'a name of the weights, such as "llama-3.1-8b at step 9000"',
    "gpu_copies": '"auto", "batch" or "kernel"',
    "layerwise": 'bytes, such as "16MiB", or "off"',
    "gpu_direct": '"off", "auto" or "on"',
    "compute_last": "a number of tokens, such as 128",
}


def read_options(extra: Mapping[str, Any]) -> Options:
    """Parse the options of an engine. ValueError: one line that says what to write."""
    names = Options.__struct_fields__
    for name in extra:
        if name not in names:
            similar = get_close_matches(name, names, 1)
            hint = (
                f"did you mean {similar[0]!r}?"
                if similar
                else (f"known options: {', '.join(names)}")
            )
            raise ValueError(f"kv_connector_extra_config: kvtier has no option {name!r}: {hint}")
    for name, value in extra.items():
        try:
            one = msgspec.convert({name: value}, Options)
            least = min(one.patience_ms, one.lease_ms, one.copy_threads, one.saving_bytes)
            if least < 1 or min(one.layerwise_bytes, one.compute_last) < 0:
                raise ValueError
        except ValueError as error:
            text = f"kv_connector_extra_config: {name} is {value!r}: expected {EXPECTED[name]}"
            raise ValueError(text) from error
    options = msgspec.convert(dict(extra), Options)
    nbytes = len(os.fsencode(options.socket or ""))
    if nbytes > LIMIT_SOCKET_PATH:
        raise ValueError(
            f"kv_connector_extra_config: socket is {options.socket!r}, {nbytes} bytes: "
            f"expected a path of at most {LIMIT_SOCKET_PATH} bytes"
        )
    return options


@dataclass(slots=True, frozen=True)
class RequestOptions:
    """`pin_s`: how long the prompt is pinned, 0: not at all. `ttl_s`: how long the request's saved blocks
    can be found; None: no limit. `priority`: the importance of the prompt to eviction, from 0 (evicted
    first) to 1. `warm`: read the prompt's blocks from disk, even if this request does not load them.
    `awaits`: wait for blocks that another engine is saving. `given`: the request has options, so its
    response contains the outcome."""

    load: bool = True
    save: bool = True
    pin_s: float = 0.0
    ttl_s: float | None = None
    priority: float | None = None
    warm: bool = False
    awaits: bool = False
    given: bool = field(default=False, compare=False)

    @property
    def has_pin_requests(self) -> bool:
        """Whether the request asks for a pin, a priority or a prefetch."""
        return self.pin_s > 0 or self.priority is not None or self.warm


def read_request_options(parameters: Any, hints: Any = None) -> RequestOptions:
    """Parse the options of a request: those of its parameters, and of actions for kvtier in its KV hints,
    which an orchestrator sets. Invalid ones are logged and ignored, except that a request with an
    invalid TTL saves nothing. Never raises: a user sent them."""
    given = parameters.get(PARAMETER) if isinstance(parameters, dict) else None
    hinted = _hinted(hints)
    if hinted and (given is None or isinstance(given, dict)):
        given = hinted | (given or {})
    if given is None:
        return RequestOptions()
    if not isinstance(given, dict):
        log.warning(
            "kvtier: kv_transfer_params: ignoring %s under %r: not an object",
            short(given),
            PARAMETER,
        )
        return RequestOptions()
    unknown = sorted(given.keys() - NAMES - set(RESULTS), key=str)
    if unknown:
        log.warning(
            "kvtier: kv_transfer_params: ignoring unknown %s; known are %s",
            ", ".join(map(short, unknown[:LOGGED])) + ", ..." * (len(unknown) > LOGGED),
            ", ".join(NAMES),
        )  # fmt: skip
    pin_s = _number(given, "pin", sys.float_info.max, "expected seconds")
    priority = _number(given, "priority", 1.0, "expected a number from 0 to 1")
    ttl_s = _number(given, "ttl", sys.float_info.max, "expected seconds")
    save = _flag(given, "save")
    if "ttl" in given:
        save = save and ttl_s is not None and ttl_s >= LEAST_TTL_S
        ttl_s = min(ttl_s, LIMIT_TTL_S) if save and ttl_s is not None else None
    return RequestOptions(
        _flag(given, "load"), save, min(pin_s or 0.0, LIMIT_PIN_S), ttl_s, priority,
        _flag(given, "warm", False), _flag(given, "await", False), True,
    )  # fmt: skip


def _hinted(hints: Any) -> dict[str, Any]:
    """The options in the actions of a KvHintsEnvelope whose type is "kvtier". Later ones win."""
    found: dict[str, Any] = {}
    for action in getattr(hints, "actions", None) or ():
        if action.action_type != PARAMETER:
            continue
        if action.action_version != HINT_VERSION:
            log.warning(
                "kvtier: KV hints: ignoring an action of version %s; known is %s",
                short(action.action_version), HINT_VERSION,
            )  # fmt: skip
        elif isinstance(action.payload, dict):
            found |= action.payload
    return found


def _number(given: dict[str, Any], name: str, most: float, expected: str) -> float | None:
    if name not in given:
        return None
    value = given[name]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= most:
        return float(value)
    log.warning("kvtier: kv_transfer_params: ignoring %r: %s: %s", name, short(value), expected)
    return None


def _flag(given: dict[str, Any], name: str, default: bool = True) -> bool:
    value = given.get(name, default)
    if isinstance(value, int):
        return bool(value)
    log.warning(
        "kvtier: kv_transfer_params: ignoring %r: %s: expected true or false", name, short(value)
    )
    return default
