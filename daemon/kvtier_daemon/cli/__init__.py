"""The `kvtier` command: one file per command; only the file of the executed command is imported.

A command's file has a function of its name, or a typer app if it has subcommands. It is imported when that
command runs, so that `kvtier --help` stays fast. Expensive imports are inside functions.
"""

import errno
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from io import TextIOWrapper
from resource import RLIM_INFINITY, RLIMIT_FSIZE, getrlimit
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvtier.errors import KvtierError, Unavailable
from kvtier_daemon.cli.flags import plain

EXIT_ERROR = 2
EXIT_UNAVAILABLE = 3
EXIT_BUG = 70  # EX_SOFTWARE of sysexits
EXIT_LATER = 75  # EX_TEMPFAIL of sysexits
EXIT_INTERRUPTED = 130  # the status that a shell reports for SIGINT
EXIT_UNREAD = 141  # the status that a shell reports for SIGPIPE
IMPORTED = 50_000  # objects between two garbage collections: these took 20 ms of a daemon's imports
USUAL = gc.get_threshold()
COMPLETE = "_KVTIER_COMPLETE"  # set by a shell that requests completions

# Each with the first line of its help; a test compares them.
COMMANDS = {
    "bench": "Measure this machine, or compare two results.",
    "bugreport": "Collect the data for a bug report in one file.",
    "calibrate": "Measure a model for the lossy codecs, and write its profile.",
    "completion": "Print a shell script that completes commands and flags.",
    "config": "Check, show and compare configurations.",
    "demo": "Run a sample chat service with a small daemon, and show the gain.",
    "doctor": "Examine this machine, the configuration and the daemon.",
    "explain": "Show why a lookup hit or missed, or where blocks are.",
    "fsck": "Check cold directories that no daemon is using.",
    "hold-gpu": "Hold memory of one GPU for copies of blocks, until interrupted.",
    "install-service": "Write systemd units, and print the commands to run afterwards.",
    "keys": "List the spaces and what they hold, or the keys of one.",
    "monitor": "Show events as they happen, until interrupted.",
    "purge": "Forget blocks permanently, and erase them from the disks.",
    "record": "Record lookups as a trace for kvtier sim.",
    "reload": "Apply the changes of the configuration that need no restart.",
    "serve": "Run the daemon until it is stopped.",
    "sim": "Simulate a trace of requests with tiers of other sizes.",
    "size": "Show how much KV cache a model needs, and when loads help.",
    "status": "Show what the daemon holds, its hits and its misses.",
    "tier": "Drain a tier, switch it off or on.",
    "top": "Watch tiers, hits and misses, transfers and clients.",
}


class Commands(TyperGroup):
    """Imports a command's file when that command runs."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        names: dict[str, Any] = dict.fromkeys(COMMANDS)
        self.commands = names  # typer suggests the nearest of these names

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader has exited, as `head` does: not an error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_UNREAD) from None

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return loaded(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@cache
def loaded(name: str) -> Any:
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
    help="Store KV caches of LLM engines in memory and on disk.",
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
        bool, typer.Option("--debug", help="Show tracebacks. May stand anywhere on the line.")
    ] = False,
) -> None:
    pass


@cache
def program() -> Any:
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit. Status: 0 success, 1 it found a problem, 2 refused or invalid usage, 3 no
    usable daemon, 70 internal error, 75 another start may succeed, 130 interrupted, 141 the reader of the
    output has exited.

    Every error is one line on stderr; with --debug a traceback comes before it.
    """
    if isinstance(sys.stdout, TextIOWrapper):  # names of models in a locale that cannot print them
        sys.stdout.reconfigure(errors="replace")
    gc.set_threshold(IMPORTED)
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    if COMPLETE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    try:
        program()(args=[word for word in words if word != "--debug"], prog_name="kvtier")
    except KvtierError as error:
        lacks = _lacks_threads(error.__cause__)
        _say(error, THREADS if lacks else "", debug)
        refused = EXIT_LATER if lacks or getattr(error, "passes", False) else EXIT_ERROR
        sys.exit(EXIT_UNAVAILABLE if isinstance(error, Unavailable) else refused)
    except OSError as error:
        _say(error, _advice(error), debug)
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:  # before or after what typer runs
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - the last one who could say it in a line
        lacks = _lacks_threads(error)
        _say(error, THREADS if lacks else BUG, debug)
        sys.exit(EXIT_LATER if lacks else EXIT_BUG)
    finally:
        gc.freeze()  # skips the last garbage collection at exit, which takes 9 ms
        collect_as_usual()


def collect_as_usual() -> None:
    """The imports are over: collect garbage as often as Python does. Such collections are short."""
    gc.set_threshold(*USUAL)


BUG = (
    "; this is an internal error of kvtier: --debug shows the traceback, and `kvtier "
    "bugreport` collects what a report needs"
)


THREADS = (
    "; a limit on threads is reached: raise `ulimit -u`, TasksMax= of the unit, or the container's "
    "limit of pids"
)


def _lacks_threads(error: BaseException | None) -> bool:
    """Return whether Python or the native module could not start a thread."""
    said = str(error) if isinstance(error, RuntimeError) else ""
    return "can't start new thread" in said or os.strerror(errno.EAGAIN) in said


def _advice(error: OSError) -> str:
    """Say which limit a file exceeds: the error alone does not tell it from one of the file system."""
    most = getrlimit(RLIMIT_FSIZE)[0]
    if error.errno != errno.EFBIG or most == RLIM_INFINITY:
        return ""
    return f"; `ulimit -f` limits files to {most // 1024} KiB here: raise it, `ulimit -f unlimited`"


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
    with suppress(OSError):  # a script sees the status although the message cannot be written
        print(f"{priority}kvtier: {named}{advice}", file=sys.stderr)
