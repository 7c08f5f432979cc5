"""Whether this kernel lets tests use io_uring, and lock memory for it: many containers do not."""

from __future__ import annotations

import os
import resource

from kvtier_kernels import Disk

LOCKED_BYTES = 2 << 30  # by tests that run at the same time


def refused_ring() -> str:
    fd = os.eventfd(0)
    try:
        Disk(fd, "io_uring").stop()
    except OSError as error:
        return str(error)
    finally:
        os.close(fd)
    return ""


def refused_lock() -> str:
    """All memory that a user's processes lock counts together, except root's."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if os.geteuid() == 0 or limit == resource.RLIM_INFINITY or limit >= LOCKED_BYTES:
        return ""
    return f"RLIMIT_MEMLOCK is {limit} bytes for all processes of uid {os.geteuid()}"


WHY_NO_RING = refused_ring()
WHY_NO_LOCK = refused_lock()
