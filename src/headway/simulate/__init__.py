"""The simulator: workloads, recipes and fleets in virtual time."""
