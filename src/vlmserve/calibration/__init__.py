"""Calibrated quantization: run prompts through a model layer by layer, and quantize each layer."""
