"""Assisted prefill: hand-off of layers to CPU LoRA workers."""
