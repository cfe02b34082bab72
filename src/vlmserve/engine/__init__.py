"""The engines: the real one, the mock one, and the process that hosts either."""
