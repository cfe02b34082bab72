"""Adapters: PEFT checkpoints, their changes to a model's layers, and the adapters in memory."""
