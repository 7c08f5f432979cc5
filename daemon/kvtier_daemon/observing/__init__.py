"""What others see of the daemon: metrics, its health, a page; and what is measured for them alone."""
