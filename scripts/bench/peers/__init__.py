"""Compares `caraserve serve` with llama.cpp's server and vLLM for CPUs, over HTTP, on one machine in one run."""
