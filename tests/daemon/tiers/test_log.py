"""A log of segments: which segment is written, which is reclaimed, and that a footer always fits."""

from __future__ import annotations

import random

import pytest

from kvtier.frame import PAGE
from kvtier_daemon.tiers.cold.segment import ENTRY, Trailer
from kvtier_daemon.tiers.cold.segment_log import Segment, SegmentLog, Stage
from support.specs import spec_of

TENANT = b"t" * 32


def a_log(count: int = 3, nbytes: int = 64 * PAGE) -> SegmentLog:
    log = SegmentLog()
    for number in range(count):
        log.add(Segment(number, f"{number}.segment", -1, nbytes))
    return log


def opened(log: SegmentLog, sequence: int = 0) -> Segment:
    segment = log.begin(epoch=7 + sequence, sequence=sequence, owner=TENANT)
    log.begun(segment)
    return segment


def test_segments_are_used_again_in_the_order_in_which_they_were_begun() -> None:
    log = a_log()
    begun = []
    for turn in range(9):
        if not log.free:
            leaving = log.reclaim()
            assert leaving is begun[turn - 3]
            log.freeing(leaving)
            log.freed(leaving)
        segment = opened(log, turn)
        begun.append(segment)
        assert log.seal() is segment
        log.now_sealed(segment)
        assert len(log) == 3
    assert [segment.number for segment in begun] == [0, 1, 2] * 3
    assert begun[8].head is not None and begun[8].head.sequence == 8


def test_a_segment_that_could_not_be_sealed_is_reclaimed_like_a_full_one() -> None:
    log = a_log(1)
    segment = opened(log)
    assert segment.table.take(PAGE, (b"s" * 32, spec_of("one")))
    log.failed(segment)
    assert log.open is None and segment.stage is Stage.SEALED
    assert log.reclaim() is segment
    assert log.reclaim() is None
    log.freeing(segment)
    log.freed(segment)
    again = opened(log, 1)
    assert again is segment and not len(again.table)


def test_a_segment_with_reads_in_progress_is_not_reused() -> None:
    log = a_log(1)
    segment = opened(log)
    log.now_sealed(log.seal())
    log.reclaim()
    segment.reading = 1
    with pytest.raises(AssertionError):
        log.freeing(segment)
        log.freed(segment)


@pytest.mark.parametrize("seed", range(20))
def test_frames_are_placed_so_that_the_footer_fits(seed: int) -> None:
    chance = random.Random(seed)
    spaces = [(bytes([n]) * 32, spec_of(f"a space of some length {n}")) for n in range(12)]
    log = a_log(1, chance.randrange(16, 200) * PAGE)
    segment = opened(log)
    last = lost = 0
    while True:
        size = chance.randrange(1, 6) * PAGE
        space = chance.choice(spaces)
        place = segment.table.take(size, space)
        if place is None:
            break
        assert place.page * PAGE >= last and segment.table.spaces[place.space] == space
        last = place.page * PAGE + size
        if not (in_vain := chance.random() < 0.1 and seed % 2):
            segment.table.wrote(place.at, place.page.to_bytes(2, "little") * (ENTRY.size // 2))
        lost += in_vain
    assert segment.head is not None and segment.table.end == last
    segment.table.failed = lost > 0
    at, text = segment.table.footer(segment.head)
    assert at >= last and at + len(text) == segment.nbytes
    trailer = Trailer.decode(text[-PAGE:], segment.head)
    assert trailer.entries == len(segment.table) - lost


def test_has_place_is_true_only_without_a_reclaim() -> None:
    log = a_log(2)
    assert log.has_place
    segment = log.begin(epoch=1, sequence=0, owner=TENANT)
    log.begin(epoch=2, sequence=1, owner=TENANT)
    assert log.has_place, "two segments are being begun"
    log.begun(segment)
    log.now_sealed(log.seal())
    assert log.has_place, "the other is still being begun"
    log.others.clear()
    assert not log.has_place
    log.reclaim()
    assert not log.has_place, "a segment that is reclaimed accepts no frames"
