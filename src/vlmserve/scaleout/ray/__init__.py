"""Ray finds machines for workers and gateways, and starts them again; requests do not pass through it."""
