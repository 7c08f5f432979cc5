"""The use of found blocks: the daemon counts the tokens that clients report as used, not those that
they lease."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier import Client, Refused, wire
from kvtier.space import Space
from support.daemons import Daemon
from support.specs import spec_of

BLOCKS = 8


@pytest.fixture
def space(shared_daemon: Daemon, request: pytest.FixtureRequest) -> Any:
    with shared_daemon.connect() as client:
        space = client.open(spec_of(request.node.name, layers=1, kv_heads=1, head_dim=64))
        keys = space.keys(list(range(BLOCKS * space.spec.block_tokens)))
        space.save(keys, bytes(BLOCKS * space.block_bytes))
        yield client, space, keys


def used(client: Client) -> tuple[int, int]:
    """Tokens and bytes since the start."""
    client.ping()  # after all messages that need no reply
    stats = client.stats()
    assert stats["tenants"]["default"]["used_tokens"] == sum(stats["used_tokens"].values())
    return stats["used_tokens"]["warm"], stats["bytes"]["loaded"]


def grown(client: Client, before: tuple[int, int], space: Space) -> tuple[float, float]:
    """The increase in blocks."""
    tokens, nbytes = (now - was for now, was in zip(used(client), before, strict=True))
    return tokens / space.spec.block_tokens, nbytes / space.block_bytes


def test_found_blocks_that_are_not_read_are_not_used(space: Any) -> None:
    client, space, keys = space
    before = used(client)
    space.match(keys)
    space.lease(keys).release()
    with pytest.raises(ZeroDivisionError), space.load(keys):
        1 / 0  # noqa: B018
    assert grown(client, before, space) == (0, 0)
    found = client.explain()["lookups"]
    assert found[0]["ready"] == BLOCKS and not any(one["used"] for one in found[:2])


def test_read_blocks_are_used(space: Any) -> None:
    client, space, keys = space
    before = used(client)
    with space.load(keys):
        pass
    assert grown(client, before, space) == (BLOCKS, BLOCKS)
    assert client.explain()["lookups"][0]["used"] == BLOCKS
    target = bytearray(3 * space.block_bytes)
    assert space.load_into(keys[:3], target) == 3
    assert grown(client, before, space) == (BLOCKS + 3, BLOCKS + 3)
    lease = space.lease(keys, 60_000)
    lease.release(space.spec.block_tokens, space.block_bytes)
    assert grown(client, before, space) == (BLOCKS + 4, BLOCKS + 4)
    assert client.explain()["lookups"][0]["used"] == 1
    request = wire.Spaces(client.link.new_id())
    told = client.link.ask(request, wire.Report).stats
    (one,) = [
        one for one in wire.msgspec.msgpack.decode(told["spaces"]) if one["space"] == space.index
    ]
    assert one["used_tokens"] == (BLOCKS + 4) * space.spec.block_tokens


def test_two_holders_of_a_lease_each_report_their_use(space: Any, shared_daemon: Daemon) -> None:
    client, space, keys = space
    before = used(client)
    lease = space.lease(keys, 60_000)
    with shared_daemon.connect() as other:
        other.adopt(lease.token).release(0, space.block_bytes)
        other.ping()
    lease.release(space.spec.block_tokens, space.block_bytes)
    assert grown(client, before, space) == (1, 2)


@pytest.mark.parametrize("told", [(-1, 0, 1), (0, 0, -1), (1, wire.LIMIT_USED + 1, 1)])
def test_an_impossible_use_is_refused(space: Any, told: tuple[int, int, int]) -> None:
    client, space, keys = space
    lease = space.lease(keys, 60_000)
    before = used(client)
    with pytest.raises(Refused, match="used amounts are"):
        client.link.ask(wire.Release(client.link.new_id(), lease._id, *told), wire.Done)
    assert used(client) == before
    lease.release()
