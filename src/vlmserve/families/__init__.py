"""Model families: one module each says all that its checkpoints leave to the server. Imports no torch."""
