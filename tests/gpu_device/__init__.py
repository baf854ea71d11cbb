"""Checks that need a device: stages `correct` and `protocol` of `scripts/gpu_check`.

They are plain functions, not pytest tests, because a machine with a GPU may have no pytest. They run on an emulated
device in tests/laboratory/gpu/test_gpu_check.py.
"""
