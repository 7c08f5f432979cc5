"""The families of a tenant's spaces: which spaces of the fleet differ from them in tensor parallelism only.

Hosts describe their spaces in the store, before the first object of each: `families/v1/FAMILY/SPACE`, the
content of a frame. FAMILY and the code at the end of a description depend on the tenant's secret. A
description is that of the space in its name if the identity of that description is this name. So it never
changes, and none is believed that says something else about the objects of a space.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final

import msgspec

from kvtier.errors import FrameError, KvtierError
from kvtier.layout import KvSpec
from kvtier_daemon.catalog import KnownSpace
from kvtier_daemon.catalog.spaces import sizes_of
from kvtier_daemon.codec.resharding import runs_of, why_not, why_not_from
from kvtier_daemon.tenant import Tenant
from kvtier_daemon.tiers.remote.driver import StoreDriver
from kvtier_daemon.tiers.remote.questions import Questions
from kvtier_daemon.tiers.remote.resharding import Sibling
from kvtier_daemon.tiers.remote.wanted import CODE_BYTES, keyed, list_identity
from kvtier_daemon.tiers.remote.warming import NotNowError, StoreObjects

log = logging.getLogger(__name__)

FOLDER: Final = "families/v1"
USE: Final = b"kvtier-family"
MOST_SPACES: Final = 256  # of this tenant
MOST_NAMES: Final = 256  # of the spaces of a family
MOST_USED: Final = 8  # siblings: each costs lookups
READ_S: Final = 60.0  # between looks for new spaces of a family
TELL_S: Final = 3600.0  # a description is written again: the store may delete old objects
RETRY_S: Final = 5.0  # after a description could not be written
POLL_S: Final = 0.2
SPACE: Final = re.compile("[0-9a-f]{64}")  # one name for each identity


def folder_of(secret: bytes, family: bytes) -> str:
    return f"{FOLDER}/{keyed(secret, USE, family, 16).hex()}/"


def encode_description(spec: KvSpec, identity: bytes, family: bytes, secret: bytes) -> bytes:
    text = msgspec.msgpack.encode(spec)
    return text + keyed(secret, USE, identity + family + text, CODE_BYTES)


def decode_description(text: bytes, identity: bytes, family: bytes, secret: bytes) -> KvSpec:
    """Raises FrameError if no host of this fleet wrote this for this space and family."""
    body, code = text[:-CODE_BYTES], text[-CODE_BYTES:]
    if not hmac.compare_digest(code, keyed(secret, USE, identity + family + body, CODE_BYTES)):
        raise FrameError("no host of this fleet wrote the description")
    try:
        return msgspec.msgpack.decode(body, type=KvSpec).checked()
    except (msgspec.MsgspecError, KvtierError) as error:
        raise FrameError(f"is not a description: {error}") from error


@dataclass(slots=True, eq=False)
class Kin:
    """What is known about the family of a space. While `forgets` goes on, no sibling is used. `others` are
    all other spaces: a forget deletes their objects. Blocks can be made of those of `siblings`."""

    space: KnownSpace
    family: bytes
    others: dict[bytes, KnownSpace] = field(default_factory=dict)
    siblings: dict[bytes, Sibling] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)  # descriptions
    forgets: int = 0
    missed: bytes = b""  # keys that the last lookup missed
    is_told: bool = False  # the description was written, since the start
    tell_at: float = 0.0  # from then on it is written again
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Families:
    """Of one tenant. If it does not reshard: no space has siblings, and no description is written."""

    def __init__(
        self, tenant: Tenant, driver: StoreDriver, objects: StoreObjects, questions: Questions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.counts: Counter[str] = Counter(not_resharded=0)
        self._tenant = tenant
        self._driver = driver
        self._objects = objects
        self._questions = questions
        self._clock = clock
        self._of: dict[bytes, Kin] = {}
        self._more = asyncio.Event()

    @property
    def siblings(self) -> int:
        """How many pairs of spaces are known of which one can be made of the other."""
        return sum(len(kin.siblings) for kin in self._of.values())

    def kin(self, space: KnownSpace) -> Kin | None:
        """The family of this space; None if it has none, or if this is off."""
        if not self._tenant.reshards:
            return None
        kin = self._of.get(space.identity)
        if kin is None:
            if len(self._of) >= MOST_SPACES and not next(iter(self._of.values())).forgets:
                del self._of[next(iter(self._of))]
            kin = Kin(space, self._tenant.family_of(space))
            self._of[space.identity] = kin
            self._more.set()
            if not kin.family:
                self._refuse(
                    space.spec, why_not(space.spec) or "cold.codecs: its blocks have a loss"
                )
        kin.space = space
        return kin if kin.family else None

    def _refuse(self, spec: KvSpec, why: str) -> None:
        self.counts["not_resharded"] += 1
        log.warning("remote: blocks of %s are not resharded: %s", spec.model, why)

    def siblings_of(self, space: KnownSpace, missed: bytes) -> Sequence[Sibling]:
        """The spaces whose objects give blocks of this one. New ones are asked for `missed` keys at once."""
        if not self._tenant.reshards or (kin := self.kin(space)) is None or kin.forgets:
            return ()
        kin.missed = missed or kin.missed
        return list(islice(kin.siblings.values(), MOST_USED))

    # --- descriptions --------------------------------------------------------------------------

    def must_describe(self, space: KnownSpace) -> bool:
        """Whether the description of this space must be written now, before its objects."""
        kin = self.kin(space)
        return kin is not None and self._clock() >= kin.tell_at

    def is_described(self, space: KnownSpace) -> bool:
        """Whether this space's objects may be written: other hosts could not forget undescribed ones."""
        kin = self.kin(space)
        return kin is None or kin.is_told

    async def describe(self, space: KnownSpace) -> None:
        """Write the description of this space, unless that failed some seconds ago."""
        if (kin := self.kin(space)) is None:
            return
        async with kin.lock:
            if not self.must_describe(space):
                return
            secret, of = self._tenant.secret, list_identity(space.identity, kin.family)
            text = encode_description(space.spec, space.identity, kin.family, secret)
            name, is_written = f"{folder_of(secret, kin.family)}{space.identity.hex()}", False
            try:
                is_written = await self._objects.put(name, space.spec, of, text)
            except Exception:
                log.exception("remote: internal error in the description of a space")
            kin.is_told |= is_written
            kin.tell_at = self._clock() + (TELL_S if is_written else RETRY_S)

    async def run(self) -> None:
        """Look for new siblings until the task is cancelled, if this is on."""
        while self._tenant.reshards:
            while not self._driver.is_on:  # noqa: ASYNC110  # it may be off for long
                await asyncio.sleep(POLL_S)
            self._more.clear()
            for kin in list(self._of.values()):
                if kin.family and kin.space.users:
                    await self.read(kin)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._more.wait(), READ_S)

    async def read(self, kin: Kin) -> str:
        """Look for siblings of this space. Return why not all could be read, or an empty text."""
        try:
            async with kin.lock:
                return await self._read(kin)
        except Exception:
            log.exception("remote: internal error in a family of spaces")
            return "the spaces of the fleet could not be read"

    async def _read(self, kin: Kin) -> str:
        failure = ""
        for secret in (self._tenant.secret, *self._tenant.accepted):
            folder = folder_of(secret, kin.family)
            names, failed = await self._objects.names(folder, MOST_NAMES + 1)
            if len(names) > MOST_NAMES:
                failed = f"the folder {folder} has more than {MOST_NAMES} descriptions"
            failure = failure or failed
            known = {kin.space.identity, *kin.others}
            for name in set(names) - {folder + identity.hex() for identity in known}:
                digits = name.rpartition("/")[2]
                if SPACE.fullmatch(digits) is None:
                    continue
                try:
                    await self._add(kin, name, bytes.fromhex(digits), secret)
                except NotNowError as error:
                    failure = failure or f"the description {name} cannot be read now: {error}"
                except FrameError as error:
                    failure = failure or (
                        f"the description {name} cannot be used: {error}; delete that object unless a host "
                        "of this fleet wrote it"
                    )
                    if name not in kin.ignored:
                        log.warning("remote: the description %s is ignored: %s", name, error)
                    kin.ignored.add(name)
        return failure

    async def _add(self, kin: Kin, name: str, identity: bytes, secret: bytes) -> None:
        """Add the space of this description. Raises FrameError if it is not one of the family."""
        text = await self._objects.get(name, list_identity(identity, kin.family))
        spec = decode_description(text, identity, kin.family, secret)
        theirs = KnownSpace(-1, identity, spec, spec.places, sizes_of(spec))
        if self._tenant.family_of(theirs) != kin.family:
            raise FrameError("it describes another space, or one of another family")
        if why := why_not_from(spec, kin.space.spec):
            kin.others[identity] = theirs
            self._refuse(spec, why)
            return
        groups = range(len(spec.cache_groups))
        runs = await asyncio.to_thread(
            lambda: list(map(partial(runs_of, spec, kin.space.spec), groups))
        )
        kin.others[identity] = theirs
        kin.siblings[identity] = Sibling(theirs, kin.space, runs)
        if kin.missed:
            self._questions.ask(theirs, kin.missed)
