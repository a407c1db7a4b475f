"""Observation: metrics, the journal, traces, logs, usage and the history of the dashboard."""
