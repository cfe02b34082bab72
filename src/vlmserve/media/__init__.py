"""Fetch, decode and preprocess images, videos and documents within limits."""
