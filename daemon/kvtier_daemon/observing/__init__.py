"""What the daemon reports: metrics, health, events, the status page, and the measurements for them."""
