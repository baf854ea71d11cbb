"""Moves adapters between instances and keeps them on disk."""
