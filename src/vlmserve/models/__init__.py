"""Model families: specs, decoder, vision towers, weights."""
