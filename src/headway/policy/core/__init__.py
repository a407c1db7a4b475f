"""The decision core: controller, cluster state, ranks, and what an engine can do."""
