"""From bytes to pixels: fetching, decoding and preprocessing images within limits."""
