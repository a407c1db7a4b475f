"""What is stored: the queue of accepted requests and the journal of served ones."""
