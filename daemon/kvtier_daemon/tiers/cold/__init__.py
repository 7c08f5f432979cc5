"""The cold tier: blocks in segment files on disks, from the decision to write one to its recovery."""
