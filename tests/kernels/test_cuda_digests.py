"""The digests of a device's memory equal those of the processor, which frames contain."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

import kvtier_kernels as kernels
from kvtier_kernels.cuda import CudaError, Event, codecs, digests
from kvtier_kernels.cuda.digests import RANGE, Digester
from support.cuda_codecs import DeviceCodecs
from support.fake_cuda import FakeCuda

MOST = 1_200


@pytest.fixture
def device(
    device_codecs: DeviceCodecs, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[DeviceCodecs, Digester]]:
    # The same compiler as the codecs': NVRTC, or none for the driver without a device.
    monkeypatch.setattr(digests, "compile_kernel", codecs.compile_kernel)
    digester = Digester(device_codecs.driver, MOST)
    yield device_codecs, digester
    digester.close()


def digested(device: tuple[DeviceCodecs, Digester], texts: list[bytes], shifts: list[int]) -> None:
    """Each text at its own address, after as many bytes as its shift."""
    memory, digester = device
    rows = [
        (memory._put(np.frombuffer(text, np.uint8), shift), len(text))
        for text, shift in zip(texts, shifts, strict=True)
    ]
    digester.start(np.array(rows, RANGE), memory.stream)
    found = digester.finish()
    for text, shift, one in zip(texts, shifts, found, strict=True):
        assert one.tobytes() == kernels.xxh3_128(text), f"{len(text)} bytes, shifted by {shift}"
    memory._free()


def test_digests_of_all_short_lengths_equal_those_of_the_processor(
    device: tuple[DeviceCodecs, Digester],
) -> None:
    chance = random.Random(1)
    lengths = range(1_101)
    digested(device, [chance.randbytes(n) for n in lengths], [n % 9 for n in lengths])


@pytest.mark.parametrize("shift", range(8))
def test_digests_around_the_ends_of_runs_and_at_every_alignment(
    device: tuple[DeviceCodecs, Digester], shift: int
) -> None:
    """A run has 1,024 bytes; the last 64 bytes are taken again, with other keys."""
    chance = random.Random(shift)
    lengths = [
        1_024 * runs + 64 * stripes + more
        for runs in (1, 2, 3, 9)
        for stripes in (0, 1, 15)
        for more in (-1, 0, 1, 7, 8, 9, 63)
    ]
    lengths += [chance.randrange(1_000_000, 2_000_000) for _ in range(2)]
    digested(device, [chance.randbytes(n) for n in lengths], [shift] * len(lengths))


def test_long_ranges_that_many_warps_add_up_have_the_same_digest(
    device: tuple[DeviceCodecs, Digester], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for the sums lasts for the first ones only; the others have one warp."""
    chance = random.Random(5)
    runs, unit = digests.LONG_RUNS, digests.UNIT_RUNS
    lengths = [
        1_024 * n + more for n in (runs - 1, runs, runs + 1, runs + unit) for more in (0, 1, 65)
    ]
    texts = [chance.randbytes(n) for n in lengths]
    digested(device, texts, [n % 8 for n in range(len(lengths))])
    monkeypatch.setattr(digests, "SUMS_BYTES", 5 * runs * digests.SUM_BYTES)
    table, units = device[1]._tables(np.array([(8, n) for n in lengths], RANGE))
    # (n - 1) // 1,024 runs: four ranges fit, of those that are long enough.
    assert np.flatnonzero(table["sums"]).tolist() == [4, 5, 6, 7]
    assert sorted({int(one["range"]) for one in units}) == [4, 5, 6, 7]
    digested(device, texts, [0] * len(lengths))


def test_bytes_around_a_range_do_not_matter(device: tuple[DeviceCodecs, Digester]) -> None:
    """Ranges inside of one text, as the entries of a payload are."""
    memory, digester = device
    chance = random.Random(2)
    text = chance.randbytes(70_000)
    address = memory._put(np.frombuffer(text, np.uint8), 3)
    cuts = sorted(chance.sample(range(70_001), 200))
    pairs = list(itertools.pairwise(cuts))
    rows = np.array([(address + start, end - start) for start, end in pairs], RANGE)
    digester.start(rows, memory.stream)
    for (start, end), one in zip(pairs, digester.finish(), strict=True):
        assert one.tobytes() == kernels.xxh3_128(text[start:end])
    memory._free()


