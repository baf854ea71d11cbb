"""Tests. A package, so that no other installed package named `tests` hides it from `scripts/gpu_check`."""
