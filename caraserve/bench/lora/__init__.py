"""`caraserve bench lora`: kernels, hand-offs and threads of the CPU LoRA path."""

PARTS = ("kernels", "round-trip", "threads", "gpu")
