"""`caraserve bench lora`: kernels, hand-overs and threads of the CPU LoRA path."""
