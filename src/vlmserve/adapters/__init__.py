"""Adapters: PEFT checkpoints, their changes to layers, and the adapters in memory."""
