"""A block's life as a table: which event takes it from which state to which.

The native store holds the same table (`kvtier_kernels.lifecycle`); a test compares the two.
"""

from enum import Enum


class State(Enum):
    """What a block is; ABSENT blocks have no record."""

    ABSENT = "absent"
    WRITING = "writing"  # has a slot and one writer; not matched
    READY = "ready"  # matched, leased, evicted
    DOOMED = "doomed"  # forgotten while leased: not matched, kept for those who hold it
    QUARANTINED = "quarantined"  # its writer may be dead but still copying: the slot is not reused
    COLD = "cold"  # has a frame on disk and no slot
    PROMOTING = "promoting"  # has a slot that a read from the disk fills


# "forget_leased" is `forget` of a block with leases; "last_unlease" ends the last of them. A READY block
# that has a frame too is clean: "evict_framed" is its eviction, and "lost" is what happens to the frame of a
# COLD one when its segment is used again or it is forgotten. "forget_promoting" leaves the slot to the read
# that can't be called back; its end is then "gone", whatever it brought.
NEXT: dict[tuple[State, str], State] = {
    (State.ABSENT, "reserve"): State.WRITING,
    (State.WRITING, "commit"): State.READY,
    (State.WRITING, "abort"): State.ABSENT,
    (State.WRITING, "quarantine"): State.QUARANTINED,
    (State.QUARANTINED, "gone"): State.ABSENT,
    (State.READY, "evict"): State.ABSENT,
    (State.READY, "evict_framed"): State.COLD,
    (State.READY, "forget"): State.ABSENT,
    (State.READY, "forget_leased"): State.DOOMED,
    (State.DOOMED, "last_unlease"): State.ABSENT,
    (State.ABSENT, "restore"): State.COLD,
    (State.COLD, "promote"): State.PROMOTING,
    (State.COLD, "lost"): State.ABSENT,
    (State.PROMOTING, "promoted"): State.READY,
    (State.PROMOTING, "unpromoted"): State.COLD,
    (State.PROMOTING, "spoilt"): State.ABSENT,
    (State.PROMOTING, "forget_promoting"): State.QUARANTINED,
}
