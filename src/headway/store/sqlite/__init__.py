"""Shared parts of the SQLite files of queue, batches and journals: connections, damage, write-ahead logs."""
