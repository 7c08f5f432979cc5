"""A lookup waits for blocks that another client is writing, and a router finds out where prefixes are."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtier import KvtierError, Refused, wire
from kvtier.client import Lease
from kvtier.key import Keys
from kvtier.space import Located
from kvtier_daemon.observing.metrics import hits
from kvtier_kernels import Buffers
from support.daemons import Daemon
from support.specs import pattern, spec_of

Daemons = Callable[..., Daemon]
PROMPT = 4  # blocks


@pytest.fixture
def daemon(daemon_of: Daemons) -> Daemon:
    return daemon_of()


def test_a_decoder_waits_for_the_blocks_that_a_prefill_writes(daemon: Daemon) -> None:
    with daemon.connect() as prefill, daemon.connect() as decode:
        ours, theirs = prefill.open(spec_of("roles")), decode.open(spec_of("roles"))
        keys = ours.keys([1] * PROMPT * 16)
        nbytes = ours.spec.block_bytes

        def found(request: int, awaits: bool) -> tuple[int, int]:
            match = theirs.match(keys, request=request, within_ms=60_000, awaits=awaits)
            return match.ready, match.coming

        with ours.reserve(keys) as saving:
            assert found(1, awaits=False) == (0, 0)
            assert found(2, awaits=True) == (0, PROMPT)
            results = []

            def decoding() -> None:
                with daemon.connect() as client:
                    space = client.open(spec_of("roles"))
                    results.append(space.wait(keys, 60_000, awaits=True).ready)

            decoder = threading.Thread(target=decoding)
            decoder.start()
            time.sleep(0.2)
            assert decoder.is_alive()
            blocks = [pattern(key, nbytes) for key in keys]
            saving.copy(Buffers(blocks, 0, PROMPT, nbytes), 1, True)
        decoder.join()
        assert results == [PROMPT]
        assert found(2, awaits=True) == (PROMPT, 0)
        with theirs.load(keys) as blocks:
            for key, block in zip(keys, blocks, strict=True):
                assert bytes(block) == pattern(key, nbytes)


def test_a_decoder_waits_no_longer_than_it_says_or_than_computing_takes(daemon: Daemon) -> None:
    with daemon.connect() as prefill, daemon.connect() as decode:
        ours, theirs = prefill.open(spec_of("slow")), decode.open(spec_of("slow"))
        keys = ours.keys([1] * PROMPT * 16)
        with ours.reserve(keys):
            began = time.monotonic()
            assert theirs.wait(keys, 200, request=7, awaits=True).ready == 0
            assert 0.15 < time.monotonic() - began < 5
            # The daemon's clock began a moment after the client's, and no match begins it again.
            while theirs.match(keys, request=7, within_ms=60_000, awaits=True).coming:
                assert time.monotonic() - began < 5, "waits once"
            theirs.prefill(1e-3 / (PROMPT * 16), 0.0)  # a millisecond for all of it
            theirs.match(keys, request=8, within_ms=60_000, awaits=True)
            time.sleep(0.01)
            assert theirs.match(keys, request=8, within_ms=60_000, awaits=True).coming == 0


def test_a_writer_that_dies_or_gives_up_is_not_awaited(daemon: Daemon) -> None:
    with daemon.connect() as decode:
        theirs = decode.open(spec_of("dies"))
        keys = theirs.keys([1] * PROMPT * 16)
        with daemon.connect() as prefill:
            with prefill.open(spec_of("dies")).reserve(keys):
                assert theirs.match(keys, request=1, within_ms=60_000, awaits=True).coming == PROMPT
            # It wrote nothing, so its slots were given back.
            assert theirs.match(keys, request=2, within_ms=60_000, awaits=True).coming == 0


WRITER = """
import sys
sys.path[:0] = sys.argv[2:]
from kvtier import Client
from support.specs import spec_of
space = Client.connect(sys.argv[1]).open(spec_of("delayed"))
with space.reserve(space.keys([1] * 64)) as saving:
    print("reserved", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["commits", "gives up", "hangs up", "is killed"])
def test_a_delayed_answer_comes_when_the_writer_is_done(daemon: Daemon, how: str) -> None:
    """Well before its time limit, and never with a block that is not committed."""
    with daemon.connect() as prefill, daemon.connect() as decode:
        theirs = decode.open(spec_of("delayed"))
        keys = theirs.keys([1] * PROMPT * 16)

        def asked(wait_ms: int) -> None:
            theirs.begin_lease(
                keys, 60_000, request=1, awaits=True, within_ms=60_000, wait_ms=wait_ms
            )

        def answer() -> Lease:
            until = time.monotonic() + 30
            while not (found := decode.poll()):
                assert time.monotonic() < until
                time.sleep(0.001)
            (lease,) = found.values()
            assert isinstance(lease, Lease)
            return lease

        with ExitStack() as stack:
            if how == "is killed":
                writer = stack.enter_context(
                    subprocess.Popen(
                        [sys.executable, "-c", WRITER, daemon.socket, *sys.path],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                    )
                )
                assert writer.stdout is not None and writer.stdout.readline() == b"reserved\n"
            else:
                ours = prefill.open(spec_of("delayed"))
                saving = stack.enter_context(ours.reserve(keys))
            asked(0)
            assert answer().coming == PROMPT
            asked(60_000)
            decode.ping()  # the daemon has the second question
            assert not decode.poll()
            if how == "is killed":
                writer.kill()
            elif how == "commits":
                nbytes = ours.spec.block_bytes
                blocks = [pattern(key, nbytes) for key in keys]
                saving.copy(Buffers(blocks, 0, PROMPT, nbytes), 1, True)
            elif how == "hangs up":
                prefill.link.connection.close(farewell=False)
            stack.pop_all().close() if how == "gives up" else None
            lease = answer()
            assert (lease.ready, lease.coming) == ((PROMPT, 0) if how == "commits" else (0, 0))
            if how == "commits":
                part = lease.part(0, 0)
                read = lease.views(part, nbytes)
                assert [bytes(view) for view in read] == blocks
                del read
            lease.release()
            if how == "hangs up":
                with pytest.raises(KvtierError):
                    stack.close()


