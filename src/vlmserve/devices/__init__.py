"""What computes a model: one object per kind of device, chosen when a model is loaded."""
