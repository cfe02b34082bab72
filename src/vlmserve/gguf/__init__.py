"""Checkpoints in GGUF, one file with everything (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""
