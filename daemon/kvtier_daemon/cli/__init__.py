"""The `kvtier` command: one command a file, and nothing imported that is not run.

A command's file has a function of its name, or a typer app where it has commands of its own; it is
imported when that command is run, so that `kvtier --help` stays fast however many there are. Other
imports that cost something come inside the function.
"""

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvtier.errors import KvtierError, Unavailable
from kvtier_daemon.cli.flags import plain

EXIT_ERROR = 2
EXIT_UNAVAILABLE = 3
EXIT_BUG = 70  # sysexits' EX_SOFTWARE
EXIT_UNREAD = 141  # as a shell tells of who died of SIGPIPE
COMPLETE = "_KVTIER_COMPLETE"  # set by a shell that wants to know what comes next

# Each with the first line of its help, which a test compares.
COMMANDS = {
    "bench": "Measure this machine, or compare two results.",
    "bugreport": "Collect in one file what a report of a fault needs.",
    "calibrate": "Measure a model for the lossy codecs, and write its profile.",
    "completion": "Print a script that completes commands and flags.",
    "config": "Check, show and compare configurations.",
    "demo": "Watch a made-up chat service gain by a small daemon.",
    "doctor": "Examine this machine, the configuration and the daemon.",
    "explain": "Say why a lookup hit or missed, or where blocks are.",
    "fsck": "Check cold directories that no daemon is using.",
    "install-service": "Write systemd's units, and say what to run then.",
    "keys": "List the spaces and what they hold, or the keys of one.",
    "monitor": "Show what happens, as it happens, until interrupted.",
    "purge": "Forget blocks, for good: those on disk are erased, too.",
    "record": "Record what is looked up, as a trace for kvtier sim.",
    "reload": "Put what the configuration says now into force.",
    "serve": "Run the daemon until it is told to stop.",
    "sim": "Replay a trace of requests against tiers of other sizes.",
    "size": "Tell how much KV cache a model needs, and what loads save.",
    "status": "Show what the daemon holds and how well it does.",
    "tier": "Drain a tier, switch it off or on.",
    "top": "Watch tiers, hits and misses, what moves, and clients.",
}


class Commands(TyperGroup):
    """Imports a command's file when that command is asked for."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        names: dict[str, Any] = dict.fromkeys(COMMANDS)
        self.commands = names  # who writes nearly one of these is told so

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # whoever read this has left, as `head` does: nothing is wrong
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_UNREAD) from None

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return loaded(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


def loaded(name: str) -> Any:
    """The command of this name, ready to run."""
    module = import_module(f"kvtier_daemon.cli.{name.replace('-', '_')}")
    found = getattr(module, "app", None)
    if found is None:
        found = plain()
        found.command(name)(getattr(module, name.replace("-", "_")))
    command = typer.main.get_command(found)
    command.name = name
    return command


app = plain(
    name="kvtier",
    cls=Commands,
    help="Keep KV caches of LLM engines on the cheapest memory that beats recomputing.",
    no_args_is_help=True,
)


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
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks. Anywhere on the line.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 done, 1 it found something wrong, 2 refused or misused, 3 no daemon that it
    can talk to, 70 a bug of ours, 130 interrupted, 141 nobody reads what it says.

    Whatever went wrong is one line on stderr; with --debug there is a traceback before it.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    if COMPLETE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    try:
        app(args=[word for word in words if word != "--debug"], prog_name="kvtier")
    except KvtierError as error:
        _say(error, "", debug)
        sys.exit(EXIT_UNAVAILABLE if isinstance(error, Unavailable) else EXIT_ERROR)
    except OSError as error:
        _say(error, "", debug)
        sys.exit(EXIT_ERROR)
    except Exception as error:  # noqa: BLE001 - the last one who could say it in a line
        _say(error, BUG, debug)
        sys.exit(EXIT_BUG)
    finally:
        gc.freeze()  # what was imported is not looked through once more on leaving: 9 ms


BUG = (
    "; that is a bug of kvtier's: --debug shows where, and `kvtier bugreport` collects what a report"
    " needs"
)


def _say(error: Exception, advice: str, debug: bool) -> None:
    if debug:
        from traceback import print_exception

        print_exception(error)
    text = " ".join(str(error).split())
    named = text if isinstance(error, KvtierError | OSError) else f"{type(error).__name__}: {text}"
    priority = ""
    if "JOURNAL_STREAM" in os.environ:
        from kvtier_daemon.notify import ERROR, to_journal

        priority = ERROR if to_journal(2) else ""
    print(f"{priority}kvtier: {named}{advice}", file=sys.stderr)
