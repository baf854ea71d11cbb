"""The CPU backend: `backend` is its interface, `forward` the layers, `handoff` what is sent to CPU LoRA workers."""
