"""Stored conversations, items, responses, files and batches, in SQLite or PostgreSQL."""
