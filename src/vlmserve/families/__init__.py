"""Model families: a module each, with everything that differs between them."""
