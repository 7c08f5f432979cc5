"""`python -m kvtier_daemon.cli`: the same as the `kvtier` command, where that is not on the path."""

from kvtier_daemon.cli import main

main()
