"""Finds what would prevent a start with a configuration, as the user that runs the daemon."""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import sys
from pathlib import Path
from typing import Final

import msgspec

from kvtier.errors import ConfigError
from kvtier_daemon.config import preflight
from kvtier_daemon.config.problems import Refusal
from kvtier_daemon.config.schema import (
    SYSTEM_FILE,
    SYSTEM_SOCKET,
    SYSTEM_STATE,
    SYSTEM_UNITS,
    LoadedConfig,
    load,
)
from kvtier_daemon.secrets import wrong_secrets
from kvtier_daemon.tiers.cold.directory_lock import distrust_cold
from kvtier_daemon.tiers.tier_keys import key_files
from kvtier_daemon.tools.install import HIDDEN

SERVICE_USER: Final = "kvtier"
PLACES_OF_UNIT: Final = {"KVTIER_SOCKET": str(SYSTEM_SOCKET), "KVTIER_STATE": str(SYSTEM_STATE)}


def user_of(file: Path | None) -> str | None:
    """Return the service's user, if it exists, where root checks a file in /etc/kvtier."""
    if os.geteuid() != 0 or file is None or not file.absolute().is_relative_to(SYSTEM_FILE.parent):
        return None
    return SERVICE_USER if any(one.pw_name == SERVICE_USER for one in pwd.getpwall()) else None


def problems(file: Path | None, user: str | None) -> tuple[str, ...]:
    """Return everything that would prevent a start by `user` or disable a tier. Changes nothing. Raises
    ConfigError if this process cannot become that user."""
    account = _account(user) if user is not None else None
    is_service = account is not None and user == SERVICE_USER
    try:
        if is_service:
            loaded = load(file, environ={**PLACES_OF_UNIT, **os.environ})
        elif account is not None:
            named = {key: value for key, value in os.environ.items() if key.startswith("KVTIER_")}
            loaded = load(file, environ={"HOME": account.pw_dir, **named}, uid=account.pw_uid)
        else:
            loaded = load(file)
    except Refusal as error:
        return error.problems
    except ConfigError as error:
        return (str(error),)
    hidden = _hidden_by_sandbox(loaded) if is_service else ()
    if account is None or account.pw_uid == os.geteuid():
        return *hidden, *_wrong(loaded, is_service)
    return *hidden, *_asked_as(account, loaded, is_service)


def _hidden_by_sandbox(loaded: LoadedConfig) -> tuple[str, ...]:
    """Return the cold directories that the unit of the installed service hides, unless a drop-in has
    settings of its own for that, and those that no drop-in makes writable."""
    config = loaded.config
    if config.cold is None or not any(SYSTEM_UNITS.glob("kvtierd*.service")):
        return ()
    lines = [line for file in SYSTEM_UNITS.glob("kvtierd*.service.d/*.conf")
             for line in file.read_text(errors="replace").splitlines()]  # fmt: skip
    hidden = tuple(
        f"cold directory: {place} is below {one}, which the service's sandbox hides: use a directory "
        "elsewhere, such as /var/lib/kvtier/cold"
        for place in config.cold.directories
        for one, setting in HIDDEN.items()
        if place.is_relative_to(one) and not any(line.startswith(setting) for line in lines)
    )
    if hidden or "ProtectSystem=full" in lines:
        return hidden
    named = (line.partition("=")[2] for line in lines if line.startswith("ReadWritePaths="))
    writable = [config.state, *(Path(one.lstrip("-+")) for paths in named for one in _words(paths))]
    return tuple(
        f"cold directory: {place}: the service's sandbox cannot write to it; run `kvtier "
        "install-service` again, and the commands that it prints"
        for place in config.cold.directories
        if not any(place.is_relative_to(one) for one in writable)
    )


def _words(text: str) -> list[str]:
    """Return the words of a unit's line; none if a quote is not closed: systemd ignores such lines."""
    try:
        return shlex.split(text)
    except ValueError:
        return []


def _wrong(loaded: LoadedConfig, of_service: bool) -> tuple[str, ...]:
    findings = [*preflight.look_before_start(loaded, of_service), *key_files(loaded.config)]
    wrong = [str(one) for one in findings if not one.ok]
    for directory in loaded.config.cold.directories if loaded.config.cold else ():
        with contextlib.suppress(OSError):  # a finding says what is wrong
            why, fix = distrust_cold(directory)
            wrong += (
                [f"cold directory: {why}: the daemon would not use it; run `{fix}`"] if why else []
            )
    if refused := wrong_secrets(loaded.config.state, loaded.config.tenants):
        wrong.append(f"secrets: {refused}")
    return tuple(wrong)


def _account(user: str) -> pwd.struct_passwd:
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        raise ConfigError(
            f"--user {user}: no such user; for the service's run `systemd-sysusers kvtier.conf`"
        ) from None
    if os.geteuid() not in (0, account.pw_uid):
        raise ConfigError(f"--user {user}: only root can check as another user; use sudo")
    return account


def _asked_as(
    account: pwd.struct_passwd, loaded: LoadedConfig, of_service: bool
) -> tuple[str, ...]:
    """Return the problems for another user: a forked process becomes that user and checks."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            os.initgroups(account.pw_name, account.pw_gid)
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
            with open(writing, "wb") as sink:
                sink.write(msgspec.json.encode(_wrong(loaded, of_service)))
            code = 0
        except OSError as error:
            print(
                f"kvtier: cannot check as {account.pw_name}: {error}", file=sys.stderr, flush=True
            )
        finally:
            os._exit(code)
    os.close(writing)
    with open(reading, "rb") as source:
        told = source.read()
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        raise ConfigError(f"--user {account.pw_name}: the check failed; see above")
    return msgspec.json.decode(told, type=tuple[str, ...])
