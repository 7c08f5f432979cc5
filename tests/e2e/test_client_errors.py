"""All errors of the client's public calls are KvtierErrors, for any arguments."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvtier
from kvtier import (
    Client,
    Group,
    InvalidArgument,
    Keys,
    KvSpec,
    KvtierError,
    Refused,
    Space,
    Unavailable,
    load_tokens,
)
from support.daemons import Daemon
from support.effort import effort
from support.specs import spec_of

TOKENS = list(range(64))
BAD: list[Any] = [
    None, -1, 0, 1 << 70, 1.5, float("nan"), float("inf"), True, "", "x", "\ud800", b"", b"x", bytes(32),
    [], [1], [None], [b"x"], ["x"], [[]], {}, {1: 2}, object(), print, memoryview(b"abc"), [-1], [1 << 70],
    Keys(b""), Keys(bytes(32)), range(3),
]  # fmt: skip
A_WEEK_S = 7 * 24 * 3600


class World:
    """A client with its space, leases and so on. It is created for every call, because a call may close
    it."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.client = daemon.connect()
        self.space = self.client.open(spec_of("errors"))
        self.keys = self.space.keys(TOKENS)
        self.arrays = [bytes(self.space.block_bytes)] * len(self.keys)
        self.space.save(self.keys, self.arrays)
        self.targets = [bytearray(self.space.block_bytes) for _ in self.keys]


def used(context: Any, use: Callable[[Any], Any] = lambda _: None) -> None:
    with context as entered:
        use(entered)


# Of parameters without a default, and those whose default has another effect.
VALID: dict[str, Callable[[World], Any]] = {
    "keys": lambda w: w.keys, "token_ids": lambda w: TOKENS, "hashes": lambda w: [bytes(32)],
    "arrays": lambda w: w.arrays, "targets": lambda w: w.targets, "chains": lambda w: [w.keys],
    "importance": lambda w: 0.5, "token_s": lambda w: 1e-3, "request": lambda w: 0,
    "group": lambda w: 0, "shard": lambda w: 0, "blocks": lambda w: 1, "slots": lambda w: 1,
    "token": lambda w: bytes(16), "spec": lambda w: w.space.spec, "tier": lambda w: "warm",
}  # fmt: skip
# What only kvtier itself calls, or has calls of its own below.
OTHERS = {"Client.connect", "Client.embedded", "Client.record", "Client.close", "Space.reopened"}
THEIRS = {"Space.used chosen", "Space.reserve waits"}  # parameters


def each_parameter(of: type) -> Iterator[tuple[str, Callable[[World, Any], Any]]]:
    """A call for each parameter of each public method, with valid values for the others."""
    for name, method in inspect.getmembers(of, inspect.isfunction):
        if name.startswith("_") or f"{of.__name__}.{name}" in OTHERS:
            continue
        needed = {
            one: value
            for one, value in list(inspect.signature(method).parameters.items())[1:]
            if value.default is value.empty
        }
        for parameter in list(inspect.signature(method).parameters)[1:]:

            def call(
                world: World, argument: Any, name: str = name, parameter: str = parameter,
                needed: dict[str, Any] = needed,
            ) -> None:  # fmt: skip
                given = {one: VALID[one](world) for one in needed} | {parameter: argument}
                found = getattr(world.client if of is Client else world.space, name)(**given)
                if hasattr(found, "__exit__"):
                    used(found)

            if (text := f"{of.__name__}.{name} {parameter}") not in THEIRS:
                yield text, call


