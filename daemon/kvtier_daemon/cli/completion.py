"""`kvtier completion`: what a shell needs to complete commands and flags."""

from enum import StrEnum
from typing import Annotated

import typer


class Shell(StrEnum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object with the script.")] = False,
) -> None:
    """Print a script that completes commands and flags.

    bash: `eval "$(kvtier completion bash)"` in ~/.bashrc. zsh: the same in ~/.zshrc. fish:
    `kvtier completion fish > ~/.config/fish/completions/kvtier.fish`.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    from kvtier_daemon.cli import COMPLETE

    script = get_completion_script(prog_name="kvtier", complete_var=COMPLETE, shell=shell.value)
    if json:
        from json import dumps

        typer.echo(dumps({"shell": shell.value, "script": script}))
    else:
        typer.echo(script)
