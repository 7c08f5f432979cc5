"""What a trace of requests would have had of caches of other sizes and policies. No daemon is needed."""
