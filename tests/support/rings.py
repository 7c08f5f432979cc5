"""Whether this kernel lets tests use io_uring: many containers do not."""

from __future__ import annotations

import os

from kvtier_kernels import Disk


def refused_ring() -> str:
    fd = os.eventfd(0)
    try:
        Disk(fd, "io_uring").stop()
    except OSError as error:
        return str(error)
    finally:
        os.close(fd)
    return ""


WHY_NO_RING = refused_ring()
