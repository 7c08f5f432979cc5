"""The choice of steps and tables."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier_daemon.calibration import rate
from kvtier_daemon.codec import profile as files
from models.codecs import inverses, step_of, steps
from models.kernels import lossy


def samples_of(tokens: int = 4096, channels: int = 32, seed: int = 0) -> rate.Samples:
    """Each channel with its own deviation, from a sixteenth to four."""
    chance = np.random.default_rng(seed)
    deviation = 2.0 ** np.linspace(-4, 2, channels)
    return (chance.standard_normal((tokens, channels)) * deviation).astype(np.float32)


def test_steps_equal_those_of_profiles() -> None:
    every = np.arange(256)
    assert np.allclose(rate.steps(every), list(map(step_of, range(256))), rtol=1e-7)
    assert 2 * rate.REACH + 2 == files.LIMIT_SYMBOLS


@pytest.mark.parametrize("symbols", [4, 7, 32])
def test_shares_sum_to_256_and_are_close_to_the_entropy(symbols: int) -> None:
    chance = np.random.default_rng(symbols)
    for _ in range(20):
        hits = chance.dirichlet(np.full(symbols, 2.0)) * 1000
        found = np.frombuffer(rate.shares(hits.tolist()), np.uint8)
        assert found.sum() == 256 and found.min() >= 1
        share = hits / hits.sum()
        entropy = -(share * np.log2(share)).sum()
        assert -(share * np.log2(found / 256)).sum() < entropy + 0.02


def test_shares_for_a_single_symbol_leave_one_for_each_other() -> None:
    assert rate.shares([0, 1000.0, 0, 0]) == bytes([1, 253, 1, 1])


def test_rare_symbols_are_encoded_as_escapes() -> None:
    counts = np.zeros(2 * rate.REACH + 2)
    counts[rate.REACH - 2 : rate.REACH + 3] = [0.2, 1000, 3000, 1000, 0.2]
    table = rate.tabled(counts)
    assert len(table) == 4
    bits = rate.lengths(table)
    assert bits[rate.REACH] < 1 and bits[-1] == bits[0] == 8 - np.log2(table[-1]) + 16
    counts[rate.REACH + 2] = 100
    assert len(rate.tabled(counts)) == 6
    assert rate.tabled(counts)[-1] == 1
    counts[-1] = 1000
    assert rate.tabled(counts)[-1] > 30


def test_bits_are_saved_if_their_price_is_higher() -> None:
    measured = rate.measure(samples_of(), np.ones(32))
    found = [rate.choose(measured, price) for price in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)]
    bits, losses = [one.bits for one in found], [one.loss for one in found]
    assert bits == sorted(bits, reverse=True) and losses == sorted(losses)
    assert bits[0] > bits[-1] + 2


def test_channels_with_more_weight_get_finer_steps() -> None:
    samples = samples_of()
    samples /= samples.std(0)
    weights = np.ones(32)
    weights[5], weights[6] = 100, 0.01
    chosen = rate.choose(rate.measure(samples, weights), 0.05)
    others = np.delete(chosen.exponents, [5, 6])
    assert chosen.exponents[5] < others.min() and chosen.exponents[6] > others.max()


def test_predicted_bits_and_loss_equal_those_of_the_encoder() -> None:
    samples = samples_of()
    chosen = rate.choose(rate.measure(samples, np.ones(32)), 1e-3)
    exponents = chosen.exponents.tobytes()
    quantizer = lossy.Quantizer(
        np.array(steps(exponents), "f4"), np.array(inverses(exponents), "f4")
    )
    fixed = (
        lossy.Shape(1, 32),
        0,
        np.zeros(32, "f4"),
        quantizer,
        list(chosen.table),
        None,
        lossy.FP32,
    )
    text = lossy.encode_ecsq(*fixed, 0, samples.tobytes())
    assert text is not None
    streams = lossy.HEADER.unpack_from(text)[2]
    states = 32 * 2 * streams  # of the 4 bytes of each lane, on average 2 are bits of symbols
    bits = 8 * (len(text) - lossy.HEADER.size - streams * lossy.STREAM.size - states) / samples.size
    assert abs(bits - chosen.bits) < 0.02
    back = np.frombuffer(lossy.decode_ecsq(*fixed, text, samples.nbytes), "f4").reshape(-1, 32)
    loss = ((back - samples).astype(np.float64) ** 2).mean(0).sum()
    assert abs(loss / chosen.loss - 1) < 1e-3


@pytest.mark.parametrize("value", [0.0, 3.0, 1e-30])
def test_channels_without_any_deviation_have_steps_too(value: float) -> None:
    samples = np.full((64, 4), value, np.float32)
    chosen = rate.choose(rate.measure(samples - samples.mean(0), np.zeros(4)), 1e-6)
    assert sum(chosen.table) == 256 and chosen.loss == 0 and chosen.bits < 0.1
