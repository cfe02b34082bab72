"""Calibrated quantization, layer by layer."""
