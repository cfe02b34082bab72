"""Benchmarks, verification, perplexity, routing plots and advice."""
