"""Frames read from disk into a device's memory, verified and decoded there: with a real daemon, and a CUDA
driver without a device. Reads go through pinned memory; see test_direct_kvikio.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvtier import Client, KvSpec
from kvtier.direct import calibration_of, read_directly
from kvtier.frame import PAGE, RAW
from kvtier.wire import DirectReadCalibrated
from kvtier_daemon.codec import profile as files
from kvtier_kernels.cuda import Copier, Driver, blocks, codecs, digests
from kvtier_plugins import direct
from kvtier_plugins.direct import DirectReader, codecs_for, open_source
from kvtier_plugins.payload_reads import DirectReadsError, PinnedReads, direct_reads_fail
from support.daemons import Daemon
from support.direct_engine import UNTOUCHED, DirectEngine
from support.filled import filled
from support.losses_by_twins import profile_of
from support.specs import spec_of

ON_GPU = os.environ.get("KVTIER_DEVICE") == "gpu"
CHAIN = 16
RING = 4 << 20
CALIBRATED = ("ecsq-mid", "cachegen-mid")
CODECS = ("raw", "fix4", "r32", "q8", "q4", "q2", "fp8", "e5m2", "nvfp4", "mxfp4", *CALIBRATED)
PATIENT = {"LIMIT_DIRECT_S": 60.0}  # a busy machine is slow
DaemonOf = Callable[..., Daemon]
EngineOf = Callable[..., DirectEngine]


def daemon_with(daemon_of: DaemonOf, folder: Path, codec: str) -> Daemon:
    disk = folder / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    lossless = codec if codec in ("raw", "fix4", "r32", "zstd") else "raw"
    lossy = "" if codec == lossless else f'codecs = ["*={codec}"]\n'
    if codec in CALIBRATED:
        (folder / "profile.kvtp").write_bytes(files.encode(profile_of(spec_of("direct"))))
        lossy += f'profiles = ["{folder}/profile.kvtp"]\n'
    return daemon_of(
        folder=folder, haste=PATIENT,
        config=f'[warm]\nsize = "4MiB"\n[cold]\ndirectories = ["{disk}"]\nsize = "64MiB"\n'
        f'segment = "1MiB"\ncodec = "{lossless}"\n{lossy}'
        '[tenants.default]\nuids = ["*"]\ndirect_reads = true\n',
    )  # fmt: skip


def tokens(chain: int) -> list[int]:
    return [chain * 1_000_000 + n for n in range(16 * CHAIN)]


def values(spec: KvSpec, key: bytes) -> bytes:
    """A block of values as a model has them, which every codec makes smaller."""
    chance = np.random.default_rng(np.frombuffer(key, np.uint8))
    floats = chance.normal(size=spec.block_bytes // 2).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16).tobytes()  # bfloat16


def stored(daemon_of: DaemonOf, folder: Path, spec: KvSpec, codec: str, chains: int = 1) -> Daemon:
    """A daemon whose blocks of these chains are only on disk, encoded by this codec."""

    def fill(source: Path, start: DaemonOf) -> None:
        first = daemon_with(start, source, codec)
        first.wait_for_disks()
        with first.connect() as client:
            space = client.open(spec)
            for chain in range(chains):
                keys = space.keys(tokens(chain))
                assert space.save(keys, [values(spec, key) for key in keys]).stored == CHAIN

    filled(folder, (spec, codec, chains), fill)
    again = daemon_with(daemon_of, folder, codec)
    again.wait_for(lambda stats: stats["tiers"]["cold"]["blocks"] == chains * CHAIN)
    return again


def through_memory(client: Client, spec: KvSpec, chain: int) -> list[bytes]:
    """The blocks as the daemon decodes them."""
    space = client.open(spec)
    keys = space.keys(tokens(chain))
    while space.match(keys).ready < len(keys):
        pass
    with space.load(keys, deadline_ms=60_000) as found:
        return [bytes(one or b"") for one in found]


@pytest.fixture
def engine_of(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EngineOf]:
    """Engines on the driver without a device, or, if KVTIER_DEVICE is `gpu`, on a GPU."""
    fake = None if ON_GPU else request.getfixturevalue("fake_cuda")
    monkeypatch.setattr(direct, "LEASE_MS", 60_000)
    for module in () if ON_GPU else (blocks, codecs, digests):
        monkeypatch.setattr(module, "compile_kernel", lambda text, architecture: b"host\0")
    made = []

    def make(
        spec: KvSpec, pages: int = CHAIN, ring_bytes: int = RING,
        calibrated: DirectReadCalibrated | None = None,
    ) -> DirectEngine:  # fmt: skip
        driver = Driver(0) if fake is None else fake.driver()
        copier = Copier(Driver(0)) if fake is None else fake.copier(monkeypatch)
        engine = DirectEngine(driver, copier, spec, pages, ring_bytes, calibrated=calibrated)
        made.append((engine, copier, driver))
        return engine

    yield make
    for engine, copier, driver in made:
        engine.close()
        copier.close()
        copier.driver.close()
        driver.close()


@pytest.fixture
def source(engine_of: EngineOf) -> Iterator[Callable[[DirectEngine], PinnedReads]]:
    sources: list[PinnedReads] = []

    def make(engine: DirectEngine) -> PinnedReads:
        sources.append(engine.pinned())
        return sources[-1]

    yield make
    for one in sources:
        one.close()


SourceOf = Callable[[DirectEngine], PinnedReads]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("codec", CODECS)
def test_pages_contain_what_the_daemon_decodes(
    daemon_of: DaemonOf, engine_of: EngineOf, source: SourceOf, tmp_path: Path, codec: str
) -> None:
    spec = spec_of("direct")
    daemon = stored(daemon_of, tmp_path / "one", spec, codec)
    pages = list(range(CHAIN))[::-1]
    with daemon.connect() as client:
        space = client.open(spec)
        calibrated = calibration_of(space)
        assert (calibrated is not None) == (codec in CALIBRATED)
        engine = engine_of(spec, ring_bytes=10 * 2 * spec.block_bytes, calibrated=calibrated)
        keys = space.keys(tokens(0))
        assert engine.load(space, keys, source(engine), pages) == list(range(CHAIN))
        counts = engine.reader.counts
        assert (counts.read, counts.failed) == (CHAIN, 0)
        assert (counts.nbytes < CHAIN * spec.block_bytes) == (codec != "raw"), "they are encoded"
        for at, block in enumerate(through_memory(client, spec, 0)):
            assert engine.block(pages[at]) == block
            if codec in ("raw", "fix4", "r32"):
                assert block == values(spec, keys[at])
    states = daemon.stats()["tiers"]["cold"]["states"]
    assert (states["direct"], states["not_direct"]) == (CHAIN, 0)


def test_frames_of_other_codecs_are_left_to_the_daemon(
    daemon_of: DaemonOf, engine_of: EngineOf, source: SourceOf, tmp_path: Path
) -> None:
    spec = spec_of("direct")
    daemon = stored(daemon_of, tmp_path / "one", spec, "zstd")
    engine = engine_of(spec)
    with daemon.connect() as client:
        space = client.open(spec)
        assert engine.load(space, space.keys(tokens(0)), source(engine)) == []


def test_calibrated_frames_of_a_reader_without_their_profile_are_left_to_the_daemon(
    daemon_of: DaemonOf, engine_of: EngineOf, source: SourceOf, tmp_path: Path
) -> None:
    spec = spec_of("direct")
    daemon = stored(daemon_of, tmp_path / "one", spec, "ecsq-mid")
    with daemon.connect() as client:
        space = client.open(spec)
        calibrated = calibration_of(space)
        assert calibrated is not None
        without = engine_of(spec)
        assert without.load(space, space.keys(tokens(0)), source(without)) == []
        other = msgspec.structs.replace(calibrated, profile=bytes(16))
        engine = engine_of(spec, calibrated=other)
        assert engine.load(space, space.keys(tokens(0)), source(engine)) == []
        assert engine.reader.counts.failed == CHAIN


def segments(folder: Path) -> list[Path]:
    return sorted(
        path for path in (folder / "disk").rglob("*") if path.is_file() and path.name.isdecimal()
    )


@pytest.mark.parametrize("codec", ["raw", "r32", "q8"])
def test_a_damaged_frame_is_a_miss_and_the_others_are_loaded(
    daemon_of: DaemonOf, engine_of: EngineOf, source: SourceOf, tmp_path: Path, codec: str
) -> None:
    """Each third block is damaged at another place: in its header, in its payload, or it is torn."""
    spec = spec_of("direct")
    daemon = stored(daemon_of, tmp_path / "one", spec, codec)
    engine = engine_of(spec)
    with daemon.connect() as client:
        space = client.open(spec)
        keys = space.keys(tokens(0))
        lease = read_directly(space, keys, engine.reader.codecs)
        damaged = set(range(0, CHAIN, 3))
        for at in damaged:
            frame = lease.frames[at]
            path = Path(f"/proc/self/fd/{frame.file.fd}").resolve()
            with path.open("r+b") as file:
                if at % 9 == 0:
                    file.seek(frame.header_at + 300)
                    file.write(b"\x13")
                elif at % 9 == 3:
                    file.seek(frame.payload_at + frame.payload_bytes - 1)
                    (last,) = file.read(1)
                    file.seek(frame.payload_at + frame.payload_bytes - 1)
                    file.write(bytes([last ^ 0x80]))
                else:
                    file.seek(frame.payload_at + PAGE)
                    file.write(bytes(PAGE))
        batch = engine.reader.read(lease, source(engine))
        assert {one.at for one in batch} == set(range(CHAIN)) - damaged
        engine.write(batch)
        content = engine.content()
        assert (content[:, sorted(damaged)] == UNTOUCHED).all()
        if codec == "raw":
            for one in batch:
                assert engine.block(one.at) == values(spec, keys[one.at])


def test_a_payload_that_changes_after_its_header_was_read_is_a_miss(
    daemon_of: DaemonOf,
    engine_of: EngineOf,
    source: SourceOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a segment that is reused during the read: the digest is that of the bytes on the device."""
    spec = spec_of("direct")
    daemon = stored(daemon_of, tmp_path / "one", spec, "raw")
    engine = engine_of(spec)
    pinned = source(engine)
    read = PinnedReads.read

    def changes(self: PinnedReads, frames, addresses, stream):  # type: ignore[no-untyped-def]
        path = Path(f"/proc/self/fd/{frames[5].file.fd}").resolve()
        with path.open("r+b") as file:
            file.seek(frames[5].payload_at)
            file.write(b"reused")
        return read(self, frames, addresses, stream)

    monkeypatch.setattr(PinnedReads, "read", changes)
    with daemon.connect() as client:
        space = client.open(spec)
        loaded = engine.load(space, space.keys(tokens(0)), pinned)
    assert loaded == [at for at in range(CHAIN) if at != 5]


