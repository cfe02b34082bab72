"""Requests and responses of the API: requests are pydantic models, responses msgspec structs."""
