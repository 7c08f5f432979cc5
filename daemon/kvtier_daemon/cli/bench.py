"""`kvtier bench`: measures this machine in a minute, and compares two results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier_daemon.cli.flags import Json, flag, plain, print_json, value

EXIT_WORSE = 1

app = plain(help="Measure this machine, or compare two results.")


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    quick: Annotated[bool, flag("--quick", "About ten seconds, with wider intervals.")] = False,
    cold: Annotated[
        Path | None,
        value(
            "DIRECTORY", "Directory for the disk test; default: the directory for temporary files."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Measure this machine, or compare two results."""
    if context.invoked_subcommand is not None:
        return
    from kvtier_daemon.cli.progress import progress
    from kvtier_daemon.tools import benchmark

    with progress() as bar:
        task = bar.add_task("bench", total=None)

        def told(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        result = benchmark.run(quick, cold, told)
    if json:
        from json import dumps

        typer.echo(dumps(result, indent=1))
        return
    for row in result["rows"]:
        typer.echo(
            f"{row['name']:<34}{row['value']:>8.3g} {row['unit']:<5}"
            f" [{row['low']:.3g}, {row['high']:.3g}]  {row['note']}".rstrip()
        )
    if not result["valid"]:
        typer.echo("the machine was busy with other work: this is only a rough figure")


@app.command("compare")
def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json")],
    after: Annotated[Path, typer.Argument(metavar="B.json")],
    json: Json = False,
) -> None:
    """Compare two results of kvtier bench --json, or of benchmarks/. Exits with 1 if something is worse."""
    from kvtier_daemon.tools import benchmark

    report = benchmark.compare(benchmark.read(before), benchmark.read(after))
    if json:
        print_json(report)
    else:
        _show(report)
    raise typer.Exit(EXIT_WORSE if any(row["verdict"] == "worse" for row in report["rows"]) else 0)


def _show(report: Mapping[str, Any]) -> None:
    from kvtier_daemon.cli.tables import console_of, row, table_of

    table = table_of("~", ">A", ">B", ">change", "")
    for one in report["rows"]:
        row(
            table, one["name"], f"{one['before']:.4g}", f"{one['after']:.4g} {one['unit']}",
            f"{one['change']:+.1%}", one["verdict"],
        )  # fmt: skip
    console_of().print(table)
    for remark in report["remarks"]:
        typer.echo(remark)
