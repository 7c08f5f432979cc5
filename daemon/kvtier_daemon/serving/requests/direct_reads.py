"""Requests of one session that reads frames from the files of the tier below memory itself."""

from __future__ import annotations

from itertools import count

from kvtier import wire
from kvtier.errors import Refused
from kvtier_daemon.serving.context import Handlers, Requester, need_id
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.base import DirectFile

_numbers = count(1)  # of files, in all sessions; a number is never used again


class DirectReadRequests:
    """Sends a descriptor of each file once, before the first answer that names it."""

    def __init__(self, session: Requester) -> None:
        self._session = session
        self._files: dict[DirectFile, int] = {}  # that the client has

    def handlers(self) -> Handlers:
        return {wire.DirectRead: self.read, wire.DirectReadEnd: self.end}

    def read(self, tenant: Tenant, request: wire.DirectRead) -> wire.Reply:
        if not tenant.direct_reads:
            text = (
                f"tenant {tenant.name} does not permit direct reads; "
                f"set tenants.{tenant.name}.direct_reads = true and restart the daemon"
            )
            raise Refused("bad_request", text)
        if not request.id:
            raise need_id()
        if request.deadline_ms < 1:
            text = f"deadline_ms is {request.deadline_ms}, it must be at least 1"
            raise Refused("bad_request", text)
        if request.closed:
            closed = set(request.closed)
            self._files = {file: n for file, n in self._files.items() if n not in closed}
        space = tenant.catalog.space(request.space)
        grant = tenant.tier.direct.grant(
            self._session.id, space, request.group, request.shard, request.keys,
            frozenset(request.codecs), request.deadline_ms / 1000, self._may_use, request.first,
            min(request.most, wire.LIMIT_DIRECT_BLOCKS),
        )  # fmt: skip
        rows = b"".join(
            wire.DIRECT_ROW.pack(
                frame.at, self._files[frame.file], frame.page, frame.payload_bytes, frame.codec,
                frame.header_pages, frame.epoch, frame.digest,
            )
            for frame in grant.frames
        )  # fmt: skip
        return wire.DirectReadGranted(request.id, grant.lease, rows)

    def _may_use(self, file: DirectFile) -> bool:
        """Whether the client has this file; sends it if that is possible."""
        if file in self._files:
            return True
        if len(self._files) >= wire.LIMIT_DIRECT_FILES:
            return False
        try:
            opened = file.open()
        except OSError:  # too many open files, or the disk is gone: the daemon reads these blocks
            return False
        number = self._files[file] = next(_numbers)
        self._session.send_with(wire.DirectReadFile(0, number, file.nbytes), opened)
        return True

    def end(self, tenant: Tenant, request: wire.DirectReadEnd) -> wire.Reply:
        valid = tenant.tier.direct.end(self._session.id, request.lease, request.failed)
        return wire.DirectReadChecked(request.id, valid)
