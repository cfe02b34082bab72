"""Batches on the server: files of requests that are answered while the engine has nothing else to do."""
