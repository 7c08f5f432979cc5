"""The copies of blocks in the memory of one GPU, as the store must keep them: which blocks have a copy, which
copies are being written, and in which order they were used. One slot size."""

from __future__ import annotations

GRANTED, PRESENT, IN_PROGRESS, NO_ROOM = 0, 1, 2, 4


class HotModel:
    """A list of blocks in the order of their use, and a set of those that are being written."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.ready: list[int] = []  # by last use, the oldest first
        self.writing: set[int] = set()
        self.evicted = 0

    def reserve(self, ids: list[int], evict: bool, leased: set[int]) -> list[int]:
        answers = []
        for one in ids:
            if one in self.ready:
                self.use(one)
            known = (
                PRESENT if one in self.ready else IN_PROGRESS if one in self.writing else GRANTED
            )
            answers.append(known)
        wanted = answers.count(GRANTED)
        while evict and self.free < wanted:
            victim = next((one for one in self.ready if one not in leased), None)
            if victim is None:
                break
            self.ready.remove(victim)
            self.evicted += 1
        for at, one in enumerate(ids):
            if answers[at] == GRANTED:
                if not self.free:
                    answers[at] = NO_ROOM
                    continue
                self.writing.add(one)
        return answers

    @property
    def free(self) -> int:
        return self.slots - len(self.ready) - len(self.writing)

    def use(self, one: int) -> None:
        if one in self.ready:
            self.ready.remove(one)
            self.ready.append(one)

    def end(self, ids: list[int], good: bool) -> None:
        self.writing -= set(ids)
        self.ready += ids if good else []

    def drop(self, one: int) -> None:
        """The block has left memory."""
        if one in self.ready:
            self.ready.remove(one)
