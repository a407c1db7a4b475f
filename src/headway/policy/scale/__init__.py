"""How many engines of a model keep its promises: from the traffic seen, the latency law and the start's seconds."""
