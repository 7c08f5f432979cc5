"""The remote tier: blocks that hosts share through an object store. It is beside the tier below memory."""
