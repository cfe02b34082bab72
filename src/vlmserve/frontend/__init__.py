"""The frontend: request preparation and the engine client."""
