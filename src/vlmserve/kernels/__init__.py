"""Kernels that devices run: attention backends, matmuls, norms, sampling."""
