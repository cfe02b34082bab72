"""Between users and an engine: requests made ready, and the client of an engine process."""
