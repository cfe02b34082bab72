"""What stands between the API and an engine: request preparation and the engine client."""
