"""The exceptions of kvtier. They report conditions outside the program; bugs in kvtier are assertions.

    KvtierError
    ├── ConfigError       the configuration, or the machine under it, does not allow a start
    ├── Unavailable       no daemon answers in time
    ├── ProtocolError     the peer sent an invalid message
    ├── Refused           the daemon refused the request, with a code
    ├── NotReady          the daemon's memory is not complete within the deadline; also a TimeoutError
    ├── InvalidArgument   an argument of the wrong type or range; also a ValueError and a TypeError
    ├── ViewsInUse        an object still refers to released slots; also a BufferError
    ├── StaleLease        the lease has ended; the slots may contain other blocks
    ├── SpoiltBlocks      a block was overwritten after its save
    ├── FrameError        a stored block is damaged
    ├── ProfileError      a calibration profile is damaged, or belongs to another model
    ├── TierError         a tier cannot be used, or failed
    └── SpecError         an incomplete or contradictory description of a cache

A message is one line: what failed, where, and what to do.
"""


class KvtierError(Exception):
    """The base class of all exceptions of kvtier. An engine treats it as a cache miss."""


class ConfigError(KvtierError):
    """The configuration or the machine does not allow a start. The message has the key and the remedy."""


class Unavailable(KvtierError):  # noqa: N818
    """No daemon answered in time. Continue without a cache: the client connects again with a later call."""


class ProtocolError(KvtierError):
    """The peer sent an invalid message. The connection cannot be used again."""


class Refused(KvtierError):  # noqa: N818
    """The daemon refused a request. `code` is for programs, `message` for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)  # both, so that a copy through `__reduce__` is whole
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.message} ({self.code})"


def bad_request(message: str) -> Refused:
    """The error for a request that is well-formed, but invalid."""
    return Refused("bad_request", message)


class NotReady(KvtierError, TimeoutError):  # noqa: N818
    """The daemon's memory is not complete at the deadline. The client can still be used: wait again, or
    continue with the memory that exists."""


class InvalidArgument(KvtierError, ValueError, TypeError):  # noqa: N818
    """An argument has the wrong type, length or range. Nothing was sent to the daemon."""


class ViewsInUse(KvtierError, BufferError):  # noqa: N818
    """An object still refers to slots whose lease has ended. Copy the bytes before the `with` block ends."""


class StaleLease(KvtierError):  # noqa: N818
    """The lease has ended. Do not use the data that was read under it; repeat the save that had it."""


class SpoiltBlocks(KvtierError):  # noqa: N818
    """The bytes of a block in memory differ from those of its save. Do not use what was read."""


class FrameError(KvtierError):
    """A stored block is damaged, or is another block. It counts as a miss."""


class ProfileError(KvtierError):
    """A calibration profile is damaged or belongs to another model. Blocks that need it are misses."""


class TierError(KvtierError):
    """A tier cannot be opened, or a read or write failed. The message contains the place and the reason."""


class SpecError(KvtierError):
    """The description of a cache is incomplete or contradictory."""
