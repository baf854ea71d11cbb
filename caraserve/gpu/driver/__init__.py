"""The CUDA driver: its calls, devices, streams and compiled modules."""
