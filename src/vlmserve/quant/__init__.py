"""Quantization: methods that turn weights into ones of few bits, and which layers they turn."""
