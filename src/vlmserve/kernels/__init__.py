"""What devices compute: attention backends, matmuls, norms, sampling. Kernels know nothing of layers."""
