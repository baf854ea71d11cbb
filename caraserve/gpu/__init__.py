"""The CUDA backend: `backend` is its interface, `forward/decoder` the layers, `assist/` hand-offs to LoRA workers."""
