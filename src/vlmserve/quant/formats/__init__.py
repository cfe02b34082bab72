"""Checkpoint formats of quantized weights."""
