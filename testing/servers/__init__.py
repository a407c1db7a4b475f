"""Servers that benchmarks and tests start for themselves."""
