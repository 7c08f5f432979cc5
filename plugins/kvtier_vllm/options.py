"""What a user may write into `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

import msgspec

from kvtier.units import parse_bytes


class Unsupported(ValueError):  # noqa: N818
    """This engine's cache can't be kept: it works without, and is told so once."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`socket`: as for `kvtier.Client`. `load`: between steps, within the step that needs it, or whichever is
    expected to be faster. `patience_ms`: how long a request waits for an answer, or for blocks that are
    coming. `saving`: how many bytes may wait to be copied. `weights` names what can't be found by itself."""

    socket: str | None = None
    load: Literal["auto", "async", "sync"] = "auto"
    save: bool = True
    save_decode: bool = True
    patience_ms: int = 1000
    lease_ms: int = 60_000
    saving: str | int = "256MiB"
    copy_threads: int = 2
    weights: str = ""

    @property
    def saving_bytes(self) -> int:
        return parse_bytes(self.saving)


def read_options(extra: Mapping[str, Any]) -> Options:
    """The options as they were written; ValueError in one line that says what to write."""
    names = Options.__struct_fields__
    for name in extra:
        if name not in names:
            near = get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            raise ValueError(f"kv_connector_extra_config: kvtier has no option {name!r}: {hint}")
    try:
        options = msgspec.convert(dict(extra), Options)
        parse_bytes(options.saving)
    except ValueError as error:
        raise ValueError(f"kv_connector_extra_config: {error}") from error
    for name in ("patience_ms", "lease_ms", "copy_threads"):
        if getattr(options, name) < 1:
            raise ValueError(f"kv_connector_extra_config: {name}: at least 1")
    return options
