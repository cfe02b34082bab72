"""How the built-in model is trained."""
