"""A codec is one class and one row: this file adds one, and a cold tier stores blocks with it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from daemon.tiers.test_encoded import Tenant
from kvtier.frame import RAW, Entry
from kvtier_daemon.codec import base
from kvtier_daemon.codec.table import BY_NAME, BY_NUMBER
from support.cold_bench import run

NUMBER = 77


class Deflate(base.Codec):
    """Lossless: each part by zlib."""

    name, number, native = "deflate", NUMBER, False

    def encode(
        self,
        block: Any,
        parts: Sequence[Entry],
        dtype: str,
        into: Any,
    ) -> tuple[Entry, ...]:
        whole, target = memoryview(block).cast("B"), memoryview(into).cast("B")
        found, start, at = [], 0, 0
        for part in parts:
            raw = whole[start : start + part.raw_bytes]
            start += part.raw_bytes
            text = zlib.compress(raw, 1)
            kept = text if len(text) < len(raw) else raw
            target[at : at + len(kept)] = kept
            at += len(kept)
            found.append((self.number if kept is text else RAW, len(kept)))
        return base.placed(parts, found)

    def decode(self, payload: Any, entries: Sequence[Entry], dtype: str, into: Any) -> None:
        base.expect(entries, self.number)
        source, target, at = memoryview(payload).cast("B"), memoryview(into).cast("B"), 0
        for entry in entries:
            text = source[entry.offset : entry.offset + entry.nbytes]
            try:
                raw = text if entry.codec == RAW else zlib.decompress(text)
                target[at : at + entry.raw_bytes] = raw
            except (zlib.error, ValueError) as error:
                raise base.damaged(entry, self.name) from error
            at += entry.raw_bytes


def test_blocks_are_stored_by_it_and_found_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec: base.Codec = Deflate()
    monkeypatch.setitem(BY_NAME, codec.name, codec)
    monkeypatch.setitem(BY_NUMBER, codec.number, codec)

    async def work() -> None:
        tenant = Tenant(tmp_path, codec.name)
        await tenant.start()
        tenant.save("bfloat16", 0, 16)
        await tenant.on_disk(16)
        assert {one[3] for one in tenant.frames(b"".join(tenant.ids.values()))} == {NUMBER}
        await tenant.same("bfloat16", 0, 16)
        await tenant.close()
        again = Tenant(tmp_path, "raw")
        await again.start()
        assert again.catalog.counts()["framed_blocks"] == 16
        await again.same("bfloat16", 0, 16)
        await again.close()

    run(work())
