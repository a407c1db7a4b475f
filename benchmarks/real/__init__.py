"""Benchmarks of the real gateway, mostly with real engines."""
