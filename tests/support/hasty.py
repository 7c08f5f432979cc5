"""A daemon whose times and sizes are those of a test. Run as a program: `hasty.py VALUES serve ...`.

It imports nothing of the tests, so that each start is fast.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from kvtier_daemon.tiers.cold import index, index_child, index_process


def hurry(**values: float) -> None:
    """Replace constants of the daemon's modules, such as times and sizes that are large for a test. Each must
    exist."""
    modules = [one for name, one in sys.modules.items() if name.startswith("kvtier_daemon.")]
    for name, value in values.items():
        holders = [module for module in modules if name in vars(module)]
        assert holders, name
        for module in holders:
            setattr(module, name, value)


def of_index(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values that a process of an index needs."""
    return {name: value for name, value in values.items() if hasattr(index, name)}


def hurry_all(values: Mapping[str, float]) -> None:
    """Replace constants of a daemon that has been imported, and of the processes of its indexes."""
    if not values:
        return  # each fork would copy the pages of all modules' names
    hurry(**values)
    if needed := of_index(values):
        index_process.COMMAND = (sys.executable, __file__, json.dumps(needed), "index")  # type: ignore[misc]


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder, which a daemon does not have
    given, program = json.loads(sys.argv.pop(1)), sys.argv[1]
    if program == "index":
        del sys.argv[1]
        hurry(**given)
        index_child.main()
    import kvtier_daemon.app  # noqa: F401 - its constants are replaced
    from kvtier_daemon.cli import main

    hurry_all(given)
    main()
