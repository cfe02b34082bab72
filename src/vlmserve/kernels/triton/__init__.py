"""Kernels in Triton, for NVIDIA's GPUs. Only imported when a device asks for it."""
