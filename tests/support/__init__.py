"""What several tests use: daemons, engines, disks that fail, and data."""
