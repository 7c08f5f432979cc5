"""Which blocks to read from the disks, in which order, and which to recompute."""

from kvtier_daemon.planning.planner import PATIENCE_S, Planner
from kvtier_daemon.planning.read_order import COMPUTE, LOADS, WHY, DiskLink, Verdict

__all__ = ["COMPUTE", "LOADS", "PATIENCE_S", "WHY", "DiskLink", "Planner", "Verdict"]
