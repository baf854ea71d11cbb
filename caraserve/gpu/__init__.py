"""The CUDA backend: `backend` is its interface, `forward/decoder` the layers, `assist/` the hand-off to LoRA workers."""
