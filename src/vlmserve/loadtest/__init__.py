"""Load tests of any server with an OpenAI-compatible API."""
