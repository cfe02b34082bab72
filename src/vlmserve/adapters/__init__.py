"""Adapters: reading PEFT's files, what they change in a model, and which of them are in memory."""
