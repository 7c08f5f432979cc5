"""Requests of valid types with any values, by several clients of one engine, which end at any point: the
daemon answers or refuses each, and nothing is left of the clients."""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest

from kvtier import wire
from kvtier.layout import KvSpec
from support.daemons import Daemon
from support.effort import effort
from support.raw import Raw
from support.specs import spec_of

REQUESTS = effort(1500, 6000, 40_000)
CLIENTS = 4
NEVER = (
    wire.Hello,
    wire.Bye,
    wire.Watch,
    wire.Monitor,
)  # a second greeting, and streams of messages
OFTEN = (wire.Open, wire.Reserve, wire.Reserve, wire.Commit, wire.Load, wire.Release, wire.HotJoin)
EDGES = (0, 1, 2, 3, 64, 4096, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, -1, -(1 << 63))
TEXTS = (
    "",
    "x",
    "on",
    "off",
    "drain",
    "status",
    "warm",
    "cold",
    "reload",
    "e" * 300,
    "\0",
    "../../x",
)
KEYS = [bytes([number]) * 32 for number in range(24)]


class Values:
    """Values for the fields of requests; numbers that the daemon gave this client are frequent."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.spaces, self.leases, self.slots = [0, 9], [0, 9], [bytes(wire.SLOT_BYTES)]

    def learn(self, reply: wire.Reply) -> None:
        if isinstance(reply, wire.Opened):
            self.spaces.append(reply.space)
        if isinstance(reply, wire.Loaded | wire.Reserved | wire.DirectReadGranted):
            self.leases.append(reply.lease)
        if isinstance(reply, wire.Reserved) and reply.slots:
            self.slots.append(reply.slots)

    def request(self, kind: type[Any], number: int) -> wire.Message:
        hints = get_type_hints(kind, include_extras=True)
        fields = {name: self.value(kind, name) for kind, name in _fields(hints)}
        request: wire.Message = kind(**fields | {"id": number})
        return request

    def value(self, kind: Any, name: str) -> Any:
        pick, origin = self._chance.choice, get_origin(kind)
        if origin is Annotated:
            return self.value(get_args(kind)[0], name)
        if origin is list:
            return [self.value(get_args(kind)[0], name) for _ in range(pick((0, 0, 1, 2, 5)))]
        if origin in (Union, UnionType):
            return self.value(pick(get_args(kind)), name)
        if kind is int:
            return pick(self._numbers(name))
        if kind is bytes:
            return self._bytes(name)
        if kind is float:
            return pick((0.0, 0.5, 1.0, -1.0, 1e300, float("inf"), float("nan")))
        if kind is KvSpec:
            return spec_of(pick(("one", "two")))
        return {bool: pick((True, False)), str: pick(TEXTS), type(None): None}[kind]

    def _numbers(self, name: str) -> tuple[int, ...]:
        usual: tuple[int, ...] = {
            "space": (*self.spaces[-2:],) * 4,
            "lease": (*self.leases[-3:],) * 4,
            "group": (0,) * 40, "shard": (0,) * 40, "shards": (0,) * 40, "first": (0,) * 20,
            "count": (1,) * 20, "deadline_ms": (1, 50, 60_000) * 8, "ttl_ms": (0,) * 40,
        }.get(name, ())  # fmt: skip
        return usual + EDGES

    def _bytes(self, name: str) -> bytes:
        pick = self._chance.choice
        if name in ("keys", "entered", "left"):
            first, count = self._chance.randrange(len(KEYS)), pick((0, 1, 2, 4, 8))
            return b"".join(KEYS[first : first + count]) + pick((b"",) * 20 + (b"x",))
        if name == "parent":
            return pick((b"", b"", pick(KEYS)))
        if name == "slots":
            return pick(self.slots)
        return bytes(pick((0, 0, 1, 16, 32)))


def _fields(hints: dict[str, Any]) -> list[tuple[Any, str]]:
    return [(kind, name) for name, kind in hints.items() if name.isidentifier() and name[0] != "_"]


def joined(daemon: Daemon, chance: random.Random) -> tuple[Raw, Values]:
    raw = Raw(daemon, hello=False)
    flags = {name: chance.random() < 0.3 for name in ("verify", "device")}
    raw.send(wire.Hello(1, wire.SCHEMA, "typed", engine=chance.choice("ef"), **flags))
    assert isinstance(raw.answer(), wire.Welcome)
    return raw, Values(chance)


def storm(daemon: Daemon, chance: random.Random) -> None:
    clients = [joined(daemon, chance) for _ in range(CLIENTS)]
    kinds = [kind for kind in get_args(wire.Request) if kind not in NEVER]
    for number in range(2, REQUESTS):
        at = chance.randrange(CLIENTS)
        raw, values = clients[at]
        request = values.request(chance.choice(OFTEN if chance.random() < 0.4 else kinds), number)
        raw.send(request, wire.Ping(REQUESTS + number))
        while (reply := raw.answer()) != wire.Done(REQUESTS + number):
            assert reply is not None
            values.learn(reply)
            if isinstance(reply, wire.Failed) and reply.fatal:
                break
        if reply != wire.Done(REQUESTS + number) or chance.random() < 0.01:
            raw.sock.close()
            clients[at] = joined(daemon, chance)
    for raw, _ in clients:
        raw.sock.close()


@pytest.mark.parametrize("seed", range(effort(1, 2, 8)))
def test_any_values_of_valid_types_are_answered_and_leave_nothing(
    daemon_of: Callable[..., Daemon], tmp_path: Path, seed: int
) -> None:
    (tmp_path / "disk").mkdir()
    config = f'[cold]\ndirectories = ["{tmp_path}/disk"]\nsize = "96MiB"\nsegment = "1MiB"\n'
    daemon = daemon_of(warm="4MiB", config=config)
    said = tmp_path / "said"
    child = os.fork()  # slots that it was granted are freed when it ends
    if child == 0:
        try:
            storm(daemon, random.Random(seed))
        except BaseException:  # noqa: BLE001
            said.write_text(traceback.format_exc())
        os._exit(said.exists())
    assert os.waitpid(child, 0)[1] == 0, said.read_text()
    daemon.wait_for(lambda stats: stats["sessions"] == 0)
    daemon.wait_for(lambda stats: not stats["tiers"]["warm"]["states"]["quarantined"])
    states = daemon.stats()["tiers"]["warm"]["states"]
    assert states["writing"] == 0, states
    log = daemon.log.read_text()
    assert "Traceback" not in log and "internal error" not in log, log[-4000:]
