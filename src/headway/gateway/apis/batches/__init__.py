"""OpenAI's files and batches: stored on disk, checked line by line, run behind interactive work."""
