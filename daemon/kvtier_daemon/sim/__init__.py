"""Simulates a trace of requests with caches of other sizes and policies. Needs no daemon."""
