"""What a GPU computes, and how fast: the stages of `scripts/gpu_check`."""
