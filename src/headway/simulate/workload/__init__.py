"""Workloads: arrivals, lengths, classes of traffic, recorded traces."""
