"""The `kvtier` command: one command a file, and nothing imported that is not run.

A command's file imports typer and what its signature needs; everything else comes inside the
function, so that `kvtier --help` stays fast however much the daemon grows.
"""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kvtier.errors import KvtierError, Unavailable
from kvtier_daemon.cli import (
    calibrate,
    config,
    demo,
    explain,
    fsck,
    install_service,
    record,
    reload,
    serve,
    sim,
    size,
    status,
    tier,
)

EXIT_ERROR = 2
EXIT_UNAVAILABLE = 3

app = typer.Typer(
    name="kvtier",
    help="Keep KV caches of LLM engines on the cheapest memory that beats recomputing.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: rich would be imported for it
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("calibrate", short_help="Measure a model for the lossy codecs.")(calibrate.calibrate)
app.add_typer(config.app, name="config")
app.command("demo")(demo.demo)
app.command("explain")(explain.explain)
app.command("fsck")(fsck.fsck)
app.command("install-service")(install_service.install_service)
app.command("record")(record.record)
app.command("reload")(reload.reload)
app.command("serve")(serve.serve)
app.command("sim")(sim.sim)
app.command("size", short_help="Tell how much KV cache a model needs.")(size.size)
app.command("status")(status.status)
app.command("tier")(tier.tier)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"kvtier {version('kvtier')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 done, 2 refused or misused, 3 no daemon, 130 interrupted.

    What the world did wrong is one line on stderr; only our own bugs show a traceback.
    """
    try:
        app(args=arguments)
    except KvtierError as error:
        print(f"kvtier: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(EXIT_UNAVAILABLE if isinstance(error, Unavailable) else EXIT_ERROR)
