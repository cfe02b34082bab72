"""Ray places workers and gateways on machines and restarts them; requests do not pass through it."""
