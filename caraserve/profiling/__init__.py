"""Measures machine profiles and applies them."""
