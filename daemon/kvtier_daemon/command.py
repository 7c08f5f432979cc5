"""The entry of the `kvtier` command: an interrupt ends it silently, also while it imports the commands."""

import signal


def main() -> None:
    """Run the command that the words of the process name. Until it is imported, an interrupt ends the
    process by the signal: Python would print a traceback of the imports. A shell reports both as 130."""
    usual = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # else ignored, as by nohup
    if usual:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvtier_daemon.cli import main as run

    if usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
