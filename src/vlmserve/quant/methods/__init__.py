"""Methods that quantize a weight."""