def test_a_changed_bit_changes_the_digest(device: tuple[DeviceCodecs, Digester]) -> None:
    memory, digester = device
    chance = random.Random(3)
    text = bytearray(chance.randbytes(5_000))
    wanted = kernels.xxh3_128(text)
    rows = []
    for _ in range(300):
        at, bit = chance.randrange(len(text)), 1 << chance.randrange(8)
        text[at] ^= bit
        rows.append((memory._put(np.frombuffer(bytes(text), np.uint8), 1), len(text)))
        text[at] ^= bit
    digester.start(np.array(rows, RANGE), memory.stream)
    assert wanted not in {one.tobytes() for one in digester.finish()}
    memory._free()


def test_a_batch_is_as_large_as_was_allocated(device: tuple[DeviceCodecs, Digester]) -> None:
    memory, digester = device
    empty = kernels.xxh3_128(b"")
    for count in (0, MOST, 1):
        digester.start(np.zeros(count, RANGE), memory.stream)
        assert [one.tobytes() for one in digester.finish()] == [empty] * count
    with pytest.raises(ValueError, match="1201, at most 1200 fit: pass them in several batches"):
        digester.start(np.zeros(MOST + 1, RANGE), memory.stream)


def test_a_started_batch_follows_its_stream_and_allocates_nothing(
    fake_cuda: FakeCuda, device: tuple[DeviceCodecs, Digester]
) -> None:
    memory, digester = device
    text = random.Random(4).randbytes(3_000)
    address = memory._put(np.full(3_000, 0xEE, np.uint8))
    source = memory._put(np.frombuffer(text, np.uint8))
    before = fake_cuda.live()
    fake_cuda.hold()
    memory.driver.copy(address, source, 3_000, memory.stream)
    digester.start(np.array([(address, 3_000)], RANGE), memory.stream)
    fake_cuda.hold(False)
    assert digester.finish()[0].tobytes() == kernels.xxh3_128(text)
    assert fake_cuda.live() == before
    memory._free()


def test_a_digester_that_is_closed_leaves_nothing(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = fake_cuda.driver()
    monkeypatch.setattr(digests, "compile_kernel", lambda text, architecture: b"host\0")
    before = fake_cuda.live()
    stream = driver.stream()
    digester = Digester(driver, 4)
    fake_cuda.hold()
    digester.start(np.zeros(3, RANGE), stream)
    fake_cuda.hold(False)
    digester.close()  # waits
    driver.try_call("cuStreamDestroy_v2", stream)
    assert fake_cuda.live() == before
    driver.close()


def test_a_batch_whose_wait_was_interrupted_is_still_in_progress(
    fake_cuda: FakeCuda, device: tuple[DeviceCodecs, Digester], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device may still read the ranges, and write the results: `close` must wait for it."""
    memory, digester = device
    text = random.Random(6).randbytes(4_096)
    address, into = memory._put(np.frombuffer(text, np.uint8)), memory._room(1 << 13, 0)
    rows = np.array([(address, len(text), 0, -1, 0, 0, 0, 0)], codecs.RAW_PART)
    payloads = np.array([(into, 1 << 13)], codecs.PAYLOAD)
    interrupted = []

    def interrupt(_: Event) -> None:
        interrupted.append(True)
        raise KeyboardInterrupt

    fake_cuda.hold()
    digester.start(np.array([(address, len(text))], RANGE), memory.stream)
    memory.coder.encode(codecs.R32, 0, rows, payloads, memory.stream)
    with monkeypatch.context() as patched:
        patched.setattr(Event, "wait", interrupt)
        for one in (digester, memory.coder):
            with pytest.raises(KeyboardInterrupt):
                one.finish()
    fake_cuda.hold(False)
    assert digester.finish()[0].tobytes() == kernels.xxh3_128(text)
    assert memory.coder.finish()["kept"].tolist() == [1]  # random bytes
    assert len(interrupted) == 2
    memory._free()


def test_ranges_outside_of_the_device_s_memory_break_it(
    fake_cuda: FakeCuda, device: tuple[DeviceCodecs, Digester]
) -> None:
    memory, digester = device
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):  # in this call or the next one
        digester.start(np.array([(64, 100)], RANGE), memory.stream)
        digester.finish()
    fake_cuda.library.fake_mend()
