"""KV memory: the block budget, reservations and loans, two-ended blocks, the cost of a preemption."""
