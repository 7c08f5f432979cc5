"""Turns of tenants in the daemon's loop, with a loop and a clock of the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

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


def test_the_policy_gets_the_rest_in_turns_between_which_the_other_tenant_is_served() -> None:
    loop, turns, a, b = make()
    log: list[str] = []
    left = [4]

    def settle_portion() -> bool:
        log.append("portion")
        loop.now += TURN_S
        left[0] -= 1
        return not left[0]

    settling = Settling(turns, a, settle_portion, lambda: loop.now)
    settling.settle()
    turns.spend(a, TURN_S)
    for _ in range(3):
        turns.wait(b, Tells(loop, turns, b, "b", log))
    while loop.calls:
        loop.step()
    # The first portion belongs to the turn of the request. One turn of each tenant in each round after it.
    assert log[0] == "portion"
    assert sorted(log[1:3]) == sorted(log[3:5]) == sorted(log[5:7]) == ["b", "portion"]
    assert not left[0] and a.served_s == 4 * TURN_S


def test_the_sessions_of_a_tenant_wait_until_its_policy_has_everything() -> None:
    loop, turns, a, _ = make()
    log: list[str] = []
    left = [3]

    def settle_portion() -> bool:
        log.append("portion")
        loop.now += TURN_S / 4
        left[0] -= 1
        return not left[0]

    settling = Settling(turns, a, settle_portion, lambda: loop.now)
    turns.wait(a, Tells(loop, turns, a, "a", log))
    settling.settle()
    settling.settle()
    assert len(a.waiting) == 2  # it waits once
    while loop.calls:
        loop.step()
    assert log == ["portion", "portion", "portion", "a"]


def test_nothing_is_queued_if_one_portion_is_enough() -> None:
    loop, turns, a, _ = make()
    Settling(turns, a, lambda: True, lambda: loop.now).settle()
    assert not loop.calls and not a.waiting
