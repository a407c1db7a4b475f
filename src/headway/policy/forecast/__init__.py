"""Forecasts: output lengths, and the latency of an iteration."""