# Each argument of each public call, with valid values for the others.
CALLS: dict[str, Callable[[World, Any], Any]] = {
    **dict(each_parameter(Client)),
    **dict(each_parameter(Space)),
    "connect socket": lambda w, x: Client.connect(x or "/nonexistent", populate=False).close(),
    **{
        f"connect {name}": lambda w, x, name=name: Client.connect(
            w.daemon.socket, populate=False, **{name: x}
        ).close()
        for name in ("timeout_s", "name", "read_only", "engine", "verify", "reconnect_s")
    },
    "record": lambda w, x: w.client.record(x, stop=x) if x not in (0, None) else None,
    "lease part": lambda w, x: w.space.lease(w.keys).part(x, x),
    "lease views": lambda w, x: (lease := w.space.lease(w.keys)).views(lease.part(0, 0), x),
    "commit": lambda w, x: used(w.space.reserve(w.keys), lambda saving: saving.commit(x)),
    "save checksum": lambda w, x: w.space.save(w.space.keys([7] * 64), w.arrays, checksum=x),
    **{
        f"load_tokens {name}": lambda w, x, name=name: load_tokens(
            **{"space": w.space, "keys": w.keys, "tokens": [1], "targets": bytearray(1 << 16)} | {name: x}
        )
        for name in inspect.signature(load_tokens).parameters
    },
    "keys then": lambda w, x: w.keys.then(x),
    "keys of": lambda w, x: Keys.of(x),
    "keys packed": lambda w, x: Keys(x),
    "keys parent": lambda w, x: Keys(b"", x),
    "spec model": lambda w, x: spec_of(x),
    **{
        f"spec {name}": lambda w, x, name=name: w.client.open(spec_of(**{name: x}))
        for name in ("layers", "kv_heads", "head_dim", "dtype", "block_tokens", "weights",
                     "tensor_parallel", "pipeline_parallel", "window_tokens", "strides", "rope")
    },
    "spec groups": lambda w, x: KvSpec.groups(
        x, model="m", dtype="int8", block_tokens=16, weights="w"
    ),
    "spec group layers": lambda w, x: KvSpec.groups(
        [Group(layers=x, opaque_bytes=x)], model="m", dtype="int8", block_tokens=16, weights="w"
    ),
    "spec latent": lambda w, x: KvSpec.mla(
        model="m", layers=2, latent_dim=x, rope_dim=x, dtype="int8", block_tokens=16, weights="w"
    ),
}  # fmt: skip


def called(world: World, name: str, argument: Any) -> None:
    """The call may succeed. If it fails, it raises a KvtierError."""
    try:
        CALLS[name](world, argument)
    except KvtierError:
        pass
    except Exception as error:
        raise AssertionError(
            f"{name} with {argument!r}: {type(error).__name__}: {error}"
        ) from error


@pytest.fixture(scope="module")
def world(shared_daemon: Daemon) -> Iterator[World]:
    made = World(shared_daemon)
    yield made
    made.client.close()


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_a_kvtier_error(world: World, name: str) -> None:
    for argument in BAD:
        called(world, name, argument)
    world.client.ping()  # the client still works
    world.client.poll()


@pytest.mark.parametrize(
    "given",
    [
        {"warm": None}, {"warm": b"x"}, {"warm": "x"}, {"warm": -1}, {"cold": "a\0b"}, {"cold": 1.5},
        {"cold_size": []}, {"cold_size": "1G"}, {"timeout_s": "x"},
    ],
)  # fmt: skip
def test_a_wrong_argument_of_an_embedded_daemon_starts_none(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument):
        Client.embedded(**{"cold": tmp_path} | given)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)  # fmt: skip
HARMLESS = sorted(name for name in CALLS if not name.startswith(("connect", "Client.wait_ready")))


@settings(
    max_examples=effort(40, 100, 100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(name=st.sampled_from(HARMLESS), argument=ANYTHING)
def test_any_argument_raises_at_most_a_kvtier_error(world: World, name: str, argument: Any) -> None:
    called(world, name, argument)
    world.client.ping()


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("connect")])
def test_a_client_that_was_closed_raises_kvtier_errors(shared_daemon: Daemon, name: str) -> None:
    world = World(shared_daemon)
    world.client.close()
    for argument in (world.keys, 1, "warm"):
        called(world, name, argument)


def test_every_call_after_the_daemon_is_gone_is_unavailable(
    daemon_of: Callable[..., Daemon],
) -> None:
    world = World(daemon_of())
    lease = world.space.lease(world.keys)
    world.daemon.process.kill()
    world.daemon.process.wait()
    for _ in range(2):
        for call in (
            world.client.ping, world.client.stats, world.client.poll, world.client.wait_ready,
            lambda: world.space.match(world.keys), lambda: world.space.save(world.keys, world.arrays),
            lambda: world.client.open(world.space.spec), lambda: world.client.adopt(lease.token),
        ):  # fmt: skip
            with pytest.raises(Unavailable):
                call()
    lease.release()
    lease.release()
    world.client.close()
    world.client.close()


def test_using_a_released_lease_raises_only_kvtier_errors(world: World) -> None:
    lease = world.space.lease(world.keys)
    part = lease.part(0, 0)
    lease.release()
    lease.release()
    with pytest.raises(Refused):
        world.client.adopt(lease.token)
    for argument in BAD:
        for call in (lambda x: lease.views(part, x), lambda x: lease.views(x, 1), lease.fresh):
            with contextlib.suppress(KvtierError):
                call(argument)


