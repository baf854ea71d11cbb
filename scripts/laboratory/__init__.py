"""Experiments that need a checkout: figures of papers, the stages of `scripts/gpu_check`, fleets of real instances."""
