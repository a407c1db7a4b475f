"""What the SQLite files of queue, batches and journals share: connections, damage, write-ahead logs."""
