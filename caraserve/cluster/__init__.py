"""Instances that serve as one: membership, shared state, routing and placement, with no scheduler process."""
