"""Serves clients: connections, requests, answers."""
