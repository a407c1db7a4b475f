"""Sessions with a PostgreSQL server, on which the queue and the batches are tables."""
