"""vLLM from outside: start, supervise and talk to its process."""
