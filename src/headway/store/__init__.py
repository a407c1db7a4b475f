"""Storage: the queue of accepted requests, files and batches, and the journal of served requests."""
