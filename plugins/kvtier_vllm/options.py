"""What a user may write into `kv_connector_extra_config`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

import msgspec

from kvtier.units import parse_bytes
from kvtier.wire import LIMIT_SOCKET_PATH


class Unsupported(ValueError):  # noqa: N818
    """This engine's cache can't be kept: it works without, and is told so once."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`socket`: as for `kvtier.Client`. `load`: between steps, within the step that needs it, or whichever is
    expected to be faster. `patience_ms`: how long a request waits for an answer, or for blocks that are
    coming. `saving`: how many bytes may wait to be copied. `weights` names what can't be found by
    itself. `gpu_copies`: in which way, where the cache is on a GPU; `auto` measures. `timeline`: a file
    for what happened to each hit."""

    socket: str | None = None
    load: Literal["auto", "async", "sync"] = "auto"
    save: bool = True
    save_decode: bool = True
    patience_ms: int = 1000
    lease_ms: int = 60_000
    saving: str | int = "256MiB"
    copy_threads: int = 2
    weights: str = ""
    gpu_copies: Literal["auto", "batch", "kernel"] = "auto"
    timeline: str = ""

    @property
    def saving_bytes(self) -> int:
        return parse_bytes(self.saving)


SHALL = {
    "socket": 'a path, such as "/run/kvtier/kvtier.sock"',
    "load": '"auto", "async" or "sync"',
    "save": "true or false",
    "save_decode": "true or false",
    "patience_ms": "milliseconds, such as 1000",
    "lease_ms": "milliseconds, such as 60000",
    "saving": 'bytes, such as "256MiB"',
    "copy_threads": "a number of threads, such as 2",
    "timeline": 'a file, such as "/tmp/hits.json"',
    "weights": 'a name for them, such as "llama-3.1-8b at step 9000"',
    "gpu_copies": '"auto", "batch" or "kernel"',
}


def read_options(extra: Mapping[str, Any]) -> Options:
    """The options as they were written; ValueError in one line that says what to write."""
    names = Options.__struct_fields__
    for name in extra:
        if name not in names:
            near = get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            raise ValueError(f"kv_connector_extra_config: kvtier has no option {name!r}: {hint}")
    for name, value in extra.items():
        try:
            one = msgspec.convert({name: value}, Options)
            if min(one.patience_ms, one.lease_ms, one.copy_threads, one.saving_bytes) < 1:
                raise ValueError
        except ValueError as error:
            text = f"kv_connector_extra_config: {name} is {value!r}: write {SHALL[name]}"
            raise ValueError(text) from error
    options = msgspec.convert(dict(extra), Options)
    nbytes = len(os.fsencode(options.socket or ""))
    if nbytes > LIMIT_SOCKET_PATH:
        raise ValueError(
            f"kv_connector_extra_config: socket is {options.socket!r}, {nbytes} bytes:"
            f" write a path of at most {LIMIT_SOCKET_PATH}"
        )
    return options
