"""Headway: every LLM request on time, in front of vLLM and inside it."""

__version__ = "0.1.0"
