"""Options of a server, under "kvtier" in `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

FLAG = "--hicache-storage-backend-extra-config"
PARAMETER = "kvtier"


class StorageOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`socket`: as for `kvtier.Client`. `patience_ms`: the longest time that a load waits for
    pages from disk. `copy_threads`: of a load of 32 MiB or more. `weights`: a name of the weights, if kvtier
    cannot identify them. `verify`: compare loaded pages with the checksums of
    their saves."""

    socket: str | None = None
    patience_ms: int = 1000
    copy_threads: int = 2
    weights: str = ""
    verify: bool = False


def read_options(extra: Mapping[str, Any]) -> StorageOptions:
    """Parse the options of a server. ValueError: one line that says what to write."""
    if not extra.get("interface_v1"):
        raise ValueError(
            f'{FLAG}: kvtier copies pages without a detour only: add "interface_v1": 1'
        )
    try:
        options = msgspec.convert(extra.get(PARAMETER, {}), StorageOptions)
    except msgspec.ValidationError as error:
        names = ", ".join(StorageOptions.__struct_fields__)
        raise ValueError(f"{FLAG}: {PARAMETER}: {error}; known options: {names}") from error
    if min(options.patience_ms, options.copy_threads) < 1:
        raise ValueError(f"{FLAG}: {PARAMETER}: patience_ms and copy_threads must be at least 1")
    return options
