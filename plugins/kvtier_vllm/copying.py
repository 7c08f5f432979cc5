"""A save as a rank's thread and its step see it, and what is missing of it in the end."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from kvtier_vllm.messages import Hole, Save

if TYPE_CHECKING:
    from kvtier_kernels.cuda import Event

# What leaves blocks of a save out, and which of it would do so again.
DROPS = ("drop:error", "drop:no_daemon", "drop:overwritten", "drop:lost")
FINAL = ("drop:error", "not_saved:no_room")
GROWS = "not_saved:growing"
HOLES = (*DROPS, "not_saved:no_room", "not_saved:leaving", GROWS)


class Overwritten(Exception):  # noqa: N818
    """The pages of a save are somebody else's now."""


class Copying:
    """A save as its thread and the step see it. It is copied a piece at a time: what has not begun may be
    called off, and one piece is waited for, some milliseconds. The daemon is never asked within one."""

    def __init__(self, save: Save, after: Event | None, fleeting: bool) -> None:
        self.save = save
        self.after = after
        # Of what is fleeting, whose pages are given away soon, whoever else comes.
        self._over = threading.Event() if fleeting else None
        self._off = False
        self._piece = threading.Lock()

    def __enter__(self) -> None:
        self._piece.acquire()
        if self._off:
            self._piece.release()
            raise Overwritten

    def __exit__(self, *_: object) -> None:
        self._piece.release()

    def end(self, within_s: float = 0.0) -> None:
        """From now on nothing is copied from these pages. What is fleeting may take so long before, once."""
        if self._over is not None and not self._off and within_s > 0.0:
            self._over.wait(within_s)
        self._off = True
        with self._piece:
            pass

    def over(self) -> None:
        """It has ended, whatever came of it."""
        self._off = True
        if self._over is not None:
            self._over.set()


def take_hole(counts: Counter[str]) -> Hole | None:
    """What is missing by these counts of a save, with its drops, which are taken out of them."""
    if not any(counts[why] for why in HOLES):
        return None
    again = not any(counts[why] for why in FINAL)
    grows = not any(counts[why] for why in HOLES if why != GROWS)
    drops = Counter({why: counts.pop(why) for why in list(counts) if why in DROPS})
    return Hole(again, drops, grows)
