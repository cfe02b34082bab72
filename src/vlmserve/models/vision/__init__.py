"""Vision towers."""
