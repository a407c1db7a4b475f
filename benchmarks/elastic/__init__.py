"""Fleets whose number of engines follows the load: Headway's rule beside fixed fleets and other autoscalers."""
