"""Quantization: methods that quantize weights, and which layers they quantize."""
