"""Kernels in Triton, for NVIDIA's GPUs. Nothing here is imported before a device asks for it."""
