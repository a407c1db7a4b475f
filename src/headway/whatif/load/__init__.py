"""Generates load and computes metrics of the recorded requests."""
