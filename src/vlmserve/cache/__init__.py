"""Bookkeeping of caches, without tensors."""
