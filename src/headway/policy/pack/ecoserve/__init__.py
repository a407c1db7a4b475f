"""EcoServe (section 3): decoupled queues, exact allocation, KVC pipelining."""
