"""The stages of `scripts/gpu_check`: they check a GPU's results and measure its speed."""
