"""Benchmarks on real engines and real code."""
