"""A record of the index has the table, key and value that were stored, or it is dropped."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from kvtier.frame import ECSQ, RAW
from kvtier.layout import KvSpec, space_id
from kvtier_daemon.codec.losses import Losses
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.cold.index import Index, seal, split, unseal
from support.specs import spec_of

SPEC = spec_of("records")


def test_every_flipped_bit_of_a_record_is_noticed() -> None:
    table, key, value = b"spaces", b"t\0key", b"a description"
    text = seal(table, key, value)
    assert unseal(table, key, text) == value
    for bit in range(8 * len(text)):
        wrong = bytearray(text)
        wrong[bit // 8] ^= 1 << bit % 8
        assert unseal(table, key, bytes(wrong)) is None
    for short in range(len(text)):
        assert unseal(table, key, text[:short]) is None
    assert unseal(b"segments", key, text) is None and unseal(table, b"t\0kez", text) is None
    # The same bytes, split differently into table, key and value.
    assert unseal(table, key + b"a", seal(table, key, b"a description")[1:]) is None
    assert split(table, [(key, text), (b"other", text)]) == ([(key, value)], [b"other"])


def test_a_damaged_record_is_dropped_and_counted_and_the_others_stay(tmp_path: Path) -> None:
    with closing(Index(tmp_path, 64 << 20)) as index:
        for name in (b"a", b"b", b"c"):
            index.put(b"spaces", name, b"value of " + name)
    data = tmp_path / "data.mdb"
    data.write_bytes(data.read_bytes().replace(b"value of b", b"value of x"))
    with closing(Index(tmp_path, 64 << 20)) as index:
        assert [key for key, _ in index.entries(b"spaces")] == [b"a", b"c"]
        assert index.damaged == 1
    with closing(Index(tmp_path, 64 << 20)) as index:
        assert len(index.entries(b"spaces")) == 2 and not index.damaged


def test_a_description_is_accepted_only_for_its_own_identity() -> None:
    tenant = Tenant("t", b"", 0, None, losses=Losses())  # type: ignore[arg-type]
    wrong = spec_of("records", layers=9)
    for loss in ("", "q8"):
        assert tenant.accepts(space_id(SPEC, "t", loss), SPEC, {RAW})
        assert not tenant.accepts(space_id(SPEC, "t", loss), wrong, {RAW})
    assert not tenant.accepts(space_id(SPEC, "other"), SPEC, {RAW})
    # The name of a profile that is not installed is part of the identity, so this description
    # cannot be verified.
    assert tenant.accepts(space_id(SPEC, "t", "ecsq-lo:00"), SPEC, {RAW, ECSQ})
    senseless = KvSpec(model="m", weights="w", dtype="none", block_tokens=0, cache_groups=())
    assert not tenant.accepts(space_id(senseless, "t"), senseless, {ECSQ})
