"""The leases that a client takes again after the daemon's end."""

from __future__ import annotations

from typing import Any

from kvtier.link import LIMIT_DEFERRED, KeptLeases


class Held:
    """A lease, as far as they are concerned."""


def test_a_lease_that_was_deleted_without_a_release_does_not_stay() -> None:
    kept = KeptLeases()
    lease: Any = Held()
    kept.keep(lease)
    for number in range(3 * LIMIT_DEFERRED):
        deleted: Any = Held()
        kept.keep(deleted)
        kept[-number] = kept.pop(id(deleted))  # as if it had other memory than the next one
        del deleted
    assert len(kept) <= LIMIT_DEFERRED + 2
    living = [one() for one in kept.values() if one() is not None]
    assert living == [lease]
    kept.pop(id(lease), None)
    assert all(one() is None for one in kept.values())
