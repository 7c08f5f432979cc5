"""Requests of one session that reads frames from the files of the tier below memory itself."""

from __future__ import annotations

import contextlib
from itertools import count

from kvtier import wire
from kvtier.errors import bad_request
from kvtier.frame import PAGE
from kvtier_daemon.serving.context import Handlers, Requester
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.base import DirectFile

_numbers = count(1)  # of files, in all sessions; a number is never used again


class DirectReadRequests:
    """Sends a descriptor of each file once, before the first answer that names it."""

    def __init__(self, session: Requester) -> None:
        self._session = session
        self._files: dict[DirectFile, int] = {}  # that the client has
        self._has_forgets = False

    def handlers(self) -> Handlers:
        return {
            wire.DirectRead: self.read,
            wire.DirectReadEnd: self.end,
            wire.DirectReadUsed: self.used,
            wire.DirectReadCodec: self.codec,
        }

    def read(self, tenant: Tenant, request: wire.DirectRead) -> wire.Reply:
        _check_permitted(tenant)
        if request.deadline_ms < 0:
            raise bad_request(f"deadline_ms is {request.deadline_ms}, it must be at least 0")
        if request.closed:
            closed = set(request.closed)
            self._files = {file: n for file, n in self._files.items() if n not in closed}
        if not self._has_forgets:
            # Without memory or descriptors, the client asks after each read.
            with contextlib.suppress(OSError):
                self._session.send_with(wire.DirectReadFile(0, 0, PAGE), tenant.count_forgets())
                self._has_forgets = True
        space = tenant.catalog.spaces.at(request.space)
        grant = tenant.tier.direct.grant(
            self._session.id, space, request.group, request.shard, request.keys,
            frozenset(request.codecs), request.deadline_ms / 1000, self._may_use, max(0, request.first),
            min(request.most, wire.LIMIT_DIRECT_BLOCKS),
        )  # fmt: skip
        rows = b"".join(
            wire.DIRECT_ROW.pack(
                frame.at, self._files[frame.file], frame.page, frame.payload_bytes, frame.codec,
                frame.header_pages, frame.epoch, frame.digest,
            )
            for frame in grant.frames
        )  # fmt: skip
        forgets = tenant.catalog.blocks.forgets[0]
        return wire.DirectReadGranted(request.id, grant.lease, rows, forgets)

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

    def codec(self, tenant: Tenant, request: wire.DirectReadCodec) -> wire.Reply:
        _check_permitted(tenant)
        space = tenant.catalog.spaces.at(request.space)
        space.check_place(request.group, request.shard)
        codec = tenant.calibration(space, request.group, request.shard)
        if codec is None:
            return wire.DirectReadCalibrated(request.id)
        reply = wire.DirectReadCalibrated(
            request.id, codec.number, codec.level, codec.group_tokens, codec.heads_first, codec.profile,
            codec.ropes, codec.parts, codec.known,
        )  # fmt: skip
        # The daemon decodes blocks of a model whose calibration is larger than a message.
        texts = [text for part in codec.parts for text in part[4:]]
        texts += [turns for turns, _ in codec.ropes]
        too_large = sum(len(text) for text in texts) > wire.LIMIT_CALIBRATION_BYTES
        return wire.DirectReadCalibrated(request.id) if too_large else reply

    def used(self, tenant: Tenant, request: wire.DirectReadUsed) -> None:
        space = tenant.catalog.spaces.at(request.space)
        place = request.group, request.shard
        space.check_place(*place)
        tenant.tier.direct.count(
            space, place, request.good, request.bad, request.tokens, request.nbytes
        )

    def end(self, tenant: Tenant, request: wire.DirectReadEnd) -> wire.Reply:
        valid = tenant.tier.direct.end(
            self._session.id, request.lease, request.failed, request.tokens, request.nbytes
        )
        return wire.DirectReadChecked(request.id, valid)


def _check_permitted(tenant: Tenant) -> None:
    if not tenant.direct_reads:
        text = (
            f"tenant {tenant.name} does not permit direct reads; "
            f"set tenants.{tenant.name}.direct_reads = true and restart the daemon"
        )
        raise bad_request(text)
