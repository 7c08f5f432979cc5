"""The records and decisions of one tenant: spaces, blocks, leases, plans for the disk. No I/O, no clock."""

from kvtier_daemon.catalog.catalog import WHY_MISSED, Catalog, Found
from kvtier_daemon.catalog.leases import LeaseId, SessionId
from kvtier_daemon.catalog.spaces import KnownSpace
from kvtier_daemon.catalog.watch import SpaceWatch
from kvtier_daemon.catalog.writing import Granted

__all__ = [
    "WHY_MISSED",
    "Catalog",
    "Found",
    "Granted",
    "KnownSpace",
    "LeaseId",
    "SessionId",
    "SpaceWatch",
]
