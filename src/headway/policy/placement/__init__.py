"""Which engine gets a request: what of its prompt each engine holds, and what it costs there."""
