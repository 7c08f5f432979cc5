"""Turns of tenants in the daemon's loop, with a loop and a clock of the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from kvtier_daemon.serving.turns import TURN_S, Settling, Share, Turns


class SteppedLoop:
    """Runs one scheduled call for each step."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.now = 0.0

    def call_soon(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def step(self) -> None:
        self.calls.pop(0)()


class Tells:
    """Takes this long for a turn, and notes it."""

    def __init__(
        self, loop: SteppedLoop, turns: Turns, share: Share, name: str, log: list[str]
    ) -> None:
        self._loop, self._turns, self._share, self._name, self._log = loop, turns, share, name, log

    def turn(self) -> None:
        self._log.append(self._name)
        self._loop.now += TURN_S
        self._turns.spend(self._share, TURN_S)


def make() -> tuple[SteppedLoop, Turns, Share, Share]:
    loop = SteppedLoop()
    turns = Turns(cast(Any, loop), {"a": 1, "b": 1})
    return loop, turns, turns.shares["a"], turns.shares["b"]


class Uses:
    """A queue of this many portions, each of which takes this long."""

    def __init__(self, loop: SteppedLoop, portions: int, portion_s: float, log: list[str]) -> None:
        self._loop, self.left, self._portion_s, self._log = loop, portions, portion_s, log

    def settle_short(self) -> bool:
        return self.left <= 1 and self.settle_portion()

    def settle_portion(self) -> bool:
        self._log.append("portion")
        self._loop.now += self._portion_s
        self.left -= 1
        return not self.left


def test_the_policy_gets_many_blocks_in_turns_between_which_the_other_tenant_is_served() -> None:
    loop, turns, a, b = make()
    log: list[str] = []
    uses = Uses(loop, 3, TURN_S, log)
    Settling(turns, a, uses, lambda: loop.now).settle()
    assert not log, "the turn of the request is long enough"
    turns.spend(a, TURN_S)
    for _ in range(3):
        turns.wait(b, Tells(loop, turns, b, "b", log))
    while loop.calls:
        loop.step()
    # One turn of each tenant in each round.
    assert sorted(log[:2]) == sorted(log[2:4]) == sorted(log[4:]) == ["b", "portion"]
    assert not uses.left and a.served_s == 4 * TURN_S


def test_the_sessions_of_a_tenant_wait_until_its_policy_has_everything() -> None:
    loop, turns, a, _ = make()
    log: list[str] = []
    settling = Settling(turns, a, Uses(loop, 3, TURN_S / 4, log), lambda: loop.now)
    turns.wait(a, Tells(loop, turns, a, "a", log))
    settling.settle()
    settling.settle()
    assert len(a.waiting) == 2  # it waits once
    while loop.calls:
        loop.step()
    assert log == ["portion", "portion", "portion", "a"]


def test_a_short_queue_is_passed_on_in_the_turn_of_the_request() -> None:
    loop, turns, a, _ = make()
    log: list[str] = []
    Settling(turns, a, Uses(loop, 1, 0.0, log), lambda: loop.now).settle()
    assert log == ["portion"] and not loop.calls and not a.waiting


def test_an_exception_in_a_turn_leaves_the_turns_of_the_others() -> None:
    loop, turns, a, b = make()
    log: list[str] = []

    class Fails:
        def turn(self) -> None:
            raise ValueError("a policy")

    turns.wait(a, Fails())
    turns.wait(a, Tells(loop, turns, a, "a", log))
    turns.wait(b, Tells(loop, turns, b, "b", log))
    with pytest.raises(ValueError, match="a policy"):
        loop.step()
    while loop.calls:
        loop.step()
    assert sorted(log) == ["a", "b"]
