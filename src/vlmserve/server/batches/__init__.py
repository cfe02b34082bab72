"""Batches on the server: files of requests that are answered while nothing else needs the engine."""
