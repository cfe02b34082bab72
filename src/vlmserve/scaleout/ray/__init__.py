"""Ray places and restarts workers and gateways; requests do not pass through it."""
