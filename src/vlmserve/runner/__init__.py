"""Convert scheduled steps to tensors, run the model, and sample tokens."""
