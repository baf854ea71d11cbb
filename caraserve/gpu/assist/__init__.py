"""Assisted prefill: hand-over of layers to CPU LoRA workers."""