def test_a_bad_request_without_a_reply_fails_in_its_call(world: World) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with world.client.link.lock:
            held.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    try:
        with pytest.raises(kvtier.InvalidArgument):
            world.space.cancel("x")  # type: ignore[arg-type]
    finally:
        done.set()
        holder.join()
    world.client.ping()


def test_the_message_for_a_wrong_argument_names_it(world: World) -> None:
    space, keys = world.space, world.keys
    batch = memoryview(bytes(2 * 64 * 4)).cast("I", (2, 64))
    for named, call in {
        "tokens: has the wrong type": lambda: space.keys(None),  # type: ignore[arg-type]
        r"tokens: the shape \(2, 64\)": lambda: space.keys(batch),
        "salt: expected bytes, got str": lambda: space.keys(TOKENS, salt="user"),  # type: ignore[arg-type]
        "arrays: has the wrong type": lambda: space.save(keys, None),
        "targets: has the wrong type": lambda: space.load_into(keys, None),  # type: ignore[arg-type]
        "importance: 'high'": lambda: space.hint(keys, "high"),  # type: ignore[arg-type]
        "importance: 3": lambda: space.begin_hint(keys, 3),
        "deadline_ms: 'x'": lambda: space.lease(keys, "x"),  # type: ignore[arg-type]
        "deadline_ms: -5": lambda: used(space.load(keys, -5)),
        "ttl_s: 691200 s .* a week": lambda: space.save(keys, world.arrays, ttl_s=8 * 86400),
    }.items():
        with pytest.raises(kvtier.InvalidArgument, match=f"^[a-z ]*{named}") as raised:
            call()
        assert "\n" not in str(raised.value)
    row = memoryview(bytes(64 * 4)).cast("I", (1, 64))
    assert len(space.keys(row)) == len(keys)


def test_arrays_of_python_objects_are_refused(world: World) -> None:
    """Their memory is references: a load into it would end the interpreter."""
    shape = (len(world.keys), world.space.block_bytes // 8)
    objects, others = np.zeros(shape, object), world.space.keys(TOKENS, salt=b"objects")
    for call in (
        lambda: world.space.save(others, objects),
        lambda: world.space.save(others, list(objects)),
        lambda: world.space.save(others, [memoryview(row) for row in objects]),
        lambda: world.space.load_into(world.keys, objects),
    ):
        with pytest.raises(kvtier.InvalidArgument, match="Python objects, not numbers"):
            call()
    assert world.space.match(others).ready == 0
    assert (objects == 0).all()


def test_numbers_may_be_those_of_numpy(world: World) -> None:
    count = len(world.keys)
    assert world.space.pin(world.keys, ttl_s=np.float32(5)) == count  # type: ignore[arg-type]
    world.space.unpin(world.keys)
    with world.space.load(world.keys, deadline_ms=np.int64(500)) as blocks:  # type: ignore[arg-type]
        assert len(blocks) == count
    world.space.hint(world.keys, np.float64(0.5))
    for wrong in (np.float32("nan"), np.float64(1e9), np.array([5.0]), np.bool_(True), True):
        with pytest.raises(kvtier.InvalidArgument, match="ttl_s"):
            world.space.pin(world.keys, ttl_s=wrong)
    for wrong in (np.float64(5), np.array([5]), np.bool_(True), True):
        with pytest.raises(kvtier.InvalidArgument, match="deadline_ms"):
            world.space.lease(world.keys, wrong)


def test_an_empty_path_is_not_the_default_socket() -> None:
    with pytest.raises(kvtier.InvalidArgument, match="socket: is empty"):
        kvtier.Client.connect("")


def test_a_pin_lasts_a_week_at_most(world: World) -> None:
    assert world.space.pin(world.keys, ttl_s=A_WEEK_S) == len(world.keys)
    with pytest.raises(kvtier.InvalidArgument, match=r"864000 s.*a week"):
        world.space.pin(world.keys, ttl_s=864000)
    world.space.unpin(world.keys)


def test_a_space_has_the_block_sizes_of_its_spec(world: World) -> None:
    spec = world.space.spec
    assert world.space.block_bytes == spec.block_bytes
    assert world.space.group_block_bytes(0) == spec.group_block_bytes(0)