def test_blocks_forgotten_during_the_read_are_misses(
    daemon_of: DaemonOf,
    engine_of: EngineOf,
    source: SourceOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = spec_of("direct")
    daemon = stored(daemon_of, tmp_path / "one", spec, "raw")
    engine = engine_of(spec)
    pinned = source(engine)
    read = PinnedReads.read
    with daemon.connect() as client, daemon.connect() as other:
        space = client.open(spec)
        keys = space.keys(tokens(0))

        def forgets(self: PinnedReads, frames, addresses, stream):  # type: ignore[no-untyped-def]
            other.open(spec).forget(keys[10:])
            return read(self, frames, addresses, stream)

        monkeypatch.setattr(PinnedReads, "read", forgets)
        assert engine.load(space, keys, pinned) == list(range(10))
        assert (engine.content()[:, 10:] == UNTOUCHED).all()


def test_a_file_that_became_shorter_is_a_miss(
    daemon_of: DaemonOf, engine_of: EngineOf, source: SourceOf, tmp_path: Path
) -> None:
    spec = spec_of("direct")
    daemon = stored(daemon_of, tmp_path / "one", spec, "raw")
    engine = engine_of(spec)
    with daemon.connect() as client:
        space = client.open(spec)
        for path in segments(tmp_path / "one"):
            with path.open("r+b") as file:
                file.truncate(PAGE * 40)
        assert len(engine.load(space, space.keys(tokens(0)), source(engine))) < CHAIN


def test_a_space_without_exponents_is_read_raw() -> None:
    assert codecs_for(spec_of(dtype="uint8")) == bytes([RAW])
    assert len(codecs_for(spec_of())) == 10
    assert len(codecs_for(spec_of(dtype="float8_e4m3fn"))) == 3


def test_a_lease_of_more_blocks_than_the_ring_has_places_is_refused(
    daemon_of: DaemonOf, engine_of: EngineOf, source: SourceOf, tmp_path: Path
) -> None:
    spec = spec_of("direct")
    daemon = stored(daemon_of, tmp_path / "one", spec, "raw")
    engine = engine_of(spec, ring_bytes=RING // 4)
    with daemon.connect() as client:
        space = client.open(spec)
        lease = read_directly(space, space.keys(tokens(0)), engine.reader.codecs)
        with pytest.raises(ValueError, match="16 frames, the ring has room for 8"):
            engine.reader.read(lease, source(engine))


def test_a_ring_without_room_for_a_block_is_refused(engine_of: EngineOf) -> None:
    engine = engine_of(spec_of())
    with pytest.raises(DirectReadsError, match="has no room"):
        DirectReader(engine.driver, spec_of(), 0, 0, ring_bytes=64 << 10)


# --- which way to read ------------------------------------------------------------------------------


def test_auto_names_the_reason_why_it_does_not_read_directly(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(spec_of())
    monkeypatch.setitem(__import__("sys").modules, "kvikio", None)
    with pytest.raises(
        DirectReadsError, match=r"kvikio is not installed.*through the daemon's memory"
    ):
        open_source("auto", engine.reader)
    source, why = open_source("on", engine.reader)
    assert source.name == "pinned memory" and "kvikio is not installed" in why
    source.close()


STATS = """GDS Version: 1.13.0.11
NVFS statistics(ver: 4.0)
Reads				: n={reads} ok={reads} err=0 readMiB=1 io_state_err=0
Writes				: n=7 ok=7 err=0 writeMiB=1
"""


def test_a_trial_read_must_be_counted(tmp_path: Path) -> None:
    stats = tmp_path / "stats"
    assert "nvidia-fs is not loaded" in direct_reads_fail(lambda: True, stats)
    stats.write_text("IO stats: Disabled\nReads				: err=0 io_state_err=0\n")
    assert "rw_stats_enabled" in direct_reads_fail(lambda: True, stats)
    stats.write_text(STATS.format(reads=4))
    assert "not counted" in direct_reads_fail(lambda: True, stats)
    assert direct_reads_fail(lambda: False, stats) == "the trial read failed"
    assert not direct_reads_fail(lambda: bool(stats.write_text(STATS.format(reads=5))), stats)
