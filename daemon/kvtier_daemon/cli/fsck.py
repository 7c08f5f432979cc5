"""`kvtier fsck`: verifies every frame in a cold directory, and repairs footers."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier_daemon.cli.flags import Json, flag, print_json

EXIT_DAMAGED = 1
SHOWN = 20


def fsck(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIRECTORY...", help="A directory of cold.directories.")
    ],
    repair: Annotated[bool, flag("--repair", "Remove damaged frames from the footers.")] = False,
    key_file: Annotated[
        Path | None,
        flag("--key-file", "Also decrypt encrypted frames, with the keys of cold.key_file."),
    ] = None,
    json: Json = False,
) -> None:
    """Check cold directories that no daemon is using. Exits with 1 if damage remains."""
    from kvtier.errors import ConfigError
    from kvtier_daemon.secrets import load_keys
    from kvtier_daemon.tiers.cold.directory import ColdDirectory, is_cold_directory
    from kvtier_daemon.tiers.cold.directory_lock import LOCK
    from kvtier_daemon.tools.fsck import check

    keys = load_keys(key_file.absolute(), owned=False) if key_file is not None else []
    reports: dict[str, Any] = {}
    damaged = False
    for directory in directories:
        if not directory.is_dir():
            raise ConfigError(f"{directory}: not a directory; give directories of cold.directories")
    for directory in directories:
        if not is_cold_directory(directory):
            raise ConfigError(
                f"{directory} is not a kvtier directory: it has no {LOCK} and no index; give "
                "directories of cold.directories"
            )
    for directory in directories:
        volume = ColdDirectory(directory.absolute(), None)
        try:
            report = check(volume, repair, keys)
        finally:
            volume.close()
        damaged |= not report.is_clean and not repair
        reports[str(directory)] = {
            "segments": report.segments,
            "frames": report.frames,
            "payload_bytes": report.payload_bytes,
            "encrypted_frames": report.encrypted,
            "unknown_keys": report.unknown_keys,
            "wrong": dict(report.wrong),
            "repaired_segments": report.repaired,
            "remarks": report.remarks,
        }
    if json:
        print_json(reports)
    else:
        for name, found in reports.items():
            _show(name, found)
    raise typer.Exit(EXIT_DAMAGED if damaged else 0)


def _show(directory: str, found: dict[str, Any]) -> None:
    from kvtier.units import format_bytes

    typer.echo(
        f"{directory}: {found['frames']:,} frames in {found['segments']} segments,"
        f" {format_bytes(found['payload_bytes'])}"
    )
    if encrypted := found["encrypted_frames"]:
        unknown = found["unknown_keys"]
        no_key = (
            f", {unknown:,} of them under keys that the key file does not have" if unknown else ""
        )
        typer.echo(f"  {encrypted:,} frames are encrypted{no_key}")
    for remark in found["remarks"][:SHOWN]:
        typer.echo(f"  {remark}")
    if len(found["remarks"]) > SHOWN:
        typer.echo(f"  and {len(found['remarks']) - SHOWN} more (--json has them all)")
    wrong = ", ".join(f"{count} by {kind}" for kind, count in found["wrong"].items())
    mended = (
        f"; {found['repaired_segments']} footers repaired" if found["repaired_segments"] else ""
    )
    typer.echo(f"  damaged: {wrong}{mended}" if wrong else "  ok")
