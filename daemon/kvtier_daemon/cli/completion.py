"""`kvtier completion`: prints the script that completes commands and flags in a shell."""

from typing import Annotated, Literal

import typer

from kvtier_daemon.cli.flags import flag


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(metavar="bash|zsh|fish")],
    json: Annotated[bool, flag("--json", "Print one JSON object with the script.")] = False,
) -> None:
    """Print a shell script that completes commands and flags.

    bash: `eval "$(kvtier completion bash)"` in ~/.bashrc. zsh: the same in ~/.zshrc. fish:
    `kvtier completion fish > ~/.config/fish/completions/kvtier.fish`.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    from kvtier_daemon.cli import COMPLETE

    script = get_completion_script(prog_name="kvtier", complete_var=COMPLETE, shell=shell)
    if json:
        from json import dumps

        typer.echo(dumps({"shell": shell, "script": script}))
    else:
        typer.echo(script)
