"""Explain, report, advise, simulate and sweep, and comparisons of real servers."""
