"""`LLM` and `AsyncLLM`: calls from Python, without a server."""
