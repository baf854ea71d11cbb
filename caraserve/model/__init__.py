"""The base model: its shape and its weights."""
