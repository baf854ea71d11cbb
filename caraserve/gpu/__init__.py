"""The CUDA backend: kernels, streams, the device pool and the transfers into it."""
