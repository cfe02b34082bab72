"""Answers many rows of a file or folder; continues after interruptions."""
