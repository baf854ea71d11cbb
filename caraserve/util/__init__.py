"""Helpers that know nothing of serving."""
