"""The work of commands other than serving: benchmarks, verification, perplexity, routing plots, advice."""
