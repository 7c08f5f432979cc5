"""What computing a prompt takes, learned from steps as they come."""

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


def test_both_terms_are_learned() -> None:
    model = Recompute()
    assert model.seconds(1, 0) == float("inf")
    steps(model, 200)
    assert model.fit == (pytest.approx(A, rel=0.05), pytest.approx(B, rel=0.05))
    assert model.seconds(4096, 16_384) == pytest.approx(predict((A, B), 4096, 16_384), rel=0.05)
    assert model.seconds(4096, 16_384, 1.5) == pytest.approx(1.5 + model.seconds(4096, 16_384))


def test_a_first_step_that_is_slow_and_pauses_since_spoil_nothing() -> None:
    model = Recompute()
    model.stepped(2048, 0.0, 20.0)  # it compiles
    steps(model, 300)
    for _ in range(3):
        model.stepped(8192, 30_000.0, 60.0)
    assert model.seconds(4096, 16_384) == pytest.approx(predict((A, B), 4096, 16_384), rel=0.1)


def test_a_machine_that_has_become_slower_for_good_is_noticed() -> None:
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
