"""One object per kind of device, chosen when a model is loaded."""
