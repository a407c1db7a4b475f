"""Backends for units outside the LLM: sandboxes, models in worker processes, others by plug-in."""
