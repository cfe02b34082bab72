"""Commands' work besides serving: benchmarks, verification, perplexity, routing plots, advice."""
