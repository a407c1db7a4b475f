"""Kubernetes' workload catalog on a fleet, and coding agents in a closed loop: `headway bench catalog|agents`."""
