"""Methods that quantize weights, and which layers they quantize."""
