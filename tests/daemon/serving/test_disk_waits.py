"""How long the saves of a session may wait for the disk."""

from __future__ import annotations

from kvtier_daemon.serving.requests.saves import ASKS_S, WAIT_S, WAIT_SHARE, DiskWaits

STEP_S = 0.02


def waited(waits: DiskWaits, now: float, until: float) -> float:
    """Let one save after another wait as long as it may; return the seconds."""
    total_s = 0.0
    while now < until:
        if waits.may_wait(now):
            waits.begin()
            total_s += STEP_S
        now += STEP_S
    return total_s


def test_saves_wait_a_limited_time_at_once_and_a_share_of_the_time_in_the_long_run() -> None:
    first = waited(DiskWaits(0.0), 0.0, WAIT_S)
    assert first > 0.99 * WAIT_S
    long_s = 100 * WAIT_S
    total_s = waited(DiskWaits(0.0), 0.0, long_s)
    assert abs(total_s - WAIT_SHARE * long_s) < 2 * WAIT_S


def test_a_session_that_did_not_wait_does_not_wait_longer_later() -> None:
    waits = DiskWaits(0.0)
    later = 1000 * WAIT_S
    assert waits.may_wait(later)
    total_s = waited(waits, later, later + 3 * WAIT_S)
    assert total_s < WAIT_S + WAIT_SHARE * 3 * WAIT_S + 1


def test_a_client_that_does_not_ask_again_did_not_wait_all_the_time() -> None:
    waits = DiskWaits(0.0)
    assert waits.may_wait(0.0)
    waits.begin()
    assert waits.may_wait(1000 * WAIT_S)
    rest_s = waited(waits, 1000 * WAIT_S, 1001 * WAIT_S)
    assert abs(rest_s - (WAIT_S - ASKS_S)) < 0.5 * ASKS_S + WAIT_SHARE * WAIT_S
