"""Measures real engines: profiles, KV sizes, starts, comparisons."""
