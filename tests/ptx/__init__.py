"""Executes what Triton compiles for NVIDIA's GPUs, on a machine that has none."""
