"""From bytes to pixels: fetching, decoding and preprocessing pictures within limits."""
