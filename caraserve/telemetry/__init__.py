"""Metrics, traces, logs and progress."""
