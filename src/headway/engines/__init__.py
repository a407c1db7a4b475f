"""Engines: the simulated one, and vLLM."""
