"""Options of a server: of the storage backend under "kvtier" in `--hicache-storage-backend-extra-config`, of
the linker as "linker_extra_config" in `--unified-cache-external-linker-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

FLAG = "--hicache-storage-backend-extra-config"
LINKER_FLAG = "--unified-cache-external-linker-config"
PARAMETER, LINKER_PARAMETER = "kvtier", "linker_extra_config"


class StorageOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`socket`: as for `kvtier.Client`. `patience_ms`: the longest wait of a load for pages on disk.
    `copy_threads`: of a load of 8 MiB or more. `weights`: a name of the weights, if kvtier cannot identify
    them. `verify`: compare loaded pages with the checksums of their saves."""

    socket: str | None = None
    patience_ms: int = 1000
    copy_threads: int = 2
    weights: str = ""
    verify: bool = False


class LinkerOptions(StorageOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As for the storage backend, but the scheduler of the server waits for the patience."""

    patience_ms: int = 100


Options = TypeVar("Options", bound=StorageOptions)


def read_options(extra: Mapping[str, Any]) -> StorageOptions:
    """Parse the options of a storage backend. ValueError: one line that says what to write."""
    if not extra.get("interface_v1"):
        raise ValueError(
            f'{FLAG}: kvtier copies pages without a detour only: add "interface_v1": 1'
        )
    return _read(extra.get(PARAMETER, {}), StorageOptions, f"{FLAG}: {PARAMETER}")


def read_linker_options(extra: Mapping[str, Any]) -> LinkerOptions:
    """Parse the options of a linker. ValueError: one line that says what to write."""
    return _read(extra, LinkerOptions, f"{LINKER_FLAG}: {LINKER_PARAMETER}")


def _read(given: Any, kind: type[Options], where: str) -> Options:
    try:
        options = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        names = ", ".join(kind.__struct_fields__)
        raise ValueError(f"{where}: {error}; known options: {names}") from error
    if min(options.patience_ms, options.copy_threads) < 1:
        raise ValueError(f"{where}: patience_ms and copy_threads must be at least 1")
    return options
