"""Attention: `base` is the interface, and each other file a backend; `gpu/builder.py` chooses one."""
