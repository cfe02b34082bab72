"""GGUF checkpoints (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""
