"""The time to recompute a prompt, learned from the engine's steps."""

from __future__ import annotations

import random

import pytest

from kvtier.recompute import Recompute, predict

A, B = 2e-5, 3e-9


def steps(model: Recompute, count: int, a: float = A, b: float = B, seed: int = 1) -> None:
    dice = random.Random(seed)
    for _ in range(count):
        tokens, context = dice.choice([64, 512, 2048, 8192]), dice.random() * 60_000
        model.stepped(tokens, context, tokens * (a + b * context) * dice.uniform(0.95, 1.05))


def test_the_linear_and_the_quadratic_term_are_learned() -> None:
    model = Recompute()
    assert model.seconds(1, 0) == float("inf")
    steps(model, 200)
    assert model.fit == (pytest.approx(A, rel=0.05), pytest.approx(B, rel=0.05))
    assert model.seconds(4096, 16_384) == pytest.approx(predict((A, B), 4096, 16_384), rel=0.05)
    assert model.seconds(4096, 16_384, 1.5) == pytest.approx(1.5 + model.seconds(4096, 16_384))


def test_a_slow_first_step_and_pauses_do_not_affect_the_estimate() -> None:
    model = Recompute()
    model.stepped(2048, 0.0, 20.0)  # the engine compiles
    steps(model, 300)
    for _ in range(3):
        model.stepped(8192, 30_000.0, 60.0)
    assert model.seconds(4096, 16_384) == pytest.approx(predict((A, B), 4096, 16_384), rel=0.1)


def test_a_permanently_slower_machine_is_detected() -> None:
    model = Recompute()
    steps(model, 200)
    steps(model, 400, 6 * A, 6 * B, seed=2)
    assert model.seconds(4096, 16_384) == pytest.approx(6 * predict((A, B), 4096, 16_384), rel=0.1)


def test_a_request_that_shares_its_steps_takes_longer() -> None:
    model = Recompute()
    steps(model, 100)
    alone = model.seconds(4096, 0)
    for _ in range(200):
        model.shared(512, 2048)
    assert model.seconds(4096, 0) == pytest.approx(4 * alone, rel=0.01)
    assert model.seconds(4096, 0, 1.0) == pytest.approx(1.0 + 4 * alone, rel=0.01)
