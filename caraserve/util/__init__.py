"""Helpers without knowledge of the rest of the server."""
