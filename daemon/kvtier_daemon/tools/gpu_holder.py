"""Holds memory of one GPU for the daemon, in a process of its own: the daemon never calls the CUDA driver.

It allocates the tenants' shares, sends their descriptors to the daemon, and waits. It maps nothing and makes
no context. When the daemon ends, it frees the memory and offers new memory to the next daemon, because
engines may still write to the old one.
"""

from __future__ import annotations

import logging
import os
import select
import time
from pathlib import Path
from typing import Final

from kvtier import wire
from kvtier.connection import Connection, connect
from kvtier.errors import KvtierError, ProtocolError, Refused, TierError
from kvtier.units import format_bytes
from kvtier_kernels.gpu_memory import GpuMemoryError, HeldGpu

log = logging.getLogger(__name__)

ANSWER_S: Final = 5.0
RETRY_S: Final = 1.0
REFUSED_S: Final = 10.0  # after a refusal, which only an operator can change


class Holder:
    """One GPU's memory, offered to the daemon at this socket, until the descriptor `stop` is readable."""

    def __init__(self, gpu: HeldGpu, nbytes: int, socket: Path, stop: int) -> None:
        self._gpu = gpu
        self._nbytes = nbytes
        self._socket = socket
        self._stop = stop
        self._handles: list[int] = []
        self._told = ""

    def run(self) -> None:
        """Hold until `stop`, for one daemon after another."""
        pause_s = 0.0
        while not self._stopped(pause_s):
            pause_s = RETRY_S
            try:
                self._hold()
            except (Refused, ProtocolError) as error:
                self._tell(f"the daemon refuses: {error}")
                pause_s = REFUSED_S
            except (KvtierError, GpuMemoryError) as error:
                self._tell(str(error))
            finally:
                self._release()

    def _tell(self, text: str) -> None:
        """Log this once, until something else happens."""
        if text != self._told:
            log.warning("GPU %s: %s; trying again", self._gpu.uuid, text)
        self._told = text

    def _stopped(self, within_s: float) -> bool:
        poll = select.poll()
        poll.register(self._stop, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    def _hold(self) -> None:
        """Offer memory to a daemon, and wait for its end or for `stop`."""
        sock = connect(str(self._socket), ANSWER_S, time.monotonic)
        connection = Connection(sock, time.monotonic, ANSWER_S)
        try:
            self._offer(connection)
            log.info("GPU %s: holding %s", self._gpu.uuid, format_bytes(self._nbytes))
            self._told = ""
            self._wait(connection)
        finally:
            connection.close(farewell=True)

    def _offer(self, connection: Connection) -> None:
        name = f"gpu holder {os.getpid()}"
        connection.wait(connection.send(wire.Hello(1, wire.SCHEMA, name, read_only=True)))
        offer = wire.HotOffer(2, self._gpu.uuid, self._nbytes, self._gpu.unit_bytes)
        shares = connection.wait(connection.send(offer))
        if not isinstance(shares, wire.HotShares):
            raise ProtocolError(f"the daemon answered HotOffer with {type(shares).__name__}")
        for number, (tenant, nbytes) in enumerate(shares.shares.items(), 3):
            try:
                handle, fd = self._gpu.allocate(nbytes)
            except GpuMemoryError as error:
                text = f"cannot allocate {format_bytes(nbytes)} for tenant {tenant}: {error}"
                why = "other programs use the GPU, or engines still have an earlier holder's memory"
                raise TierError(f"{text}; {why}") from error
            self._handles.append(handle)
            try:
                grant = wire.HotGrant(number, self._gpu.uuid, tenant, nbytes)
                connection.wait(connection.send_descriptor(grant, fd))
            finally:
                os.close(fd)

    def _wait(self, connection: Connection) -> None:
        poll = select.poll()
        poll.register(self._stop, select.POLLIN)
        poll.register(connection.fileno(), select.POLLIN)
        while self._stop not in dict(poll.poll()):
            connection.poll()  # raises Unavailable at its end
            while connection.extents:  # of this user's own tenant, which a holder does not use
                for fd in connection.extents.popleft()[2:]:
                    os.close(fd)

    def _release(self) -> None:
        while self._handles:
            try:
                self._gpu.release(self._handles.pop())
            except GpuMemoryError as error:
                log.error("GPU %s: cannot free memory: %s", self._gpu.uuid, error)


def hold(name: str, nbytes: int, socket: Path, stop: int) -> None:
    """Hold `nbytes` of the GPU of this name until `stop` is readable. Raises TierError without such a GPU."""
    try:
        gpu = HeldGpu(name)
    except GpuMemoryError as error:
        raise TierError(f"cannot hold memory of GPU {name}: {error}") from error
    if nbytes < gpu.unit_bytes:
        unit = format_bytes(gpu.unit_bytes)
        raise TierError(
            f"--size {format_bytes(nbytes)}: GPU {gpu.uuid} allocates in units of {unit}"
        )
    Holder(gpu, nbytes, socket, stop).run()
