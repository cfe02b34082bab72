"""Calibration: prompts through a model, layer by layer, and weights that are quantized on the way."""
