"""Settings: declaration, parsing, validation, and other servers' names for them."""
