"""Bodies of the API: requests are pydantic models, responses are msgspec structs."""
