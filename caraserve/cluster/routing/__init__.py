"""Chooses the instance that answers a request."""
