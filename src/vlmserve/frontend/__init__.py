"""Request preparation and the engine client."""
