"""Benchmarks: load generation, measurement, simulation, the tables of the papers."""
