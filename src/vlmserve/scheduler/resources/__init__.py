"""Requests hold resources while they run: memory, images and adapters. All answer the same questions."""
