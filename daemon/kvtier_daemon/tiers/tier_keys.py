"""The keys of a tier, as its key file has them."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Literal

from kvtier.errors import ConfigError, TierError
from kvtier_daemon.codec.encryption import FrameCipher, key_id
from kvtier_daemon.config.current import CurrentConfig
from kvtier_daemon.config.preflight import MachineFinding
from kvtier_daemon.config.schema import Config
from kvtier_daemon.secrets import key_file, load_keys

log = logging.getLogger(__name__)


class TierKeys:
    """Reads the key file when directories or a store are opened, and again at a reload."""

    def __init__(
        self, tier: Literal["cold", "remote"], settings: CurrentConfig, tenants: Collection[str]
    ) -> None:
        self._tier = tier
        self._settings = settings
        self._tenants = tenants
        self._ciphers: dict[str, FrameCipher] = {}
        self._ids: list[bytes] = []

    def of(self, tenant: str) -> FrameCipher | None:
        """Return how this tenant's frames are encrypted; None if they are not, and no keys are known."""
        return self._ciphers.get(tenant)

    def load(self) -> None:
        """Read the key file. Waits for its disk. Raises TierError, and then keeps the earlier keys."""
        tier, config = self._tier, self._settings.config
        section = config.cold if tier == "cold" else config.remote
        assert section is not None
        place = key_file(section.key_file, tier)
        if place is None:
            if section.encryption != "off":
                raise TierError(
                    f"{tier}: {tier}.encryption needs keys: set {tier}.key_file, or provide the "
                    f"credential kvtier-{tier}-keys"
                )
            return
        file, owned = place
        try:
            keys = load_keys(file, owned=owned)
            encrypts = section.encryption != "off"
            ciphers = {name: FrameCipher.of(keys, name, encrypts) for name in self._tenants}
        except ConfigError as error:
            raise TierError(f"{tier}: {error}") from error
        except RuntimeError as error:
            raise TierError(f"{tier}: the keys need OpenSSL 3: {error}") from error
        ids = [key_id(key) for key in keys]
        if ids != self._ids:
            log.info(
                "%s: %d key%s from %s; %s", tier, len(ids), "s" * (len(ids) != 1), file,
                f"key {ids[0].hex()} encrypts" if encrypts else "new frames are not encrypted",
            )  # fmt: skip
        self._ciphers, self._ids = ciphers, ids

    def reload(self) -> None:
        """Read the key file again; log why that is not possible."""
        try:
            self.load()
        except TierError as error:
            log.error("%s; using the earlier keys", error)


def key_files(config: Config) -> list[MachineFinding]:
    """Check the files with the keys of the tiers that encrypt, or that name such a file: whether they exist,
    only the daemon's user can read them, and they contain keys. Shows no key."""
    found = []
    for tier, section in (("cold", config.cold), ("remote", config.remote)):
        if section is None or (section.encryption == "off" and section.key_file is None):
            continue
        what, key = f"keys of the {tier} tier", f"{tier}.key_file"
        place = key_file(section.key_file, tier)
        if place is None:
            fix = f"set {key}, or provide the credential kvtier-{tier}-keys"
            found.append(MachineFinding(False, what, f"{tier}.encryption needs keys", fix))
            continue
        try:
            keys = load_keys(place[0], owned=place[1])
        except ConfigError as error:
            value, _, fix = str(error).partition("; ")
            found.append(MachineFinding(False, what, value, fix or f"correct {key}"))
        else:
            first = f"{key_id(keys[0]).hex()} is the first" if keys else "none"
            found.append(MachineFinding(True, what, f"{place[0]}: {len(keys)}; {first}"))
    return found
