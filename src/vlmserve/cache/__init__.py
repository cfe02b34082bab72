"""Bookkeeping of KV blocks; no tensor math."""
