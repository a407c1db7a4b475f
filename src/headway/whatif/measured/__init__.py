"""Measurements of real engines: profiles, KV sizing, starts, comparisons."""