class Counting:
    """The counters of lookups, as metrics show them: hits in memory, misses by reason, and what comes."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._last = 0

    def __call__(self) -> tuple[int, dict[str, int], int]:
        """In blocks. Counters never fall, and each token is one of these."""
        stats = self._daemon.stats()
        found, missed = hits(stats), {k: v // 16 for k, v in stats["miss_tokens"].items() if v}
        assert stats["lookup_tokens"] == (
            sum(found.values()) + 16 * sum(missed.values()) + stats["coming_tokens"]
        )
        assert found["warm"] >= self._last and not found.get("cold")
        self._last = found["warm"]
        return found["warm"] // 16, missed, stats["coming_tokens"] // 16


def test_awaited_blocks_are_counted_as_what_they_become(daemon: Daemon) -> None:
    counted = Counting(daemon)
    with daemon.connect() as prefill, daemon.connect() as decode:
        ours, theirs = prefill.open(spec_of("counted")), decode.open(spec_of("counted"))
        nbytes = ours.spec.block_bytes

        def asked(number: int, keys: Keys, blocks: int = PROMPT) -> None:
            found = theirs.match(keys, request=number, within_ms=60_000, awaits=True)
            assert found.ready + found.coming == blocks

        keys = ours.keys([1] * (PROMPT + 2) * 16)
        blocks = [pattern(key, nbytes) for key in keys]
        with ours.reserve(keys[:PROMPT]) as saving:
            asked(1, keys)
            assert counted() == (0, {"absent": 2}, PROMPT)
            asked(1, keys)
            assert counted() == (0, {"absent": 2}, PROMPT)
            for key, block in zip(keys, blocks[:PROMPT], strict=False):
                saving[key][:] = block
            saving.commit(1)
            asked(1, keys)
            assert counted() == (1, {"absent": 2}, PROMPT - 1)
            saving.commit(PROMPT - 1)
        asked(1, keys)
        assert counted() == (PROMPT, {"absent": 2}, 0)
        asked(1, keys)
        assert counted() == (PROMPT, {"absent": 2}, 0)

        other = ours.keys([2] * PROMPT * 16)
        with ours.reserve(other):  # and gives up
            asked(2, other)
        asked(2, other, 0)
        assert counted() == (PROMPT, {"absent": 2, "in_progress": PROMPT}, 0)

        with ours.reserve(other):
            asked(3, other)
            assert counted()[2] == PROMPT
            theirs.cancel(3)
            assert counted() == (PROMPT, {"absent": 2, "in_progress": 2 * PROMPT}, 0)
            assert theirs.wait(other, 100, request=4, awaits=True).ready == 0
            while theirs.match(other, request=4, awaits=True).coming:
                time.sleep(0.01)
            assert counted() == (PROMPT, {"absent": 2, "in_progress": 3 * PROMPT}, 0)

        with ours.reserve(other):
            theirs.begin_lease(other, request=5, awaits=True, within_ms=60_000)
            while not decode.poll():
                time.sleep(0.001)
            assert counted() == (PROMPT, {"absent": 2, "in_progress": 3 * PROMPT}, PROMPT)
            decode.close()
            while counted()[2]:
                time.sleep(0.001)
            assert counted() == (PROMPT, {"absent": 2, "in_progress": 4 * PROMPT}, 0)


def test_a_router_finds_out_where_the_leading_blocks_of_many_prefixes_are(
    daemon_of: Daemons, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    daemon = daemon_of(
        config=f'[warm]\nsize = "4MiB"\n[cold]\ndirectories = ["{tmp_path}/disk"]\nsize = "128MiB"\n'
    )
    daemon.wait_for_disks()
    with daemon.connect() as client:
        space = client.open(spec_of("located"))
        chains = [space.keys([number] * PROMPT * 16) for number in range(30)]
        for keys in chains:
            space.save(keys, [pattern(key, space.spec.block_bytes) for key in keys])
        daemon.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == 30 * PROMPT)
        before = client.stats()
        absent = space.keys([99] * PROMPT * 16)
        longer = space.keys([29] * PROMPT * 16 + [5] * 16)
        found = space.locate([*chains, absent, longer, absent[:0]])
        assert found[-3:] == [Located(0, 0, 0), Located(PROMPT, 0, 0), Located(0, 0, 0)]
        assert {sum(one) for one in found[:30]} == {PROMPT}
        assert found[0] == Located(0, PROMPT, 0), "the oldest is only on disk"
        after = client.stats()
        for name in ("lookup_tokens", "hit_tokens", "miss_tokens"):
            assert after[name] == before[name]
        assert after["tiers"]["cold"]["blocks"] == 30 * PROMPT
        assert space.locate(chains) == found[:30], "nothing was read"
        for keys, lengths in (
            (bytes(64), b"\1\0\0\0"),
            (bytes(32), b"\1\0\0"),
            (b"", bytes(4 * 1025)),
        ):
            with pytest.raises(Refused):
                client.link.ask(
                    lambda id_, keys=keys, lengths=lengths: wire.Locate(
                        id_, space.index, keys, lengths
                    ),
                    wire.Locations,
                )
