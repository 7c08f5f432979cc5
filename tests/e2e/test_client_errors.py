"""All errors of the client's public calls are KvtierErrors, for any arguments."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvtier
from kvtier import Client, Group, Keys, KvSpec, KvtierError, Refused, Unavailable
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
        self.client = daemon.connect(timeout_s=60)
        self.space = self.client.open(spec_of("errors"))
        self.keys = self.space.keys(TOKENS)
        self.arrays = [bytes(self.space.block_bytes)] * len(self.keys)
        self.space.save(self.keys, self.arrays)
        self.targets = [bytearray(self.space.block_bytes) for _ in self.keys]


def used(context: Any, use: Callable[[Any], Any] = lambda _: None) -> None:
    with context as entered:
        use(entered)


# Each argument of each public call, with valid values for the others.
CALLS: dict[str, Callable[[World, Any], Any]] = {
    "connect socket": lambda w, x: Client.connect(x or "/nonexistent", populate=False).close(),
    "connect timeout_s": lambda w, x: Client.connect(w.daemon.socket, timeout_s=x, populate=False).close(),
    "connect name": lambda w, x: Client.connect(w.daemon.socket, name=x, populate=False).close(),
    "connect read_only": lambda w, x: Client.connect(
        w.daemon.socket, read_only=x, populate=False
    ).close(),
    "open": lambda w, x: w.client.open(x),
    "wait_ready": lambda w, x: w.client.wait_ready(x),
    "explain lookup": lambda w, x: w.client.explain(lookup=x),
    "explain keys": lambda w, x: w.client.explain(keys=x),
    "record": lambda w, x: w.client.record(x, stop=x) if x not in (0, None) else None,
    "settings": lambda w, x: w.client.settings(x),
    "tier": lambda w, x: w.client.tier(x),
    "tier order": lambda w, x: w.client.tier("warm", x),
    "adopt token": lambda w, x: w.client.adopt(x),
    "adopt shards": lambda w, x: w.client.adopt(bytes(16), x),
    "keys": lambda w, x: w.space.keys(x),
    "keys salt": lambda w, x: w.space.keys(TOKENS, salt=x),
    "keys extras": lambda w, x: w.space.keys(TOKENS, extras=x),
    "keys_of_hashes": lambda w, x: w.space.keys_of_hashes(x),
    "keys_of_hashes after": lambda w, x: w.space.keys_of_hashes([bytes(32)], after=x),
    "match": lambda w, x: w.space.match(x),
    "match request": lambda w, x: w.space.match(w.keys, request=x),
    "match within_ms": lambda w, x: w.space.match(w.keys, within_ms=x),
    "match queued_ms": lambda w, x: w.space.match(w.keys, queued_ms=x),
    "prefetch": lambda w, x: w.space.prefetch(x),
    "begin_match": lambda w, x: w.space.begin_match(x),
    "begin_lease": lambda w, x: w.space.begin_lease(x),
    "begin_lease deadline_ms": lambda w, x: w.space.begin_lease(w.keys, x),
    "begin_lease wait_ms": lambda w, x: w.space.begin_lease(w.keys, wait_ms=x),
    "begin_pin": lambda w, x: w.space.begin_pin(x),
    "begin_pin ttl_s": lambda w, x: w.space.begin_pin(w.keys, x),
    "cancel": lambda w, x: w.space.cancel(x),
    "prefill": lambda w, x: w.space.prefill(x),
    "prefill context_s": lambda w, x: w.space.prefill(1e-3, x),
    "load": lambda w, x: used(w.space.load(x)),
    "load deadline_ms": lambda w, x: used(w.space.load(w.keys, x)),
    "load group": lambda w, x: used(w.space.load(w.keys, group=x)),
    "load shard": lambda w, x: used(w.space.load(w.keys, shard=x)),
    "load_into": lambda w, x: w.space.load_into(x, w.targets),
    "load_into targets": lambda w, x: w.space.load_into(w.keys, x),
    "load_into threads": lambda w, x: w.space.load_into(w.keys, w.targets, threads=x),
    "lease": lambda w, x: w.space.lease(x),
    "lease shards": lambda w, x: w.space.lease(w.keys, shards=x),
    "lease part": lambda w, x: w.space.lease(w.keys).part(x, x),
    "lease views": lambda w, x: (lease := w.space.lease(w.keys)).views(lease.part(0, 0), x),
    "most_keys": lambda w, x: w.space.most_keys(x),
    "group_block_bytes": lambda w, x: w.space.group_block_bytes(x),
    "reserve": lambda w, x: used(w.space.reserve(x)),
    "reserve group": lambda w, x: used(w.space.reserve(w.keys, x)),
    "reserve wait_s": lambda w, x: used(w.space.reserve(w.keys, wait_s=x)),
    "commit": lambda w, x: used(w.space.reserve(w.keys), lambda saving: saving.commit(x)),
    "save": lambda w, x: w.space.save(x, w.arrays),
    "save arrays": lambda w, x: w.space.save(w.keys, x),
    "save shard": lambda w, x: w.space.save(w.keys, w.arrays, shard=x),
    "save checksum": lambda w, x: w.space.save(w.space.keys([7] * 64), w.arrays, checksum=x),
    "save threads": lambda w, x: w.space.save(w.keys, w.arrays, threads=x),
    "save wait_s": lambda w, x: w.space.save(w.keys, w.arrays, wait_s=x),
    "pin": lambda w, x: w.space.pin(x),
    "pin ttl_s": lambda w, x: w.space.pin(w.keys, x),
    "unpin": lambda w, x: w.space.unpin(x),
    "hint": lambda w, x: w.space.hint(x, 0.5),
    "hint importance": lambda w, x: w.space.hint(w.keys, x),
    "forget": lambda w, x: w.space.forget(x),
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


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)  # fmt: skip
HARMLESS = sorted(name for name in CALLS if not name.startswith(("connect", "wait_ready")))


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


def test_a_pin_lasts_a_week_at_most(world: World) -> None:
    assert world.space.pin(world.keys, ttl_s=A_WEEK_S) == len(world.keys)
    with pytest.raises(kvtier.InvalidArgument, match=r"864000 s.*a week"):
        world.space.pin(world.keys, ttl_s=864000)
    world.space.unpin(world.keys)


def test_a_space_has_the_block_sizes_of_its_spec(world: World) -> None:
    spec = world.space.spec
    assert world.space.block_bytes == spec.block_bytes
    assert world.space.group_block_bytes(0) == spec.group_block_bytes(0)
