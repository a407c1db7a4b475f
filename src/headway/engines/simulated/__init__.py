"""The simulated engine: vLLM's scheduling on columns."""
