"""With a real daemon: saved blocks are loaded byte for byte, and no other data is."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from kvtier import Client, Keys, KvSpec, Refused, StaleLease, Unavailable, wire
from support.daemons import Daemon
from support.specs import changed_value, pattern, spec_of

TOKENS = list(range(16 * 12))


def fill(space: object, keys: object, nbytes: int) -> None:
    saved = space.save(keys, [pattern(key, nbytes) for key in keys])  # type: ignore[attr-defined]
    assert len(saved) == len(keys), saved  # type: ignore[arg-type]


def test_a_saved_prefix_is_loaded_by_another_client(shared_daemon: Daemon) -> None:
    spec = spec_of("another-client")
    with shared_daemon.connect() as saver, shared_daemon.connect() as loader:
        space = saver.open(spec)
        keys = space.keys(TOKENS)
        fill(space, keys, spec.block_bytes)
        other = loader.open(spec)
        assert other.keys(TOKENS) == keys
        assert other.match(keys).ready == 12
        with other.load(keys) as blocks:
            assert [bytes(block) for block in blocks] == [
                pattern(k, spec.block_bytes) for k in keys
            ]
            assert all(block.readonly for block in blocks)


def test_objects_show_what_they_are(shared_daemon: Daemon) -> None:
    spec = spec_of("shown")
    with shared_daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys(TOKENS)
        fill(space, keys, spec.block_bytes)
        assert repr(client) == f"<client of {client.socket}, tenant {client.tenant}>"
        size = f"{spec.block_tokens} tokens and {spec.block_bytes} bytes"
        assert repr(space) == f"<space of {spec.model}, blocks of {size}>"
        lease = space.lease(keys)
        assert repr(lease) == "<lease of 12 blocks, 0 coming>"
        lease.release()
    assert repr(client) == f"<client of {client.socket}, closed>"


def test_writing_by_hand_commits_on_exit_and_aborts_on_an_exception(shared_daemon: Daemon) -> None:
    spec = spec_of("by-hand")
    with shared_daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys(TOKENS)
        with pytest.raises(RuntimeError), space.reserve(keys) as saving:
            raise RuntimeError("the engine changed its mind")
        assert space.match(keys).ready == 0
        with space.reserve(keys) as saving:
            assert list(saving) == list(keys)
            for key, buffer in saving.items():
                assert not buffer.readonly
                buffer[:] = pattern(key, spec.block_bytes)
            assert space.match(keys).ready == 0
            saving.commit(5)
            assert space.match(keys).ready == 5
        assert space.match(keys).ready == 12
        with space.reserve(keys) as saving:
            assert len(saving) == 0
            assert set(saving.refused.values()) == {"present"}


def test_more_keys_than_one_request_changes_are_hinted_and_forgotten(shared_daemon: Daemon) -> None:
    """Blocks of the first and of the last portion are stored."""
    spec = spec_of("portions", layers=1, kv_heads=1, head_dim=8, block_tokens=1)
    with shared_daemon.connect() as client:
        space = client.open(spec)
        for count in (wire.LIMIT_CHANGED, wire.LIMIT_CHANGED + 1, 2 * wire.LIMIT_CHANGED + 5):
            keys = space.keys(list(range(count)))
            kept = Keys(keys[:2].packed + keys[-1:].packed)
            assert space.save(kept, bytes(3 * spec.block_bytes)).stored == 3
            assert space.hint(keys, 0.0) == 3
            space.begin_hint(keys, 0.5)
            assert space.forget(keys) == 3
            assert space.forget(keys) == 0


def test_copies_fill_one_buffer_or_many(shared_daemon: Daemon) -> None:
    spec = spec_of("buffers")
    size = spec.block_bytes
    with shared_daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys(TOKENS)
        whole = np.frombuffer(b"".join(pattern(key, size) for key in keys), dtype=np.uint16)
        assert space.save(keys, whole).stored == 12
        one = bytearray(size * 12)
        assert space.load_into(keys, one) == 12
        assert one == whole.tobytes()
        many = [bytearray(size) for _ in keys]
        assert space.load_into(keys, many) == 12
        assert b"".join(many) == whole.tobytes()


def test_the_tail_of_a_prefix_can_be_saved_alone(shared_daemon: Daemon) -> None:
    spec = spec_of("tail")
    with shared_daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys(TOKENS)
        fill(space, keys[:7], spec.block_bytes)
        fill(space, keys[7:], spec.block_bytes)
        assert space.match(keys).ready == 12


def test_sources_of_the_wrong_size_store_nothing(shared_daemon: Daemon) -> None:
    spec = spec_of("wrong-size")
    with shared_daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys(TOKENS)
        with pytest.raises(ValueError):
            space.save(keys, [b"short"] * 12)
        with pytest.raises(ValueError):
            space.save(keys, [bytes(spec.block_bytes)] * 11)
        assert space.match(keys).ready == 0
        assert client.stats()["tiers"]["warm"]["states"]["writing"] == 0


@pytest.mark.parametrize("name", [n for n in KvSpec.__struct_fields__ if n != "cache_groups"])
def test_a_space_with_another_description_finds_nothing(shared_daemon: Daemon, name: str) -> None:
    spec = spec_of(f"identity-{name}")
    other = msgspec.structs.replace(spec, **{name: changed_value(spec, name)})
    with shared_daemon.connect() as client:
        space, stranger = client.open(spec), client.open(other)
        keys = space.keys(TOKENS)
        fill(space, keys, spec.block_bytes)
        assert stranger.match(stranger.keys(TOKENS)).ready == 0
        assert stranger.match(keys).ready == 0, "another space must not answer to these keys"
        assert space.match(keys).ready == 12
        space.forget(keys)


def test_another_salt_finds_nothing(shared_daemon: Daemon) -> None:
    spec = spec_of("salt")
    with shared_daemon.connect() as client:
        space = client.open(spec)
        fill(space, space.keys(TOKENS, salt=b"alice"), spec.block_bytes)
        assert space.match(space.keys(TOKENS, salt=b"bob")).ready == 0
        assert space.match(space.keys(TOKENS)).ready == 0


def has_no_lease(stats: dict[str, Any]) -> bool:
    return not any(tenant["leases"] for tenant in stats["tenants"].values())


def test_a_load_whose_lease_expired_is_an_error(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(warm="16MiB")
    spec = spec_of()
    with daemon.connect() as reader, daemon.connect() as writer:
        space, other = reader.open(spec), writer.open(spec)
        keys = space.keys(TOKENS)
        fill(space, keys, spec.block_bytes)
        with pytest.raises(StaleLease), space.load(keys, deadline_ms=50) as blocks:
            assert bytes(blocks[0]) == pattern(keys[0], spec.block_bytes)
            daemon.wait_for(has_no_lease)
            many = other.keys(list(range(10**6, 10**6 + 16 * 256)))
            assert len(other.save(many, bytes(spec.block_bytes * 256))) == 256
        with space.load(keys) as blocks:
            assert len(blocks) == 0


def test_copies_after_the_end_of_the_lease_are_not_counted(
    daemon_of: Callable[..., Daemon],
) -> None:
    daemon = daemon_of(warm="16MiB")
    spec = spec_of()
    with daemon.connect() as reader, daemon.connect() as writer:
        space, other = reader.open(spec), writer.open(spec)
        keys = space.keys(TOKENS)
        fill(space, keys, spec.block_bytes)
        lease = space.lease(keys, deadline_ms=50)
        part = lease.part(0, 0)
        assert lease.fresh(part) == 12
        daemon.wait_for(has_no_lease)
        many = other.keys(list(range(10**6, 10**6 + 16 * 250)))
        other.save(many, bytes(spec.block_bytes * 250))
        assert lease.fresh(part) == 6, "six blocks were given away, from the tail"


def test_views_are_invalid_after_the_with_block(shared_daemon: Daemon) -> None:
    spec = spec_of("views")
    with shared_daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys(TOKENS)
        fill(space, keys, spec.block_bytes)
        with space.load(keys) as blocks:
            first = blocks[0]
        with pytest.raises(ValueError, match="released"):
            bytes(first)


def test_a_lease_is_adopted_by_another_process_of_the_tenant(shared_daemon: Daemon) -> None:
    spec = spec_of("adopt", tensor_parallel=2)
    with shared_daemon.connect() as scheduler, shared_daemon.connect() as worker:
        space = scheduler.open(spec)
        keys = space.keys(TOKENS)
        for shard in range(2):
            space.save(keys, [pattern(k, spec.block_bytes) for k in keys], shard=shard)
        lease = space.lease(keys, 60_000, shards=[])
        assert (lease.ready, lease.parts) == (12, [])
        joined = worker.adopt(lease.token, shards=[1])
        views = joined.views(joined.part(0, 1), spec.block_bytes)
        assert bytes(views[3]) == pattern(keys[3], spec.block_bytes)
        lease.release()
        joined.release()
        with pytest.raises(Refused, match="no lease"):
            scheduler.ping()
            worker.ping()
            worker.adopt(lease.token)


def test_answers_can_be_polled(shared_daemon: Daemon) -> None:
    spec = spec_of("poll")
    with shared_daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys(TOKENS)
        fill(space, keys, spec.block_bytes)
        assert client.poll() == {}
        tickets = [space.begin_match(keys), space.begin_lease(keys)]
        found: dict[int, object] = {}
        deadline = time.monotonic() + 60
        while len(found) < 2 and time.monotonic() < deadline:
            found |= client.poll()
        match, lease = (found[ticket] for ticket in tickets)
        assert match.ready == lease.ready == 12  # type: ignore[attr-defined]
        lease.release()  # type: ignore[attr-defined]


def test_a_reader_can_not_write(shared_daemon: Daemon) -> None:
    spec = spec_of("reader")
    with shared_daemon.connect() as client, shared_daemon.connect(read_only=True) as reader:
        space, readable = client.open(spec), reader.open(spec)
        keys = space.keys(TOKENS)
        fill(space, keys, spec.block_bytes)
        with readable.load(keys) as blocks:
            assert bytes(blocks[11]) == pattern(keys[11], spec.block_bytes)
        for call in (
            lambda: readable.save(keys, bytes(12 * spec.block_bytes)),
            lambda: readable.forget(keys),
        ):
            with pytest.raises(Refused) as refusal:
                call()
            assert refusal.value.code == "read_only"


def test_threads_share_a_client(shared_daemon: Daemon) -> None:
    spec = spec_of("threads")
    wrong: list[str] = []
    with shared_daemon.connect() as client:
        space = client.open(spec)

        def work(number: int) -> None:
            for turn in range(20):
                start = (number * 100 + turn) * 10_000
                keys = space.keys(list(range(start, start + 64)))
                space.save(keys, [pattern(key, spec.block_bytes) for key in keys])
                with space.load(keys) as blocks:
                    for key, block in zip(keys, blocks, strict=False):
                        if bytes(block) != pattern(key, spec.block_bytes):
                            wrong.append(f"{number}/{turn}")

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_two_writers_of_one_key_neither_wait_nor_mix(shared_daemon: Daemon) -> None:
    spec = spec_of("two writers")
    with shared_daemon.connect() as one, shared_daemon.connect() as two:
        first, second = one.open(spec), two.open(spec)
        keys = first.keys(TOKENS)
        with first.reserve(keys) as saving:
            refused = second.save(keys, bytes(12 * spec.block_bytes))
            assert len(refused) == 0
            assert set(refused.refused.values()) == {"in_progress"}
            assert second.match(keys).ready == 0
            for key, slot in saving.items():
                slot[:] = pattern(key, spec.block_bytes)
        assert len(second.save(keys, bytes(12 * spec.block_bytes))) == 12
        with second.load(keys) as blocks:
            assert [bytes(b) for b in blocks] == [pattern(k, spec.block_bytes) for k in keys]


def test_a_forked_child_must_connect_again(shared_daemon: Daemon) -> None:
    with shared_daemon.connect() as client:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                client.ping()
                text = "answered"
            except Unavailable as error:
                text = str(error)
            os.write(write, text.encode())
            client.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert b"fork" in os.read(read, 200)
        os.close(read)
        os.close(write)
        client.ping()


def test_a_missing_daemon_is_reported_with_the_remedy(tmp_path: object) -> None:
    with pytest.raises(Unavailable, match="kvtier serve"):
        Client.connect(f"{tmp_path}/nothing.sock")


def test_a_daemon_that_hangs_delays_a_call_by_one_timeout(daemon_of: Callable[..., Daemon]) -> None:
    import signal

    daemon = daemon_of()
    client = daemon.connect()
    client.link.connection.timeout_s = 0.3
    daemon.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(Unavailable, match=r"did not answer within 0\.3 s"):
        client.ping()
    first_s, began = time.monotonic() - began, time.monotonic()
    for _ in range(10):
        with pytest.raises(Unavailable):
            client.ping()
    assert time.monotonic() - began < 5 * first_s, "each later request waits for a deadline, too"
    daemon.process.send_signal(signal.SIGCONT)
    client.close()


def test_a_daemon_that_dies_is_noticed_and_a_new_one_starts_empty(
    daemon_of: Callable[..., Daemon],
) -> None:
    daemon = daemon_of()
    spec = spec_of()
    client = daemon.connect()
    space = client.open(spec)
    keys = space.keys(TOKENS)
    fill(space, keys, spec.block_bytes)
    daemon.process.kill()
    daemon.process.wait()
    with pytest.raises(Unavailable):
        space.match(keys)
    client.close()
    again = daemon_of(folder=daemon.log.parent)
    with again.connect() as client:
        space = client.open(spec)
        assert space.keys(TOKENS) == keys, "the secret is kept, so names stay the same"
        assert space.match(keys).ready == 0


def test_a_stopping_daemon_sends_a_farewell(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of()
    client = daemon.connect()
    assert daemon.stop() == 0
    with pytest.raises(Unavailable, match="the daemon is stopping"):
        client.ping()
    client.close()
    assert not os.path.exists(daemon.socket)


def test_a_burst_of_saves_keeps_the_newest_blocks_and_correct_matches(
    daemon_of: Callable[..., Daemon],
) -> None:
    daemon = daemon_of(warm="16MiB")
    spec = spec_of()
    with daemon.connect() as client:
        space = client.open(spec)
        chains = [space.keys(list(range(n * 10**5, n * 10**5 + 16 * 16))) for n in range(64)]
        for keys in chains:
            kept = space.save(keys, [pattern(key, spec.block_bytes) for key in keys])
            assert space.match(keys).ready == len(kept) == 16
        found = [space.match(keys).ready for keys in chains]
        # The policy may evict the last block of a request before older blocks, as far as it has learned that
        # such blocks are used less.
        assert all(ready >= 15 for ready in found[-16:])
        assert sum(found) == 256


def test_a_save_of_nine_tenths_of_the_tier_is_kept_whole(daemon_of: Callable[..., Daemon]) -> None:
    daemon = daemon_of(warm="64MiB")
    spec = spec_of()
    with daemon.connect() as client:
        space = client.open(spec)
        for turn in range(40):
            start = 10**7 + turn * 10**5
            space.save(
                space.keys(list(range(start, start + 16 * 50))), bytes(50 * spec.block_bytes)
            )
        count = int(64 * 2**20 * 0.9) // spec.block_bytes
        keys = space.keys(list(range(16 * count)))
        assert space.save(keys, bytes(count * spec.block_bytes)).stored == count
        assert space.match(keys).ready == count


def test_a_save_of_more_keys_than_one_reserve_is_split(
    daemon_of: Callable[..., Daemon],
) -> None:
    """The save ends at the first block without room, because the blocks after it could not be found."""
    count = wire.LIMIT_RESERVED + 100
    for warm, kept in (("96MiB", count), ("16MiB", 4096)):
        daemon = daemon_of(warm=warm)
        with daemon.connect() as client:
            spec = spec_of("long", layers=1, kv_heads=1, head_dim=64)
            space = client.open(spec)
            keys = space.keys(list(range(16 * count)))
            blocks = np.arange(count * spec.block_bytes // 4, dtype=np.uint32)
            blocks = blocks.reshape(count, -1)
            saved = space.save(keys, blocks)
            assert (saved.stored, len(saved), len(saved.refused)) == (kept, kept, count - kept)
            assert space.match(keys).ready == kept
            with space.load(keys[:kept]) as found:
                for number in (0, kept // 2, kept - 1):
                    assert bytes(found[number]) == blocks[number].tobytes()


def test_a_part_whose_last_block_another_writes_does_not_end_the_save(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a single reserve: later blocks are found when the other writer has committed."""
    spec = spec_of("parts")
    monkeypatch.setattr(wire, "LIMIT_RESERVED", 4)
    with shared_daemon.connect() as first, shared_daemon.connect() as second:
        one, other = first.open(spec), second.open(spec)
        keys = one.keys(TOKENS)
        with one.reserve(keys[:4]) as saving:
            sources = [pattern(key, spec.block_bytes) for key in keys]
            saved = other.save(keys, sources)
            assert (saved.stored, len(saved.refused)) == (8, 4), saved
            for key in keys[:4]:
                saving[key][:] = pattern(key, spec.block_bytes)
        assert other.match(keys).ready == 12
