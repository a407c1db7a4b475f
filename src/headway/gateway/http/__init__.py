"""Connections: limits of number, size and time, below the endpoints."""
