"""`python -m kvtier_daemon.cli`: the `kvtier` command if it is not on the path."""

from kvtier_daemon.cli import main

main()
