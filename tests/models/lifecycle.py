"""The states of a block as a table: which event leads from which state to which.

The native store contains the same table (`kvtier_kernels.lifecycle`); a test compares the two.
"""

from enum import Enum


class State(Enum):
    """The state of a block; ABSENT blocks have no record."""

    ABSENT = "absent"
    WRITING = "writing"  # has a slot and one writer; not matched
    READY = "ready"  # matched, leased, evicted
    DOOMED = "doomed"  # forgotten while leased: not matched, kept until the last lease ends
    QUARANTINED = "quarantined"  # its writer may be dead but still copying: the slot is not reused
    COLD = "cold"  # has a frame on disk and no slot
    PROMOTING = "promoting"  # has a slot that a read from the disk fills


# "forget_leased" is `forget` of a block with leases; "last_unlease" ends the last of them. A READY
# block that also has a frame is clean: "evict_framed" is its eviction. "lost" is the loss of a
# COLD block's frame: its segment was reused, or the block was forgotten. "forget_promoting" keeps
# the slot until the read ends, because a read cannot be cancelled; then "gone" follows, whatever
# the read returned.
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
