"""One tree of exceptions for everything the world can do wrong; our own bugs are assertions.

    KvtierError
    ├── ConfigError       the configuration, or the machine under it, does not allow a start
    ├── Unavailable       no daemon answers, or it answers too late
    ├── ProtocolError     the peer broke the wire's rules
    ├── Refused           the daemon understood and said no, with a code
    ├── NotReady          the daemon's memory is not complete within the deadline; also a TimeoutError
    ├── InvalidArgument   a call with an argument that cannot be right; also a ValueError and a TypeError
    ├── ViewsInUse        something still shows slots that were given back; also a BufferError
    ├── StaleLease        the lease has ended; the bytes may be somebody else's by now
    ├── FrameError        stored bytes are not what they claim to be
    ├── ProfileError      a calibration profile that is damaged, or that is of something else
    ├── TierError         a place that holds blocks can't be used, or failed
    └── SpecError         a description of the KV layout that contradicts itself

A message is one line that says what, where and what to do. Three are
outcomes rather than errors and are named so: an engine meets them every day and goes on.
"""


class KvtierError(Exception):
    """Root of the tree: `except KvtierError` is what an engine's edge turns into a miss."""


class ConfigError(KvtierError):
    """The configuration or the machine forbids a start; the message names key and remedy."""


class Unavailable(KvtierError):  # noqa: N818
    """No daemon answered in time; the caller goes on without a cache."""


class ProtocolError(KvtierError):
    """The peer sent what the wire does not allow; the connection is of no more use."""


class Refused(KvtierError):  # noqa: N818
    """The daemon said no: `code` is for programs and counters, `message` for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)  # both, so that a copy through `__reduce__` is whole
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.message} ({self.code})"


class NotReady(KvtierError, TimeoutError):  # noqa: N818
    """Memory is not complete within the deadline. The client stays usable: wait again, or go on without."""


class InvalidArgument(KvtierError, ValueError, TypeError):  # noqa: N818
    """An argument of the wrong type, length or range. Nothing was sent to the daemon."""


class ViewsInUse(KvtierError, BufferError):  # noqa: N818
    """Something still shows slots whose lease has ended: copy their bytes before the `with` block ends."""


class StaleLease(KvtierError):  # noqa: N818
    """The lease has ended; what was read under it must not be used."""


class FrameError(KvtierError):
    """What was stored is damaged, or is something else: a miss, counted by reason."""


class ProfileError(KvtierError):
    """A calibration profile is not what it claims to be; without it, what needs it is a miss."""


class TierError(KvtierError):
    """A tier can't be opened, or a read or write of it failed; the message says where and why."""


class SpecError(KvtierError):
    """A description of the KV layout that is incomplete or contradicts itself."""
