"""SQLite files, as the queue, batches and journals have them: connections, damage, write-ahead logs."""
