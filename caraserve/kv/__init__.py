"""Paged KV: blocks and prefix reuse."""
