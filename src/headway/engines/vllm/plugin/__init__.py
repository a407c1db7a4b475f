"""Inside vLLM's process: the scheduler hook, its control channel, KV policies."""
