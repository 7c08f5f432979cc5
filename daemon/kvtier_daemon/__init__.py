"""The daemon and its commands."""


def main() -> None:
    """Run the `kvtier` command. While it imports, an interrupt ends the process by the signal, and prints no
    traceback of the imports; a shell reports that as 130 too."""
    import signal

    # Otherwise it is ignored, as by nohup.
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvtier_daemon.cli import main as run

    if usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
