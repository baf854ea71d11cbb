"""Measures what this machine and model cost, and applies the profile."""
